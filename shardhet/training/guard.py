"""Recognizes steps whose loss or gradient norm is not finite, or far above the usual.

As a hook it judges each step before the optimizer makes use of its gradients.  A bad step has
none then: an optimizer changes nothing where gradients are None.

It judges numbers that are the same on all ranks, by a history that is the same on all ranks, so
that all ranks decide alike without asking each other.
"""

import logging
from collections import deque
from collections.abc import Mapping
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

from shardhet.comm.calls import HostCopy
from shardhet.training.hooks.bad_steps import OnBadStep
from shardhet.training.hooks.checkpoints import SaveCheckpoints
from shardhet.training.hooks.hooks import After, Hook, Hooks

NUM_STEPS_REMEMBERED = 50
NUM_STEPS_TO_KNOW = 10  # before a spike can be recognized


class Unchecked(NamedTuple):
    """A step that has not been judged, because the device may not have its norm yet."""

    step: int
    loss: float | None
    norm: HostCopy


class BadStepGuard(Hook):
    """Judges the steps of a run: as one of its hooks, or as the ``guard`` of a ``Trainer``.

    The norm is that which ``model.clip_grad_norm_`` returns, else of the gradients as they are.
    """

    state_name = "guard"

    def __init__(
        self,
        on_bad_step: OnBadStep = OnBadStep.STOP,
        *,
        spike_factor: float | None = None,
        max_in_a_row: int = 10,
    ) -> None:
        """Create the hook.

        Args:
            on_bad_step: ``ROLL_BACK`` needs ``SaveCheckpoints`` among the hooks.
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
        self.unchecked: Unchecked | None = None  # the last step, if nobody has judged it
        self._why: str | None = None  # the step in progress is bad

    def begin(self, run: Hooks) -> None:
        self._run, self._saves = run, run.find(SaveCheckpoints)
        self._judged = run.model.step
        if self.looks_before_update and run.has_float16:
            raise ValueError(
                "BadStepGuard: losses are scaled in float16, where GradScaler skips steps "
                f"itself, but on_bad_step={self.on_bad_step.name} or spike_factor would, too. "
                "Leave them out, or train in bfloat16."
            )
        if self._saves is not None:
            self._saves.is_rolled_back_to |= self.rolls_back
        elif self.rolls_back:
            raise ValueError(
                "BadStepGuard: on_bad_step is ROLL_BACK but the hooks have no SaveCheckpoints. "
                "Add it, or set SKIP; HetTrainer skips only."
            )
        run.model.skip_bad_loss(skips=self.on_bad_step is not OnBadStep.STOP)
        self._handles = [
            each.register_step_pre_hook(self._before_update) for each in run.optimizers
        ]

    def end(self, error: BaseException | None) -> None:
        self._run.model.skip_bad_loss(skips=False)
        for each in self._handles:
            each.remove()
        if error is None:
            self.check_last_step()

    def _before_update(self, *_: Any) -> None:
        """Judge the step, before the first of the optimizers makes use of its gradients."""
        model, loss = self._run.model, self._run.model.mean_so_far
        if self._judged == model.step:
            return
        self._judged = model.step
        norm = model.grad_norm if model.grad_norm is not None else model.clip_grad_norm_(inf)
        self._why = self.look(model.step, loss, HostCopy(norm))
        if self._why is not None:
            model.zero_grad()

    def look(self, step: int, loss: float | None, norm: HostCopy) -> str | None:
        """Why the step is bad, or None. Judged at once if a bad update has to be prevented;
        else later, in ``check_last_step``, which the next step calls at the latest.
        """
        self.check_last_step()
        if self.looks_before_update:  # an accelerator goes idle: the host cannot run ahead
            return self.judge(loss, float(norm.read()))
        self.unchecked = Unchecked(step, loss, norm)
        return None

    def after_step(self, step: int, loss: float | None) -> After | None:
        """Say that a bad step was skipped, and roll back if that is wanted.

        Raises ``FloatingPointError`` if there were too many.
        """
        why, self._why = self._why, None
        if why is None and loss is not None and not isfinite(loss):  # without an update
            why = f"the loss is {loss}"
        if why is None:
            return None
        self.check(step, why)
        answer = skipped(self._run, step, loss, why, self._saves if self.rolls_back else None)
        self._judged = self._run.model.step
        return answer

    def check_last_step(self) -> None:
        """Judge the last step by its gradient norm, if that has not been read yet.

        If a bad step stops the run, the norm of each step is read in the next one, before its
        update: by then the device has it, and the host does not stand still for it.  Call it
        before you save or use what the step has made.  Raises ``FloatingPointError``.
        """
        last, self.unchecked = self.unchecked, None
        if last is not None:
            why = self.judge(last.loss, float(last.norm.read()))
            if why is not None:
                self.check(last.step, why)

    @property
    def rolls_back(self) -> bool:
        """Whether a checkpoint is loaded after a bad step."""
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
        if not isfinite(value):
            return f"the {name} is {value}"
        if self._spike_factor is None or len(history) < NUM_STEPS_TO_KNOW:
            return None
        usual = median(history)
        if value > self._spike_factor * usual > 0:
            return f"the {name} is {value:.4g}, {value / usual:.1f} times the usual {usual:.4g}"
        return None


def skipped(
    run: Hooks, step: int, loss: float | None, why: str, saves: SaveCheckpoints | None
) -> After | None:
    """Say that a step changed nothing, and roll back to what was saved, if there is any."""
    said = f"step {step} was skipped: {why}"
    run.log(step, {"loss": loss, "is_skipped": 1.0})
    if saves is not None:
        to_step = saves.roll_back()
        said += f"; rolled back to step {to_step}, on with the batch after it"
        run.forget_peak_memory()
        run.on_roll_back(step, to_step)
    run.say(said, logging.WARNING)
    return None if saves is None else After.ROLLED_BACK
