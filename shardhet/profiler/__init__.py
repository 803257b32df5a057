"""Find out what a model costs: count it without a device, or measure it on the devices at hand.

describe   the units of a model, their FLOPs and bytes           (fake tensors)
measure    seconds, bytes and links of this machine              (all ranks together)
"""
