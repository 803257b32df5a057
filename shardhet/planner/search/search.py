"""The best choice of candidates for every device, with a bound that proves how good it is.

Given a limit T_d on every phase, the oracle says whether the batch can be computed within them.
The answer is monotone in the limits.  So the search splits boxes of limits, lowest bound
first.  For a box [lo, hi]:

    nothing fits hi                  -> the box is empty
    raise each lo_d to the least value that fits with the others at hi
    bound = sum lo_d + T_optimizer   -> drop it where the incumbent is no worse
    split the longest edge in two

    T_backward
        |  .-------.            everything above and right of the staircase fits;
        |  |  :    |  hi        every box keeps the part of it that may beat the
        |  |  '-.  |            incumbent, and the corner lo is its bound
        |  |    '..|
        |  '-------'
        |  lo
        +---------------- T_forward

A box of one point leaves only the optimizer's time open, which grows with the largest share
of the state; a dynamic programme then settles what rounding leaves open.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from shardhet.planner.problem.problem import Ints, Limits, Problem, Value
from shardhet.planner.search import exact, few
from shardhet.planner.search.boxes import Box, Grid, with_entry
from shardhet.planner.search.incumbent import RELATIVE_EPSILON, Choices, Incumbent
from shardhet.planner.search.oracle import Oracle

DIAGONAL_STEPS = 24  # at most so many bisections along a box's diagonal for an incumbent
DIAGONAL_PRECISION = 1e-3  # of the sum of phases; splitting boxes does the rest better
OPTIMIZER_STEPS = 10  # bisections of the optimizer's time in a box
TOTAL_STEPS = 10  # bisections of the sum of all phases in a box


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How fine the search is, and when it stops without a proof; the same on every machine."""

    recompute_steps: int = 4  # steps in which the units of a kind become recomputed
    relative_gap: float = 0.0  # the search stops once it is this small
    max_scanned: float = 4e9  # candidates looked at by the oracle
    max_exact_additions: float = 3e8  # by dynamic programmes
    most_choices: int = 2**20  # times groups: all are looked at instead of a search


DEFAULT_EFFORT = Effort()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best choice found, and a bound that no choice can beat."""

    choices: Choices
    value: Value
    lower_bound_s: float
    num_scanned: float  # candidates looked at
    runners_up: tuple[Choices, ...] = ()  # the next best that were met, in order

    @property
    def relative_gap(self) -> float:
        """(objective - bound) / bound; 0 where optimality is proven."""
        return max(0.0, self.value.objective_s / self.lower_bound_s - 1)

    def originally(self, kept: Sequence[Ints]) -> "Found":
        """The same of the problem of which only the ``kept`` candidates were left."""

        def original(choices: Choices) -> Choices:
            return tuple(
                replace(each, candidate=int(kept[each.group][each.candidate]))
                for each in choices
            )

        runners_up = tuple(map(original, self.runners_up))
        return replace(self, choices=original(self.choices), runners_up=runners_up)


class NothingFitsError(Exception):
    """No choice meets the batch and the state, even without limits on time."""


class Bracket(NamedTuple):
    """Where the least thing that fits lies: ``low`` does not fit, ``high`` does."""

    low: float
    high: float

    def halved(self, fits: Callable[[Any], bool], at: float | None = None) -> "Bracket":
        """The half that holds it; ``at`` is where to cut, the middle by default."""
        middle = (self.low + self.high) / 2 if at is None else at
        return self._replace(high=middle) if fits(middle) else self._replace(low=middle)


def search(
    problem: Problem, effort: Effort = DEFAULT_EFFORT, *, cutoff_s: float = np.inf
) -> Found:
    """The best choice of candidates; deterministic.

    Raises ``NothingFitsError`` if nothing fits even in unlimited time, or nothing that is
    faster than ``cutoff_s``.
    """
    kept = few.that_add_up(problem)
    if not all(map(len, kept)):
        raise NothingFitsError
    found = _searched(problem.only(kept).in_common_parts(), effort, cutoff_s)
    return found.originally(kept)


def _searched(problem: Problem, effort: Effort, cutoff_s: float) -> Found:
    """``search`` without the candidates that are in no choice."""
    if few.are_few(problem, effort.most_choices):
        best = few.best_of_all(problem, cutoff_s)
        if best.value is None:
            raise NothingFitsError
        return Found(
            choices=best.choices,
            value=best.value,
            lower_bound_s=best.value.objective_s,
            num_scanned=float(problem.batch.size),
            runners_up=tuple(best.runners_up()),
        )
    first = _Search(problem, effort, cutoff_s=cutoff_s)
    box = first.root()
    if box is None:
        return first.found(np.inf)
    # A candidate beyond the first incumbent's limits cannot be part of a better choice.
    smaller, kept = problem.within(first.grid.at(box.hi))
    second = _Search(
        smaller,
        effort,
        value=first.best.value,
        cutoff_s=cutoff_s,
        num_scanned=first.oracle.num_scanned,
    )
    found = second.found(second.search_boxes(second.box_within(box, first))).originally(kept)
    return found if found.choices else replace(found, choices=first.best.choices)


class _Search:
    """One search: its effort so far, its incumbent, and the questions it asks."""

    def __init__(
        self,
        problem: Problem,
        effort: Effort,
        *,
        value: Value | None = None,
        cutoff_s: float = np.inf,
        num_scanned: float = 0.0,
    ) -> None:
        """``value`` and ``num_scanned`` are those of the search that this one continues."""
        self.problem = problem
        self.effort = effort
        self.best = Incumbent(problem, value, cutoff_s)
        self.oracle = Oracle(problem)
        self.oracle.num_scanned = num_scanned
        self.grid = Grid(problem)
        self.exact_additions = 0.0
        self.is_small = exact.is_small(problem)

    def root(self) -> Box | None:
        """Find a first incumbent; returns the box that may hold a better one, or None."""
        last = self.grid.last
        unlimited = Limits(self.grid.at(last))
        if not self.oracle.is_feasible(unlimited):
            raise NothingFitsError
        first = self.grid.index_of(
            [min_s * (1 - RELATIVE_EPSILON) for min_s in self.problem.least_phases_s()]
        )
        box = Box(first, last, sum(self.grid.at(first)), self.problem.least_optimizer_s)
        self.try_diagonal(box)
        if self.best.seconds == np.inf and self.can_afford_exact:
            self.best.offer(self.exact_choice(unlimited))
        tight = self.tightened(box)
        if tight is None:
            return None
        self.try_diagonal(tight)
        return self.tightened(tight)

    def box_within(self, box: Box, other: "_Search") -> Box:
        """A box of ``other``, a search of the same problem, in the indices of this search."""
        return replace(box, lo=self.grid.index_of(other.grid.at(box.lo)), hi=self.grid.last)

    def found(self, bound_s: float) -> Found:
        """The result, given the bound that the search has proven."""
        if self.best.value is None:
            raise NothingFitsError
        return Found(
            choices=self.best.choices,
            value=self.best.value,
            lower_bound_s=min(bound_s, self.best.seconds) + self.problem.fixed_s,
            num_scanned=self.oracle.num_scanned,
            runners_up=tuple(self.best.runners_up()),
        )

    def search_boxes(self, root: Box) -> float:
        """Split boxes until none can beat the incumbent; returns the bound reached."""
        order = count()
        boxes = [(root.bound_s, next(order), root)]
        unresolved_s = np.inf  # least bound of points that could not be settled
        while boxes:
            bound_s, _, box = heapq.heappop(boxes)
            enough_s = self.best.seconds / (1 + self.effort.relative_gap)
            is_exhausted = self.oracle.num_scanned > self.effort.max_scanned
            if min(bound_s, unresolved_s) >= min(self.best.target_s, enough_s) or is_exhausted:
                return min(bound_s, unresolved_s)
            if box.is_point:
                unresolved_s = min(unresolved_s, self.settle(box))
                continue
            for half in self.grid.halves(box):
                tight = self.tightened(half)
                if tight is not None:
                    for corner in (tight.lo, tight.hi, self.grid.middle(tight)):
                        self.best.offer(self.oracle.construct(Limits(self.grid.at(corner))))
                    heapq.heappush(boxes, (tight.bound_s, next(order), tight))
        return min(unresolved_s, self.best.seconds)

    # Boxes #

    def tightened(self, box: Box) -> Box | None:
        """The part of the box that may hold something better; None if there is none."""
        lo, hi = box.lo, box.hi
        min_s = sum(self.grid.at(lo))
        total_s = max(box.total_s, min_s)
        if total_s + box.optimizer_s >= self.best.target_s:
            return None
        for d, values in enumerate(self.grid.values):
            slack_s = self.best.target_s - box.optimizer_s - (min_s - values[lo[d]])
            last = int(np.searchsorted(values, slack_s, side="left")) - 1
            hi = with_entry(hi, d, min(hi[d], max(last, lo[d])))
        limits = self.limits(lo, hi, total_s, box.optimizer_s)
        if not self.holds_any(limits):
            return None
        for d in range(len(self.grid.values)):
            lo = with_entry(lo, d, self.least_index(d, lo[d], hi, limits))
        total_s = max(total_s, sum(self.grid.at(lo)))
        if total_s + box.optimizer_s >= self.best.target_s:
            return None
        limits = self.limits(lo, hi, total_s, box.optimizer_s)
        optimizer_s = self.least_optimizer_s(limits, box.optimizer_s)
        tight = Box(lo, hi, self.least_total_s(limits, total_s), optimizer_s)
        return tight if tight.bound_s < self.best.target_s else None

    def limits(
        self, lo: Sequence[int], hi: Sequence[int], total_s: float, optimizer_s: float
    ) -> Limits:
        """The limits that a choice in a box must stay within to beat the incumbent.

        Using a candidate costs at least ``max(lo_d, its cost)`` in every phase.
        """
        has_totals = len(self.grid.values) > 1 and self.best.seconds < np.inf
        return Limits(
            phases_s=self.grid.at(hi),
            optimizer_s=self.best.target_s - total_s,
            totals_s=self.problem.totals_above(self.grid.at(lo)) if has_totals else None,
            total_s=self.best.target_s - optimizer_s,
        )

    def may_fit(self, limits: Limits) -> tuple[bool, Choices | None]:
        """Whether something may fit the limits, and what was met on the way.

        Exact where devices are few: there half of one matters, and the dynamic programme
        costs no more than the relaxation.
        """
        if not self.oracle.is_feasible(limits):
            return False, None
        if not self.is_small:
            return True, None
        choices = self.exact_choice(limits)
        return choices is not None and self.problem.has_room(choices, limits), choices

    def fits(self, limits: Limits) -> bool:
        """``may_fit``, with what was met offered as the incumbent."""
        is_possible, found = self.may_fit(limits)
        self.best.offer(found)
        return is_possible

    def holds_any(self, limits: Limits) -> bool:
        """``fits``; where many devices leave rounding open it is settled if affordable."""
        if not self.fits(limits):
            return False
        if self.is_small or self.best.seconds == np.inf:
            return True
        choices = self.oracle.construct(limits)
        if choices is None and self.can_afford_exact:
            choices = self.exact_choice(limits)
            if choices is None or not self.problem.has_room(choices, limits):
                return False
        self.best.offer(choices)
        return True

    def least_index(self, d: int, first: int, hi: tuple[int, ...], limits: Limits) -> int:
        """The least limit on phase ``d`` that fits with the others at ``hi``; ``hi`` fits."""

        def fits(index: int) -> bool:
            return self.fits(replace(limits, phases_s=self.grid.at(with_entry(hi, d, index))))

        if fits(first):
            return first
        bracket = Bracket(first, hi[d])
        while bracket.high - bracket.low > 1:
            bracket = bracket.halved(fits, at=int(bracket.low + bracket.high) // 2)
        return int(bracket.high)

    def least_optimizer_s(self, limits: Limits, min_s: float) -> float:
        """A lower bound on the optimizer's time within the limits, which must fit."""
        if limits.optimizer_s == np.inf or self.fits(
            replace(limits, optimizer_s=min_s * (1 + 1e-9))
        ):
            return min_s
        bracket = Bracket(min_s, limits.optimizer_s)
        for _ in range(OPTIMIZER_STEPS):
            bracket = bracket.halved(lambda s: self.fits(replace(limits, optimizer_s=s)))
        return bracket.low

    def least_total_s(self, limits: Limits, min_s: float) -> float:
        """A lower bound on the sum of all phases within the limits, which must fit.

        If phases grow together, as those of different units do, it is much higher than the
        sum of the bounds on each phase alone.
        """
        if limits.totals_s is None or self.fits(replace(limits, total_s=min_s)):
            return min_s
        bracket = Bracket(min_s, limits.total_s)
        for _ in range(TOTAL_STEPS):
            bracket = bracket.halved(lambda s: self.fits(replace(limits, total_s=s)))
        self.best.offer(self.oracle.construct(replace(limits, total_s=bracket.high)))
        return bracket.low

    # Incumbents #

    def try_diagonal(self, box: Box) -> None:
        """An incumbent near the least point that fits on the way from ``lo`` to ``hi``."""
        low, high = np.array(self.grid.at(box.lo)), np.array(self.grid.at(box.hi))

        def limits(part: float) -> Limits:
            return Limits(tuple((low + part * (high - low)).tolist()))

        near = 0.0
        fitting = [1.0, 0.0] if self.oracle.is_feasible(limits(0.0)) else [1.0]
        # Costs differ by orders of magnitude between good and bad candidates, so the
        # first steps shorten the way by factors.
        for step in range(DIAGONAL_STEPS):
            far = fitting[-1]
            width_s = (far - near) * float((high - low).sum())
            if width_s < DIAGONAL_PRECISION * sum(limits(far).phases_s):
                break
            part = far / 8 if near == 0 and step < DIAGONAL_STEPS // 2 else (near + far) / 2
            if self.oracle.is_feasible(limits(part)):
                fitting.append(part)
            else:
                near = part
        # With few devices what leaves most room, exactly.
        choice_within = self.exact_choice if self.is_small else self.oracle.construct
        for part in reversed(fitting):
            if self.best.offer(choice_within(limits(part))):
                return

    @property
    def can_afford_exact(self) -> bool:
        price = exact.effort(self.problem)
        return self.exact_additions + price <= self.effort.max_exact_additions

    def exact_choice(self, limits: Limits) -> Choices | None:
        """The choice with the most room within the limits."""
        self.exact_additions += exact.effort(self.problem)
        return exact.best_choice(self.problem, limits)

    def settle(self, point: Box) -> float:
        """Exhaust a box of one point; returns its bound, infinite where nothing is left."""
        while True:
            limits = Limits(self.grid.at(point.hi), self.best.target_s - point.total_s)
            if limits.optimizer_s < point.optimizer_s or not self.oracle.is_feasible(limits):
                return np.inf
            before = self.best.seconds
            self.best.offer(self.oracle.construct(limits))
            if self.best.seconds < before:
                continue
            if self.can_afford_exact:
                choices = self.exact_choice(limits)
                if choices is None or not self.problem.has_room(choices, limits):
                    return np.inf
                self.best.offer(choices)
                if self.best.seconds < before:
                    continue
            # Too many devices to settle it.
            return point.total_s + self.least_optimizer_s(limits, point.optimizer_s)
