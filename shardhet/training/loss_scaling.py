"""The scale of the loss in float16, where small gradients would otherwise vanish.

Gradients are computed for the loss times a scale, summed in float32, and divided by the scale
before anything looks at them.  A step in which one overflows leaves parameters and optimizer as
they were and halves the scale; every 2,000 steps without one double it (Micikevicius et al.,
"Mixed Precision Training", 2018, section 3.2).  ``torch.amp.GradScaler`` does all that, and
HetFSDP has all ranks agree on what overflowed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.calls import HostCopy

FIRST_SCALE = 2.0**16
# Float16's smallest normal number: with less, the loss itself leaves the format.
LEAST_SCALE = 2.0**-14


class LossScaler:
    """One for each trainer; the same scale on every rank."""

    def __init__(self, device: torch.device, *, first_scale: float = FIRST_SCALE) -> None:
        """For a model on ``device``."""
        self._scaler = torch.amp.GradScaler(device.type, init_scale=first_scale)
        self._one = torch.ones((), device=device)
        self._scale = HostCopy(self._scaler.scale(self._one))

    def scaled(self, loss_sum: Tensor) -> Tensor:
        """The loss, multiplied by the scale of the step that it begins."""
        return self.begin_step().scale(loss_sum)

    def begin_step(self) -> torch.amp.GradScaler:
        """Torch's own, whose scale is that of a step from now on."""
        # Copied before backward is launched, so that reading it waits for forward at most.
        self._scale = HostCopy(self._scaler.scale(self._one))
        return self._scaler

    @property
    def scale(self) -> float:
        """Of this step's loss."""
        return float(self._scale.read())

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and look for what overflowed.  Collective."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer step, unless a gradient has overflowed on any rank."""
        self._scaler.step(optimizer)

    def end_step(self, step: int, *, is_finite: bool = False) -> str | None:
        """Set the scale of the next step; why this one has changed nothing, if it has not.

        Without a finite norm, which shows that nothing overflowed, the host waits for the
        optimizer's step.  Raises ``FloatingPointError`` if gradients overflow however small
        the scale is.
        """
        self._scaler.update()
        if is_finite:
            return None
        now, before = self._scaler.get_scale(), self.scale
        if now >= before:
            return None
        check_scale(now, step, instead="precision=BF16 or FP32")
        return (
            f"a gradient overflows in float16 at a loss scale of {before:g}; now it is {now:g}"
        )

    @property
    def grad_scaler(self) -> torch.amp.GradScaler:
        """Torch's own, for programs that call it themselves."""
        return self._scaler

    def state_dict(self) -> dict[str, Any]:
        """The scale and what it depends on, as plain numbers."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self._scaler.load_state_dict(dict(state))


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
