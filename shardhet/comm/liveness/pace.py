"""How long the last steps of this process took, and so how long it may stand still."""

from collections import deque

from shardhet.comm.progress import progress

STEP_FACTOR = 5.0
NUM_STEPS_KEPT = 20


class Pace:
    """Times of the last steps, as the watch sees them when it looks."""

    def __init__(self) -> None:
        self._steps_at_start = self._num_steps_before = progress.num_steps
        self._step_s = 0.0  # since the end of the last one, declared phases excluded
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEPS_KEPT)

    @property
    def num_steps(self) -> int:
        """The number of steps that have ended since the watch began."""
        return progress.num_steps - self._steps_at_start

    def patience_s(self, least_s: float) -> float:
        """``STEP_FACTOR`` times the slowest of the last steps, ``least_s`` at least."""
        return max(least_s, STEP_FACTOR * max(self._step_times_s, default=0.0))

    def learn(self, passed_s: float) -> None:
        """Keep the times of the steps that have ended in the last ``passed_s``."""
        if not progress.phases:
            self._step_s += passed_s
        if progress.num_steps == self._num_steps_before:
            return
        num_ended = progress.num_steps - self._num_steps_before
        if self._num_steps_before > self._steps_at_start:  # the first one contains the set-up
            self._step_times_s.append(self._step_s / num_ended)
        self._num_steps_before = progress.num_steps
        self._step_s = 0.0
