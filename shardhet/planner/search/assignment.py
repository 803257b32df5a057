"""HiGHS assigns candidates to devices that are fast enough, as a person would.

Of the choices that are within limits on time, the one that recomputes least is taken, and of
these the one that fills the fullest device least.  In the notation of ``problem``, with r_c the
units that candidate c recomputes, U_g the budget of a device of group g in elements of state,
and S_g what the group stores:

    minimise    sum n_gc r_c,  then  u
    such that   sum n_gc (U_g - a_gc) + S_g <= u N_g U_g,      S_g <= sum n_gc a_gc,
                sum S_g >= S,   sum n_gc b_c = B,   sum_c n_gc = N_g,   n_gc whole,
                sum T_d + T_optimizer <= T,   T_d >= sum_c t_dc n_gc / N_g,
                T_optimizer >= o_g S_g / N_g

The limits T_d hold for single devices.  In groups of several, so that they hold for each, only
candidates within given limits are allowed; and a candidate that is fuller than u without any
state is left out in another turn.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path

import numpy as np

from shardhet.planner.problem.problem import Bools, Choice, Floats, Ints, Limits, Problem

MAX_VARIABLES = 1_000
MAX_NODES = 200  # of branch and bound
# HiGHS's tolerances are absolute, 1e-6 of a row and of the objective, so both are scaled up.
SCALE = 1e4
TIME_WEIGHT = 1e-3  # of the step beside the level of budgets: it decides between equals
LEVEL_STEPS, LEVEL_PRECISION = 4, 5e-3


@dataclass(frozen=True, slots=True)
class Fullness:
    """What candidates need of memory, besides their room."""

    recomputed: Floats  # [G, C] units that all members recompute
    budget: Floats  # [G] of all members, in elements of state
    is_known: Bools  # [G] memory alone limits the room


def assign(
    problem: Problem,
    limits: Limits,
    phases_s: Sequence[float],
    fullness: Fullness,
    cutoff_s: float,
) -> tuple[Choice, ...] | None:
    """The choice that recomputes least and leaves the fullest device emptiest.

    Candidates are within ``limits``, and steps take at most ``cutoff_s``; ``phases_s`` are
    those of a choice that does.  None if there are too many candidates, if optimizers may step
    on the host, or if HiGHS does not finish within ``MAX_NODES``.
    """
    if problem.optimizers_differ:  # their programme has one per group
        return None
    for within in (limits, Limits(tuple(phases_s))):  # many: of those that cost no time
        programme = _Programme(problem, within, phases_s, fullness, cutoff_s)
        if len(programme.group) <= MAX_VARIABLES:
            break
    else:
        return None
    best: Ints | None = None
    best_level, low, at_most = inf, 0.0, inf
    for _ in range(LEVEL_STEPS):
        number = programme.solve(at_most)
        if number is None:
            low = at_most
        else:
            even, own = programme.levels(number)
            if max(even, own) < best_level:
                best, best_level = number, max(even, own)
            low = max(low, even)  # fewer candidates leave less room
        if best is None or best_level - low < LEVEL_PRECISION:
            break
        at_most = (low + best_level) / 2
    return None if best is None else programme.choices(best)


class _Programme:
    """The integer programme; its columns are n_gc, S_g, T_d, T_optimizer and u."""

    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        phases_s: Sequence[float],
        fullness: Fullness,
        cutoff_s: float,
    ) -> None:
        self._problem, self._fullness, self._at_most_s = problem, fullness, cutoff_s
        self.group, self.candidate = _candidates(problem, limits, phases_s, fullness)
        at = self.group, self.candidate
        self._recomputed = fullness.recomputed[at]
        self._room = problem.room[at]
        self._needed: Floats = fullness.budget[self.group] - self._room
        self._own: Floats = np.where(
            fullness.is_known[self.group], self._needed / fullness.budget[self.group], 0.0
        )
        self._most_recomputed = inf

    def solve(self, at_most: float) -> Ints | None:
        """Devices of each candidate that is no fuller than this; None if HiGHS finds none."""
        is_kept = self._own <= at_most
        columns = self._limits[0].shape[1]
        recomputed = np.zeros(columns)
        recomputed[: len(self.group)] = self._recomputed
        if self._most_recomputed == inf:
            number = self._minimise(recomputed, is_kept) if recomputed.any() else None
            if number is None and recomputed.any():
                return None
            self._most_recomputed = 0.0 if number is None else float(self._recomputed @ number)
        level = np.zeros(columns)
        level[-1] = 1.0
        level[len(self.group) + len(self._problem.groups) : -1] = TIME_WEIGHT / self._at_most_s
        return self._minimise(level, is_kept)

    def levels(self, number: Ints) -> tuple[float, float]:
        """The level of all budgets if the state is spread to one, and the fullest without."""
        budget = float(self._fullness.budget[self.group] @ number)
        needed = float(self._needed @ number) + self._problem.state_numel
        return needed / budget, float(self._own[number > 0].max(initial=0.0))

    def choices(self, number: Ints) -> tuple[Choice, ...]:
        """The choices of these numbers."""
        return tuple(
            Choice(int(g), int(c), int(n))
            for g, c, n in zip(self.group, self.candidate, number, strict=True)
            if n
        )

    @cached_property
    def _limits(self) -> tuple[Floats, Floats, Floats]:
        """Rows of the programme, and their lower and upper bounds."""
        problem, num_groups = self._problem, len(self._problem.groups)
        width = len(self.group)
        phases = slice(width + num_groups, width + num_groups + problem.num_phases)
        columns = phases.stop + 2
        rows: list[Floats] = []
        low: list[float] = []
        high: list[float] = []

        def row(least: float, most: float) -> Floats:
            rows.append(np.zeros(columns))
            low.append(least)
            high.append(most)
            return rows[-1]

        whole = problem.state_numel or 1.0
        batch = row(problem.global_batch_size, problem.global_batch_size)
        batch[:width] = problem.batch[self.group, self.candidate]
        row(problem.state_numel / whole, inf)[width : phases.start] = 1.0
        step = row(-inf, (self._at_most_s - problem.fixed_s) / self._at_most_s)
        step[phases.start : -1] = 1.0
        for g in range(num_groups):
            of_group, count = self.group == g, float(problem.counts[g])
            number = row(count, count)
            number[:width] = of_group
            stored = row(-inf, 0.0)
            stored[:width], stored[width + g] = -self._room / whole * of_group, 1.0
            filled = row(-inf, 0.0)
            filled[:width] = self._needed / whole * of_group
            filled[width + g], filled[-1] = 1.0, -count * self._fullness.budget[g] / whole
            rate = float(problem.optimizer[0, 0, g, 0])
            if rate < inf:
                optimizer = row(-inf, 0.0)
                optimizer[width + g] = whole / rate / count / self._at_most_s
                optimizer[-2] = -1.0
            for d in range(problem.num_phases):
                phase = row(-inf, 0.0)
                costs = problem.costs[d][self.group, self.candidate] / self._at_most_s / count
                phase[:width], phase[phases.start + d] = costs * of_group, -1.0
        return np.array(rows), np.array(low), np.array(high)

    def _minimise(self, weights: Floats, is_kept: Bools) -> Ints | None:
        from scipy.optimize import LinearConstraint, milp  # imported here: half a second

        rows, low, high = self._limits
        width, columns = len(self.group), rows.shape[1]
        recomputed = np.zeros((1, columns))
        recomputed[0, :width] = self._recomputed
        integral = np.zeros(columns)
        integral[:width] = 1
        upper = np.full(columns, inf)
        upper[:width][~is_kept] = 0.0
        least = np.zeros(columns)
        least[-2] = self._problem.fixed_optimizer_s / self._at_most_s
        with silenced():
            solved = milp(
                weights * SCALE / float(np.abs(weights).max()),
                integrality=integral,
                bounds=(least, upper),
                constraints=[
                    LinearConstraint(rows * SCALE, low * SCALE, high * SCALE),
                    LinearConstraint(recomputed, -inf, self._most_recomputed + 0.5),
                ],
                options={"mip_rel_gap": 1e-3, "node_limit": MAX_NODES},
            )
        if solved.x is None:
            return None
        number: Ints = np.rint(solved.x[:width]).astype(np.int64)
        return number if self._is_whole(number) else None

    def _is_whole(self, number: Ints) -> bool:
        """Whether the rounded numbers still add up to the batch and to all devices."""
        problem = self._problem
        taken = np.bincount(self.group, weights=number, minlength=len(problem.groups))
        batch = float(problem.batch[self.group, self.candidate] @ number)
        return batch == problem.global_batch_size and bool((taken == problem.counts).all())


def _candidates(
    problem: Problem, limits: Limits, phases_s: Sequence[float], fullness: Fullness
) -> tuple[Ints, Ints]:
    """Groups and candidates within the limits.

    Without those of which another of the same batch recomputes no more, has as much room, and
    takes no longer than ``phases_s``, so that nobody waits for it.
    """
    allowed = problem.allowed(limits)
    is_free = problem.allowed(Limits(tuple(phases_s)))
    groups: list[Ints] = []
    candidates: list[Ints] = []
    for g, group in enumerate(problem.groups):
        indices = np.flatnonzero(allowed[g, : len(group.batch)])
        keys = (~is_free[g, indices], -group.room[indices], fullness.recomputed[g, indices])
        indices = indices[np.lexsort((*keys, group.batch[indices]))]
        batch, room, free = group.batch[indices], group.room[indices], is_free[g, indices]
        starts = np.flatnonzero(np.diff(batch, prepend=-1)).tolist()
        kept = np.ones(len(indices), dtype=bool)
        for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
            most = np.maximum.accumulate(np.where(free[start:end], room[start:end], -1.0))
            kept[start + 1 : end] = room[start + 1 : end] > most[:-1]
        candidates.append(indices[kept])
        groups.append(np.full(int(kept.sum()), g, dtype=np.int64))
    return np.concatenate(groups), np.concatenate(candidates).astype(np.int64)


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress a line that HiGHS prints for some solutions despite ``disp`` (scipy 1.17)."""
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
