"""What a model costs: counted without any device, or measured on the devices at hand.

describe   the units of a model, their FLOPs and bytes           (fake tensors)
measure    seconds, bytes and links of this machine              (all ranks together)
"""
