"""Boxes of limits on phases: where something better may be."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardhet.planner.problem.problem import Floats, Problem

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Limits between the values at indices ``lo`` and ``hi``, both included."""

    lo: Index
    hi: Index
    total_s: float  # no choice in the box has phases that sum to less
    optimizer_s: float  # no choice in the box has a faster optimizer

    @property
    def is_point(self) -> bool:
        """Whether it is one set of limits."""
        return self.lo == self.hi

    @property
    def bound_s(self) -> float:
        """A bound that no choice in the box can beat."""
        return self.total_s + self.optimizer_s


class Grid:
    """The values that a limit on each phase may have, ascending."""

    def __init__(self, problem: Problem) -> None:
        self.values: list[Floats] = [
            np.unique(cost[np.isfinite(cost)]) for cost in problem.costs
        ]

    @property
    def last(self) -> Index:
        """The index of no limits."""
        return tuple(len(values) - 1 for values in self.values)

    def index_of(self, phases_s: Sequence[float]) -> Index:
        """Of the least values that are no smaller."""
        pairs = zip(self.values, phases_s, strict=True)
        return tuple(int(np.searchsorted(values, limit_s)) for values, limit_s in pairs)

    def at(self, index: Sequence[int]) -> tuple[float, ...]:
        """The limits at an index."""
        return tuple(float(values[i]) for values, i in zip(self.values, index, strict=True))

    def middle(self, box: Box) -> Index:
        """The indices halfway between the corners, by value."""
        low, high = self.at(box.lo), self.at(box.hi)
        return self.index_of([(a + b) / 2 for a, b in zip(low, high, strict=True)])

    def halves(self, box: Box) -> list[Box]:
        """The two halves of the box, split across its longest edge."""
        low, high = self.at(box.lo), self.at(box.hi)
        d = int(np.argmax([b - a for a, b in zip(low, high, strict=True)]))
        middle_s = (low[d] + high[d]) / 2
        cut = int(np.searchsorted(self.values[d], middle_s, side="right")) - 1
        cut = min(max(cut, box.lo[d]), box.hi[d] - 1)
        return [
            replace(box, hi=with_entry(box.hi, d, cut)),
            replace(box, lo=with_entry(box.lo, d, cut + 1)),
        ]


def with_entry(index: Index, d: int, value: int) -> Index:
    """``index`` with another entry for phase ``d``."""
    return (*index[:d], value, *index[d + 1 :])
