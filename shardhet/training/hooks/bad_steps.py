"""What may happen after a bad step; configurations name it without torch."""

from enum import Enum


class OnBadStep(Enum):
    """What happens after a bad step."""

    STOP = "stop"  # the run fails on every rank
    # Its gradients are dropped; parameters and optimizer stay as they were.  Buffers that the
    # forward changes, as those of BatchNorm, have seen the batch.
    SKIP = "skip"
    ROLL_BACK = "roll_back"  # skip, load the last checkpoint, go on with the batch after it
