"""The scale of the loss in float16, where small gradients would otherwise vanish.

Gradients are computed for the loss times a scale, summed in float32, and divided by the scale
before anything looks at them.  A step in which one overflows leaves parameters and optimizer as
they were and halves the scale; every 2,000 steps without one double it (Micikevicius et al.,
"Mixed Precision Training", 2018, section 3.2).  ``torch.amp.GradScaler`` does all that, and
HetFSDP has all ranks agree on what overflowed.
"""

from typing import Self

import torch
from torch import Tensor

from shardhet.comm.calls import HostCopy

FIRST_SCALE = 2.0**16
# Float16's smallest normal number: with less, the loss itself leaves the format.
LEAST_SCALE = 2.0**-14


class LossScaler(torch.amp.GradScaler):
    """One for each trainer; the same scale on every rank."""

    def __init__(self, device: torch.device, *, first_scale: float = FIRST_SCALE) -> None:
        """For a model on ``device``."""
        super().__init__(device.type, init_scale=first_scale)
        self._one = torch.ones((), device=device)
        self.begin_step()

    def scaled(self, loss_sum: Tensor) -> Tensor:
        """The loss, multiplied by the scale of the step that it begins."""
        return self.begin_step().scale(loss_sum)

    def begin_step(self) -> Self:
        """This one, whose scale is that of a step from now on."""
        # Copied before backward is launched, so that reading it waits for forward at most.
        self._of_step = HostCopy(self.scale(self._one))
        return self

    @property
    def step_scale(self) -> float:
        """Of this step's loss."""
        return float(self._of_step.read())

    def end_step(self, step: int, *, is_finite: bool = False) -> str | None:
        """Set the scale of the next step; why this one has changed nothing, if it has not.

        Without a finite norm, which shows that nothing overflowed, the host waits for the
        optimizer's step.  Raises ``FloatingPointError`` if gradients overflow however small
        the scale is.
        """
        self.update()
        if is_finite:
            return None
        now, before = self.get_scale(), self.step_scale
        if now >= before:
            return None
        check_scale(now, step, instead="precision=BF16 or FP32")
        return (
            f"a gradient overflows in float16 at a loss scale of {before:g}; now it is {now:g}"
        )


def check_scale(scale: float, step: int, *, instead: str) -> None:
    """Raise ``FloatingPointError`` if gradients overflow however small the scale is.

    ``instead`` is what to set for another precision.
    """
    if scale < LEAST_SCALE:
        raise FloatingPointError(
            f"step {step}: gradients are not finite in float16, although the loss is "
            f"multiplied by no more than {2 * scale:g}. Set {instead}, lower the learning "
            "rate, or look for bad samples."
        )
