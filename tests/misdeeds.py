"""What a rank may do in the middle of training that its peers must not wait for."""

import os
import signal
import time
from typing import Literal

Misdeed = Literal["stop", "loop", "sleep", "kill", "exit", "raise", "slow"]
CAUSE = "sample 17 is missing"  # what a rank that raises says


def commit(deed: Misdeed, *, slow_s: float = 0.0) -> None:
    """Do it here, as the rank at fault; "slow" returns after ``slow_s``, nothing else does."""
    if deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "loop":
        while True:
            pass
    if deed == "sleep":
        time.sleep(1000)
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "exit":
        os._exit(3)
    if deed == "raise":
        raise KeyError(CAUSE)
    time.sleep(slow_s)
