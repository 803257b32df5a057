"""What a rank may do in the middle of training that its peers must not wait for."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

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


class Trap(torch.autograd.Function):
    """The identity, with something that happens in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spring: Callable[[], None]) -> Tensor:
        ctx.spring = spring
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.spring()
        return grads[0], None
