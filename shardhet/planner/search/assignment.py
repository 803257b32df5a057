"""The last stage of planning: HiGHS assigns candidates to devices within the limits found.

The search ends with limits: the phases T_d and the optimizer's time of its best choice.  Every
choice within these limits is equally fast.  Among them, the one with the least total compute
is taken:

    minimise    sum_gc n_gc w_c
    such that   sum n_gc b_c = B,    sum n_gc min(a_c, T_optimizer / o_g) >= S,
                sum_c n_gc = N_g,    n_gc whole,

over the candidates with t_dc <= T_d in every phase, in the notation of ``problem``; w_c is the
compute of candidate c alone, whether or not communication hides it.  Devices that do not set
the pace then recompute as little as memory allows, even where links do, and work goes to fast
devices rather than slow ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardhet.planner.problem.problem import Choice, Floats, Ints, Limits, Problem, Value

MAX_VARIABLES = 20_000
MAX_NODES = 2_000  # of branch and bound
# HiGHS's tolerances are absolute, 1e-6 of a row and of the objective, so both are scaled up.
SCALE = 1e4
OBJECTIVE_TOLERANCE = 1e-9  # relative to the objective found, through HiGHS's tolerance on rows
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Assignment:
    """What each device does, and whether HiGHS chose it."""

    choices: tuple[Choice, ...]
    is_by_highs: bool
    num_variables: int

    def replaced_by(self, choices: Sequence[Choice]) -> "Assignment":
        """The same with the search's own ``choices`` in place of those of HiGHS."""
        return replace(self, choices=tuple(choices), is_by_highs=False)


def assign(problem: Problem, choices: Sequence[Choice], value: Value) -> Assignment:
    """The choice with the least compute among those as fast as ``choices``.

    ``value`` is what ``choices`` cost; they may be candidates of another table of the same
    problem, with fewer that are equally fast.  Returns ``choices`` themselves if there are too
    many candidates, or if HiGHS does not finish within ``MAX_NODES``.
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
    if worth is None or worth.objective_s > value.objective_s * (1 + OBJECTIVE_TOLERANCE):
        return stays
    return Assignment(found, is_by_highs=True, num_variables=num_variables)


def _is_whole(problem: Problem, group: Ints, candidate: Ints, number: Ints) -> bool:
    """Whether the rounded numbers still add up to the batch and to all devices."""
    taken = np.bincount(group, weights=number, minlength=len(problem.groups))
    batch = float(problem.batch[group, candidate] @ number)
    return batch == problem.global_batch_size and bool((taken == problem.counts).all())


def _candidates(problem: Problem, value: Value) -> tuple[Ints, Ints]:
    """Groups and candidates within the limits, without dominated ones.

    A candidate is dominated if another one of the same batch has at least as much room and
    computes no more.
    """
    allowed = problem.allowed(Limits(value.phases_s))
    total_s = problem.compute_s
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
    """How many devices take each candidate; None if HiGHS found no answer."""
    from scipy.optimize import LinearConstraint, milp  # imported here: it takes half a second

    limits = Limits(value.phases_s, value.optimizer_s * (1 + ROUNDING))
    total_s = problem.compute_s[group, candidate]
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
