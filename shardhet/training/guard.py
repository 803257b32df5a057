"""Guard: recognizes steps whose loss or gradient norm is not finite, or far above the usual.

It judges numbers that are the same on all ranks, by a history that is the same on all ranks, so
that all ranks decide alike without asking each other.
"""

import math
from collections import deque
from collections.abc import Mapping
from enum import Enum
from statistics import median
from typing import Any

NUM_STEPS_REMEMBERED = 50
NUM_STEPS_TO_KNOW = 10  # before a spike can be recognized


class OnBadStep(Enum):
    """What happens after a bad step."""

    STOP = "stop"  # the run fails on every rank
    # Its gradients are dropped; parameters and optimizer stay as they were.  Buffers that the
    # forward changes, as those of BatchNorm, have seen the batch.
    SKIP = "skip"
    ROLL_BACK = "roll_back"  # skip, load the last checkpoint, go on with the batch after it


class Guard:
    """Judges the steps of a run."""

    def __init__(
        self,
        on_bad_step: OnBadStep = OnBadStep.STOP,
        *,
        spike_factor: float | None = None,
        max_in_a_row: int = 10,
    ) -> None:
        """Create a guard.

        Args:
            on_bad_step: what the trainer does; ``roll_back`` is done by the program around it.
            spike_factor: a loss or gradient norm above this many times the median of the last
                good steps is bad; None: only those that are not finite.
            max_in_a_row: so many bad steps in a row stop the run, whatever ``on_bad_step``.
        """
        self.on_bad_step = on_bad_step
        self._spike_factor = spike_factor
        self._max_in_a_row = max_in_a_row
        self._losses: deque[float] = deque(maxlen=NUM_STEPS_REMEMBERED)
        self._norms: deque[float] = deque(maxlen=NUM_STEPS_REMEMBERED)
        self._num_in_a_row = 0

    @property
    def rolls_back(self) -> bool:
        """Whether the program around the trainer loads a checkpoint after a bad step."""
        return self.on_bad_step is OnBadStep.ROLL_BACK

    @property
    def looks_before_update(self) -> bool:
        """Whether a step has to be judged before the optimizer makes use of its gradients."""
        return self.on_bad_step is not OnBadStep.STOP or self._spike_factor is not None

    def judge(self, loss: float | None, norm: float) -> str | None:
        """Why the step is bad; None, and it is remembered, if it is good."""
        reason = self._reason("loss", loss, self._losses)
        reason = reason or self._reason("gradient norm", norm, self._norms)
        if reason is None:
            self._num_in_a_row = 0
            if loss is not None:
                self._losses.append(loss)
            self._norms.append(norm)
        return reason

    def check(self, step: int, reason: str) -> None:
        """Raise ``FloatingPointError`` if the run has to stop after this bad step."""
        self._num_in_a_row += 1
        if self.on_bad_step is OnBadStep.STOP:
            raise FloatingPointError(
                f"step {step}: {reason}. Lower the learning rate, or look for bad samples; "
                "guard.on_bad_step=SKIP or ROLL_BACK goes on without the batch."
            )
        if self._num_in_a_row >= self._max_in_a_row:
            raise FloatingPointError(
                f"step {step}: {reason}, and so were the {self._num_in_a_row - 1} before it. "
                "Lower the learning rate, or go on from an earlier checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """What later steps are judged by, as plain numbers."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "num_in_a_row": self._num_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self._losses = deque(state["losses"], maxlen=NUM_STEPS_REMEMBERED)
        self._norms = deque(state["norms"], maxlen=NUM_STEPS_REMEMBERED)
        self._num_in_a_row = state["num_in_a_row"]

    def _reason(self, name: str, value: float | None, history: deque[float]) -> str | None:
        if value is None:
            return None
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if self._spike_factor is None or len(history) < NUM_STEPS_TO_KNOW:
            return None
        usual = median(history)
        if value > self._spike_factor * usual > 0:
            return f"the {name} is {value:.4g}, {value / usual:.1f} times the usual {usual:.4g}"
        return None
