"""The oracle of the search: can the batch be computed within given limits?

Limits on every phase and on the optimizer decide which candidates are allowed.  It remains to
reach the batch with as much room for state as possible:

    R = max sum n_gc a_gc   such that   sum n_gc b_gc >= B,   sum_c n_gc = N_g

A multiplier lambda on the batch separates the problem into groups,

    R <= L(lambda) = sum_g N_g max_c (a_gc + lambda b_gc) - lambda B,

and min L over lambda >= 0 is the linear relaxation of R.  R is lower by at most what one device
loses between two neighbours of its hull.  L(lambda) < S for any lambda proves that nothing
fits.  A mixture of the two choices that meet at the minimum is nearly always a plan.
"""

from dataclasses import dataclass

import numpy as np

from shardhet.planner.problem.problem import Bools, Choice, Floats, Ints, Limits, Problem

CALL_OVERHEAD = 2e4  # a NumPy call takes as long as looking at this many candidates
MAX_TRIMS = 16  # moves of single devices that make a mixture meet the batch exactly


@dataclass(frozen=True, slots=True)
class _Point:
    """The best candidate of every group for one multiplier."""

    pick: Ints  # [G]
    batch: float  # all devices together
    room: float


class Oracle:
    """Answers for one problem; it counts candidates, a measure of effort on any machine."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_scanned = 0.0
        self._rows = np.arange(len(problem.groups))
        self._scored = np.empty_like(problem.batch)  # a + lambda b of the call in progress

    def is_feasible(self, limits: Limits) -> bool:
        """Whether the relaxation fits; false proves that no plan does."""
        allowed, room = self.problem.allowed(limits), self.problem.room_within(limits)
        return self._meet(allowed, room, stops_early=True) is not None

    def construct(self, limits: Limits) -> tuple[Choice, ...] | None:
        """A plan within the limits; None if there is none or rounding did not find it."""
        allowed, room = self.problem.allowed(limits), self.problem.room_within(limits)
        ends = self._meet(allowed, room, stops_early=False)
        if ends is None:
            return None
        left, right = ends
        best: tuple[Choice, ...] | None = None
        best_room = -np.inf
        for rounds_up in (True, False):
            mixture = self._mix(left, right, rounds_up)
            trimmed = self._trim(mixture, allowed, room)
            if trimmed is not None:
                total = sum(n * room[g, c] for (g, c), n in trimmed.items())
                if total > best_room:
                    best_room = total
                    best = tuple(Choice(g, c, n) for (g, c), n in sorted(trimmed.items()))
        if best is None or self.problem.evaluate(best) is None:
            return None
        return best

    def _point(self, pick: Ints, room: Floats) -> _Point:
        problem, rows = self.problem, self._rows
        return _Point(
            pick,
            float(problem.counts.dot(problem.batch[rows, pick])),
            float(problem.counts.dot(room[rows, pick])),
        )

    def _meet(
        self, allowed: Bools, room: Floats, *, stops_early: bool
    ) -> tuple[_Point, _Point] | None:
        """The two choices that meet at the best multiplier; None if the state cannot fit."""
        problem = self.problem
        self.num_scanned += problem.batch.size * problem.num_phases + CALL_OVERHEAD
        demand, wanted = problem.state_numel, problem.global_batch_size
        # Rows are sorted by batch, then room: the first is the largest batch.
        largest = allowed.argmax(axis=1)
        if not allowed[self._rows, largest].all():
            return None
        right = self._point(largest, room)
        if right.batch < wanted:
            return None
        masked = np.where(allowed, room, -np.inf)
        left = self._point(masked.argmax(axis=1), room)
        if left.room < demand:
            return None
        if left.batch >= wanted:
            return left, left
        while not (stops_early and right.room >= demand):
            multiplier = (left.room - right.room) / (right.batch - left.batch)
            self.num_scanned += problem.batch.size + CALL_OVERHEAD
            np.multiply(problem.batch, multiplier, out=self._scored)
            np.add(self._scored, masked, out=self._scored)
            point = self._point(self._scored.argmax(axis=1), room)
            height = point.room + multiplier * point.batch
            if height - multiplier * wanted < demand:
                return None
            if height <= (left.room + multiplier * left.batch) * (1 + 1e-14):
                break  # the line through both ends touches the hull: they are neighbours
            if point.batch >= wanted:
                right = point
            else:
                left = point
        return left, right

    def _mix(self, left: _Point, right: _Point, rounds_up: bool) -> dict[tuple[int, int], int]:
        """Move devices from the left choice to the right one until the batch is reached."""
        problem = self.problem
        missing = problem.global_batch_size - left.batch
        mixture: dict[tuple[int, int], int] = {}
        for g, group in enumerate(problem.groups):
            low, high = int(left.pick[g]), int(right.pick[g])
            gain = problem.batch[g, high] - problem.batch[g, low]
            moved = 0
            if gain > 0 and missing > 0:
                exact = missing / gain
                moved = min(group.count, int(np.ceil(exact) if rounds_up else np.floor(exact)))
                missing -= moved * gain
            mixture[g, low] = mixture.get((g, low), 0) + group.count - moved
            mixture[g, high] = mixture.get((g, high), 0) + moved
        return {pair: n for pair, n in mixture.items() if n}

    def _trim(
        self, mixture: dict[tuple[int, int], int], allowed: Bools, room: Floats
    ) -> dict[tuple[int, int], int] | None:
        """Change single devices of a mixture until the batch is met exactly."""
        problem = self.problem
        surplus = sum(n * problem.batch[g, c] for (g, c), n in mixture.items())
        surplus -= problem.global_batch_size
        for _ in range(MAX_TRIMS):
            if surplus == 0:
                return mixture
            best: tuple[float, float, int, int, int] | None = None
            for g, c in mixture:
                change = problem.batch[g, c] - problem.batch[g]
                fits = allowed[g] & (change * surplus > 0) & (abs(change) <= abs(surplus))
                if not fits.any():
                    continue
                # Remove the whole surplus if one device can, else as much as possible; among
                # equal changes, keep the most room.
                largest = abs(change[fits]).max()
                fits &= abs(change) == largest
                to = int(np.where(fits, room[g], -1.0).argmax())
                move = (largest, room[g, to] - room[g, c], g, c, to)
                best = move if best is None else max(best, move)
            if best is None:
                return None
            _, _, g, c, to = best
            surplus -= problem.batch[g, c] - problem.batch[g, to]
            mixture = dict(mixture)
            mixture[g, c] -= 1
            mixture[g, to] = mixture.get((g, to), 0) + 1
            mixture = {pair: n for pair, n in mixture.items() if n}
        return None
