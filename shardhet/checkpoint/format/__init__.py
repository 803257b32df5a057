"""The files of a checkpoint: written, read, checked.

They lie as ``torch.distributed.checkpoint`` lays them out, and either side reads the other's.
Its own writer and reader (torch 2.13) are not used: they run code that a ``.metadata`` holds,
load a flipped bit without a word, lose the older checkpoint where a save over it fails, and
save in the background with collectives that no failure of a rank ends.
"""
