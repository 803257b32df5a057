"""The best choice so far, and those that came close to it."""

from collections.abc import Sequence

import numpy as np

from shardhet.planner.problem.problem import Choice, Problem, Value

# Two objectives closer than this count as equal: the order of a float sum can matter as much.
RELATIVE_EPSILON = 1e-12
NUM_RUNNERS_UP = 6
RUNNER_UP_MARGIN = 0.01  # runners-up are at most this much slower than the best

Choices = tuple[Choice, ...]


class Incumbent:
    """What a search has found."""

    def __init__(
        self, problem: Problem, value: Value | None = None, cutoff_s: float = np.inf
    ) -> None:
        """``value`` is that of a choice which is kept elsewhere; None if there is none yet.

        Only choices whose objective is below ``cutoff_s`` are worth finding.
        """
        self.choices: Choices = ()
        self.value = value
        self._at_most_s = cutoff_s
        self._problem = problem
        self._good: dict[Choices, float] = {}  # objectives, good ones

    @property
    def seconds(self) -> float:
        """The time of phases and optimizer of the best choice, or of what is worth finding."""
        return self._objective_s - self._problem.fixed_s

    @property
    def _objective_s(self) -> float:
        return self._at_most_s if self.value is None else self.value.objective_s

    @property
    def target_s(self) -> float:
        """The time that a choice must stay below to be worth finding."""
        return self.seconds * (1 - RELATIVE_EPSILON)

    def offer(self, choices: Choices | None) -> bool:
        """Keep it if it is the best so far; returns whether there is room for the state."""
        value = None if choices is None else self._problem.evaluate(choices)
        if choices is None or value is None:
            return False
        if value.objective_s < self._objective_s:
            self.choices, self.value = choices, value
        if value.objective_s <= self._objective_s * (1 + RUNNER_UP_MARGIN):
            self._good.setdefault(choices, value.objective_s)
        return True

    def runners_up(self) -> Sequence[Choices]:
        """The choices that came closest to the best one, in order."""
        ranked = sorted(self._good, key=lambda each: self._good[each])  # ties keep their order
        return tuple(each for each in ranked if each != self.choices)[:NUM_RUNNERS_UP]
