"""The last word on a plan: HiGHS assigns candidates to devices within the limits found.

The search ends with limits, the phases T_d and the optimizer's time of its best choice.  Every
choice within them is as fast; of these the one is taken that computes least in all,

    minimise    sum_gc n_gc sum_d t_dc
    such that   sum n_gc b_c = B,    sum n_gc min(a_c, T_optimizer / o_g) >= S,
                sum_c n_gc = N_g,    n_gc whole,

over the candidates with t_dc <= T_d in every phase, in the notation of ``problem``.  A device
that nobody waits for is then as fast as room allows, and a fast one computes what a slow one
would take longer for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardhet.planner.problem import Choice, Floats, Ints, Limits, Problem, Value

MAX_VARIABLES = 20_000
MAX_NODES = 2_000  # of branch and bound
# HiGHS's tolerances are absolute, 1e-6 of a row and of the objective, so both are scaled up.
SCALE = 1e4
WORSE_AT_MOST = 1e-9  # than the objective found, by the rounding of a row
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Assignment:
    """What each device does, and whether HiGHS has chosen it."""

    choices: tuple[Choice, ...]
    is_by_highs: bool
    num_variables: int

    def replaced_by(self, choices: Sequence[Choice]) -> "Assignment":
        """The search's own choices instead."""
        return replace(self, choices=tuple(choices), is_by_highs=False)


def assign(problem: Problem, choices: Sequence[Choice], value: Value) -> Assignment:
    """The choice with the least compute of those as fast as ``choices``, worth ``value``.

    ``choices`` themselves where there are too many candidates, or HiGHS does not end within
    its nodes.
    """
    group, candidate = _candidates(problem, value)
    num_variables = len(group)
    stays = Assignment(tuple(choices), is_by_highs=False, num_variables=num_variables)
    if num_variables > MAX_VARIABLES:
        return stays
    number = _solve(problem, group, candidate, value)
    if number is None or not _is_whole(problem, group, candidate, number):
        return stays
    found = tuple(
        Choice(int(g), int(c), int(n))
        for g, c, n in zip(group, candidate, number, strict=True)
        if n
    )
    worth = problem.evaluate(found)
    if worth is None or worth.objective_s > value.objective_s * (1 + WORSE_AT_MOST):
        return stays
    return Assignment(found, is_by_highs=True, num_variables=num_variables)


def _is_whole(problem: Problem, group: Ints, candidate: Ints, number: Ints) -> bool:
    """Whether rounded numbers still make up the batch and all devices."""
    taken = np.bincount(group, weights=number, minlength=len(problem.groups))
    batch = float(problem.batch[group, candidate] @ number)
    return batch == problem.global_batch_size and bool((taken == problem.counts).all())


def _candidates(problem: Problem, value: Value) -> tuple[Ints, Ints]:
    """Groups and candidates within the limits, without those that others make needless.

    Of candidates with one batch, one that has no more room than another and computes no less
    is never needed.
    """
    allowed = problem.allowed(Limits(value.phases_s))
    total_s = np.sum(problem.costs, axis=0)
    groups, candidates = [], []
    for g, group in enumerate(problem.groups):
        indices = np.flatnonzero(allowed[g, : len(group.batch)])
        # By batch, then by compute, then with the most room first.
        order = np.lexsort((-group.room[indices], total_s[g, indices], group.batch[indices]))
        indices = indices[order]
        batch, room = group.batch[indices], group.room[indices]
        is_first = np.concatenate(([True], batch[1:] != batch[:-1]))
        starts = np.flatnonzero(is_first)
        kept = is_first.copy()
        for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
            most = np.maximum.accumulate(room[start:end])
            kept[start + 1 : end] = room[start + 1 : end] > most[:-1]
        candidates.append(indices[kept])
        groups.append(np.full(int(kept.sum()), g, dtype=np.int64))
    return np.concatenate(groups), np.concatenate(candidates).astype(np.int64)


def _solve(problem: Problem, group: Ints, candidate: Ints, value: Value) -> Ints | None:
    """How many devices take each candidate; None where HiGHS has found no answer."""
    from scipy.optimize import LinearConstraint, milp  # here: half a second of imports

    limits = Limits(value.phases_s, value.optimizer_s * (1 + ROUNDING))
    total_s = np.sum(problem.costs, axis=0)[group, candidate]
    rows: Floats = np.zeros((len(problem.groups) + 2, len(group)))
    rows[group, np.arange(len(group))] = 1.0
    rows[-2] = problem.batch[group, candidate]
    rows[-1] = problem.room_within(limits)[group, candidate]
    counts, state = problem.counts, problem.state_numel
    low = np.concatenate((counts, [problem.global_batch_size, state]))
    high = np.concatenate((counts, [problem.global_batch_size, np.inf]))
    if state > 0:
        rows[-1] *= SCALE / state
        low[-1] = SCALE * (1 - ROUNDING)
    busy_s = float(total_s.max(initial=0.0))
    solved = milp(
        total_s * (SCALE / busy_s if busy_s else 1.0),
        integrality=np.ones(len(group)),
        bounds=(0, np.inf),
        constraints=LinearConstraint(rows, low, high),
        options={"mip_rel_gap": 0.0, "node_limit": MAX_NODES},
    )
    if solved.status != 0:
        return None
    number: Ints = np.rint(solved.x).astype(np.int64)
    return number
