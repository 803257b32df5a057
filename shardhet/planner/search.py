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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from shardhet.planner import exact
from shardhet.planner.oracle import Oracle
from shardhet.planner.problem import Choice, Floats, Limits, Problem, Value

# Two objectives closer than this count as equal: the order of a float sum can matter as much.
RELATIVE_EPSILON = 1e-12
RAY_STEPS = 24  # at most so many bisections along a box's diagonal for an incumbent
RAY_PRECISION = 1e-3  # of the sum of phases; splitting boxes does the rest better
SMALL_ADDITIONS = 1e5  # a dynamic programme this small is used in every feasibility test
OPTIMIZER_STEPS = 10  # bisections of the optimizer's time in a box
NUM_RUNNERS_UP = 6
RUNNER_UP_MARGIN = 0.01  # runners-up are at most this much slower than the best
TOTAL_STEPS = 10  # bisections of the sum of all phases in a box


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How fine the search is, and when it stops without a proof; the same on every machine."""

    recompute_steps: int = 4  # steps in which the units of a kind become recomputed
    relative_gap: float = 0.0  # the search stops once it is this small
    max_scanned: float = 4e9  # candidates looked at by the oracle
    max_exact_additions: float = 3e8  # by dynamic programmes


DEFAULT_EFFORT = Effort()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best choice found, and a bound that no choice can beat."""

    choices: tuple[Choice, ...]
    value: Value
    lower_bound_s: float
    num_scanned: float  # candidates looked at
    runners_up: tuple[tuple[Choice, ...], ...] = ()  # the next best that were found, in order

    @property
    def relative_gap(self) -> float:
        """(objective - bound) / bound; 0 where optimality is proven."""
        return max(0.0, self.value.objective_s / self.lower_bound_s - 1)


class NothingFitsError(Exception):
    """No choice meets the batch and the state, even without limits on time."""


@dataclass(frozen=True, slots=True)
class _Box:
    """Limits between the values at indices ``lo`` and ``hi``, both included."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    total_s: float  # no choice in the box has phases that sum to less
    optimizer_s: float  # no choice in the box has a faster optimizer

    @property
    def is_point(self) -> bool:
        return self.lo == self.hi

    @property
    def bound_s(self) -> float:
        """A bound that no choice in the box can beat."""
        return self.total_s + self.optimizer_s


def search(problem: Problem, effort: Effort = DEFAULT_EFFORT) -> Found:
    """The best choice of candidates; deterministic.

    Raises ``NothingFitsError`` if nothing fits even in unlimited time.
    """
    first = _Search(problem, effort)
    box = first.root()
    if box is None:
        return first.found(np.inf)
    # A candidate beyond the first incumbent's limits cannot be part of a better choice.
    smaller, kept = problem.within(first.values_at(box.hi))
    second = _Search(smaller, effort)
    second.value, second.oracle.num_scanned = first.value, first.oracle.num_scanned
    found = second.found(second.search_boxes(second.box_within(box, first)))

    def original(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        return tuple(
            replace(choice, candidate=int(kept[choice.group][choice.candidate]))
            for choice in choices
        )

    return replace(
        found,
        choices=original(second.choices) or first.choices,
        runners_up=tuple(map(original, found.runners_up)),
    )


@dataclass
class _Search:
    problem: Problem
    effort: Effort
    choices: tuple[Choice, ...] = ()
    value: Value | None = None
    exact_additions: float = 0.0
    met: dict[tuple[Choice, ...], float] = field(default_factory=dict)  # objectives by choice
    is_small: bool = field(init=False)
    oracle: Oracle = field(init=False)
    values: list[Floats] = field(init=False)  # per phase, ascending: possible limits

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.problem)
        self.is_small = exact.effort(self.problem) <= SMALL_ADDITIONS
        self.values = [np.unique(cost[np.isfinite(cost)]) for cost in self.problem.costs]

    @property
    def incumbent_s(self) -> float:
        """The time of phases and optimizer of the best choice so far."""
        return np.inf if self.value is None else self.value.objective_s - self.problem.fixed_s

    @property
    def target_s(self) -> float:
        """The time that a choice must stay below to be worth finding."""
        return self.incumbent_s * (1 - RELATIVE_EPSILON)

    def root(self) -> _Box | None:
        """Find a first incumbent; returns the box that may hold a better one, or None."""
        last = tuple(len(values) - 1 for values in self.values)
        unlimited = Limits(self.values_at(last))
        if not self.oracle.is_feasible(unlimited):
            raise NothingFitsError
        first = tuple(
            int(np.searchsorted(values, least_s * (1 - RELATIVE_EPSILON)))
            for values, least_s in zip(self.values, self.problem.least_phases_s(), strict=True)
        )
        box = _Box(first, last, sum(self.values_at(first)), self.problem.least_optimizer_s)
        self.try_ray(box)
        if self.value is None and self.can_afford_exact:
            self.try_choice(self.exact_choice(unlimited))
        tight = self.tightened(box)
        if tight is None:
            return None
        self.try_ray(tight)
        return self.tightened(tight)

    def box_within(self, box: _Box, other: "_Search") -> _Box:
        """A box of ``other``, a search of the same problem, in the indices of this search."""
        lo = [
            int(np.searchsorted(values, limit))
            for values, limit in zip(self.values, other.values_at(box.lo), strict=True)
        ]
        return replace(box, lo=tuple(lo), hi=tuple(len(v) - 1 for v in self.values))

    def found(self, bound_s: float) -> Found:
        """The result, given the bound that the search has proven."""
        if self.value is None:
            raise NothingFitsError
        return Found(
            choices=self.choices,
            value=self.value,
            lower_bound_s=min(bound_s, self.incumbent_s) + self.problem.fixed_s,
            num_scanned=self.oracle.num_scanned,
            runners_up=self.runners_up(),
        )

    def runners_up(self) -> tuple[tuple[Choice, ...], ...]:
        """The choices that came closest to the best one."""
        ranked = sorted(self.met, key=lambda each: self.met[each])  # ties keep their order
        others = [each for each in ranked if each != self.choices]
        return tuple(others[:NUM_RUNNERS_UP])

    def search_boxes(self, root: _Box) -> float:
        """Split boxes until none can beat the incumbent; returns the bound reached."""
        order = count()
        boxes = [(root.bound_s, next(order), root)]
        unresolved_s = np.inf  # least bound of points that could not be settled
        while boxes:
            bound_s, _, box = heapq.heappop(boxes)
            enough_s = self.incumbent_s / (1 + self.effort.relative_gap)
            is_exhausted = self.oracle.num_scanned > self.effort.max_scanned
            if min(bound_s, unresolved_s) >= min(self.target_s, enough_s) or is_exhausted:
                return min(bound_s, unresolved_s)
            if box.is_point:
                unresolved_s = min(unresolved_s, self.settle(box))
                continue
            for half in self.halves(box):
                tight = self.tightened(half)
                if tight is not None:
                    for corner in (tight.lo, tight.hi, self.middle(tight)):
                        self.try_choice(self.oracle.construct(Limits(self.values_at(corner))))
                    heapq.heappush(boxes, (tight.bound_s, next(order), tight))
        return min(unresolved_s, self.incumbent_s)

    # Boxes #

    def values_at(self, index: Sequence[int]) -> tuple[float, ...]:
        """The limits at these indices."""
        return tuple(float(values[i]) for values, i in zip(self.values, index, strict=True))

    def middle(self, box: _Box) -> tuple[int, ...]:
        """The indices halfway between the corners, by value."""
        return tuple(
            int(np.searchsorted(values, (values[lo] + values[hi]) / 2))
            for values, lo, hi in zip(self.values, box.lo, box.hi, strict=True)
        )

    def halves(self, box: _Box) -> list[_Box]:
        """The two halves of the box, split across its longest edge."""
        edges = [
            values[hi] - values[lo]
            for values, lo, hi in zip(self.values, box.lo, box.hi, strict=True)
        ]
        d = int(np.argmax(edges))
        values, lo, hi = self.values[d], box.lo[d], box.hi[d]
        cut = int(np.searchsorted(values, (values[lo] + values[hi]) / 2, side="right")) - 1
        cut = min(max(cut, lo), hi - 1)
        return [
            replace(box, hi=_with(box.hi, d, cut)),
            replace(box, lo=_with(box.lo, d, cut + 1)),
        ]

    def tightened(self, box: _Box) -> _Box | None:
        """The part of the box that may hold something better; None if there is none."""
        lo, hi = box.lo, box.hi
        least_s = sum(self.values_at(lo))
        total_s = max(box.total_s, least_s)
        if total_s + box.optimizer_s >= self.target_s:
            return None
        for d, values in enumerate(self.values):
            spare_s = self.target_s - box.optimizer_s - (least_s - values[lo[d]])
            last = int(np.searchsorted(values, spare_s, side="left")) - 1
            hi = _with(hi, d, min(hi[d], max(last, lo[d])))
        limits = self.limits(lo, hi, total_s, box.optimizer_s)
        if not self.holds_any(limits):
            return None
        for d in range(len(self.values)):
            lo = _with(lo, d, self.least_index(d, lo[d], hi, limits))
        total_s = max(total_s, sum(self.values_at(lo)))
        if total_s + box.optimizer_s >= self.target_s:
            return None
        limits = self.limits(lo, hi, total_s, box.optimizer_s)
        optimizer_s = self.least_optimizer_s(limits, box.optimizer_s)
        tight = _Box(lo, hi, self.least_total_s(limits, total_s), optimizer_s)
        return tight if tight.bound_s < self.target_s else None

    def limits(
        self, lo: Sequence[int], hi: Sequence[int], total_s: float, optimizer_s: float
    ) -> Limits:
        """The limits that a choice in a box must stay within to beat the incumbent.

        Using a candidate costs at least ``max(lo_d, its cost)`` in every phase.
        """
        has_totals = len(self.values) > 1 and self.value is not None
        return Limits(
            phases_s=self.values_at(hi),
            optimizer_s=self.target_s - total_s,
            totals_s=self.problem.totals_above(self.values_at(lo)) if has_totals else None,
            total_s=self.target_s - optimizer_s,
        )

    def holds_any(self, limits: Limits) -> bool:
        """Whether something may fit; settles what rounding leaves open if affordable."""
        if not self.fits(limits):
            return False
        if self.is_small or self.value is None:
            return True
        choices = self.oracle.construct(limits)
        if choices is None and self.can_afford_exact:
            choices = self.exact_choice(limits)
            if choices is None or not self.has_room(choices, limits):
                return False
        self.try_choice(choices)
        return True

    def fits(self, limits: Limits) -> bool:
        """Whether something may fit the limits; exact if there are few devices.

        With few devices, half a device matters, and the dynamic programme costs no more than
        the relaxation.
        """
        if not self.oracle.is_feasible(limits):
            return False
        if not self.is_small:
            return True
        choices = self.exact_choice(limits)
        if choices is None:
            return False
        self.try_choice(choices)
        return self.has_room(choices, limits)

    def has_room(self, choices: Sequence[Choice], limits: Limits) -> bool:
        """Whether the state fits besides the choices and the optimizer stays in its limit."""
        room = self.problem.room_within(limits)
        total = sum(each.count * room[each.group, each.candidate] for each in choices)
        return bool(total >= self.problem.state_numel)

    def least_index(self, d: int, first: int, hi: tuple[int, ...], limits: Limits) -> int:
        """The least limit on phase ``d`` that fits with the others at ``hi``; ``hi`` fits."""

        def fits(index: int) -> bool:
            return self.fits(replace(limits, phases_s=self.values_at(_with(hi, d, index))))

        last = hi[d]
        if fits(first):
            return first
        while last - first > 1:
            middle = (first + last) // 2
            if fits(middle):
                last = middle
            else:
                first = middle
        return last

    def least_optimizer_s(self, limits: Limits, least_s: float) -> float:
        """A lower bound on the optimizer's time within the limits, which must fit."""
        if limits.optimizer_s == np.inf or self.fits(
            replace(limits, optimizer_s=least_s * (1 + 1e-9))
        ):
            return least_s
        low, high = least_s, limits.optimizer_s
        for _ in range(OPTIMIZER_STEPS):
            middle = (low + high) / 2
            if self.fits(replace(limits, optimizer_s=middle)):
                high = middle
            else:
                low = middle
        return low

    def least_total_s(self, limits: Limits, least_s: float) -> float:
        """A lower bound on the sum of all phases within the limits, which must fit.

        If phases grow together, as those of different units do, it is much higher than the
        sum of the bounds on each phase alone.
        """
        if limits.totals_s is None or self.fits(replace(limits, total_s=least_s)):
            return least_s
        low, high = least_s, limits.total_s
        for _ in range(TOTAL_STEPS):
            middle = (low + high) / 2
            if self.fits(replace(limits, total_s=middle)):
                high = middle
            else:
                low = middle
        self.try_choice(self.oracle.construct(replace(limits, total_s=high)))
        return low

    # Incumbents #

    def try_choice(self, choices: tuple[Choice, ...] | None) -> bool:
        """Keep a choice if it is the best so far; returns whether the state fits."""
        value = None if choices is None else self.problem.evaluate(choices)
        if choices is None or value is None:
            return False
        if self.value is None or value.objective_s < self.value.objective_s:
            self.choices, self.value = choices, value
        if value.objective_s <= self.value.objective_s * (1 + RUNNER_UP_MARGIN):
            self.met.setdefault(choices, value.objective_s)
        return True

    def try_ray(self, box: _Box) -> None:
        """Try an incumbent near the least point that fits on the way from ``lo`` to ``hi``."""
        low, high = np.array(self.values_at(box.lo)), np.array(self.values_at(box.hi))

        def limits(part: float) -> Limits:
            return Limits(tuple((low + part * (high - low)).tolist()))

        near = 0.0
        fitting = [1.0, 0.0] if self.oracle.is_feasible(limits(0.0)) else [1.0]
        # Costs differ by orders of magnitude between good and bad candidates, so the
        # first steps shorten the way by factors.
        for step in range(RAY_STEPS):
            far = fitting[-1]
            width_s = (far - near) * float((high - low).sum())
            if width_s < RAY_PRECISION * sum(limits(far).phases_s):
                break
            part = far / 8 if near == 0 and step < RAY_STEPS // 2 else (near + far) / 2
            if self.oracle.is_feasible(limits(part)):
                fitting.append(part)
            else:
                near = part
        for part in reversed(fitting):
            if self.try_choice(self.choice_within(limits(part))):
                return

    def choice_within(self, limits: Limits) -> tuple[Choice, ...] | None:
        """A choice within the limits; with few devices, exactly the one with the most room."""
        return (self.exact_choice if self.is_small else self.oracle.construct)(limits)

    @property
    def can_afford_exact(self) -> bool:
        price = exact.effort(self.problem)
        return self.exact_additions + price <= self.effort.max_exact_additions

    def exact_choice(self, limits: Limits) -> tuple[Choice, ...] | None:
        """The choice with the most room within the limits."""
        self.exact_additions += exact.effort(self.problem)
        return exact.best_choice(self.problem, limits)

    def settle(self, point: _Box) -> float:
        """Exhaust a box of one point; returns its bound, infinite if nothing is left."""
        while True:
            limits = Limits(self.values_at(point.hi), self.target_s - point.total_s)
            if limits.optimizer_s < point.optimizer_s or not self.oracle.is_feasible(limits):
                return np.inf
            before = self.incumbent_s
            self.try_choice(self.oracle.construct(limits))
            if self.incumbent_s < before:
                continue
            if self.can_afford_exact:
                choices = self.exact_choice(limits)
                if choices is None or not self.has_room(choices, limits):
                    return np.inf
                self.try_choice(choices)
                if self.incumbent_s < before:
                    continue
            # Too many devices to settle it.
            return point.total_s + self.least_optimizer_s(limits, point.optimizer_s)


def _with(index: tuple[int, ...], d: int, value: int) -> tuple[int, ...]:
    return (*index[:d], value, *index[d + 1 :])
