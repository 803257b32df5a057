"""The best choice where choices are few: all of them are looked at.

Before, candidates are left out whose batches no others complete to the whole: sets of many
equal devices compute multiples of their number.

A choice of a group is a multiset of its candidates.  Those of all groups that meet the batch
are put together group by group, without those that exceed it on the way.
"""

from functools import reduce
from itertools import combinations_with_replacement
from math import comb, inf
from operator import mul, or_

import numpy as np

from shardhet.planner.problem.problem import Choice, Floats, Ints, Problem
from shardhet.planner.search.exact import FEW_DEVICES
from shardhet.planner.search.incumbent import NUM_RUNNERS_UP, Choices, Incumbent

MOST_SUMS = 2**12  # batches of all devices that are added up
MOST_LISTED = 2**15  # devices of all multisets of a group of more than two
AT_ONCE = 2**12  # choices whose optimizer is timed


def are_few(problem: Problem, most: int) -> bool:
    """Whether there are few devices, and at most so many parts of choices before the batch is
    met.
    """
    if problem.counts.sum() > FEW_DEVICES:
        return False
    number = len(problem.groups)
    for group in problem.groups:
        of_group = comb(len(group.batch) + group.count - 1, group.count)
        if group.count > 2 and of_group * group.count > MOST_LISTED:
            return False
        number *= of_group
        if number > most:
            return False
    return True


def that_add_up(problem: Problem) -> list[Ints]:
    """Per group, the candidates whose batches some of the others complete to the whole.

    All of them where there are many.  Totals are bits of whole numbers.
    """
    batches = [np.unique(group.batch).tolist() for group in problem.groups]
    counts = [group.count for group in problem.groups]
    is_many = sum(map(mul, map(len, batches), counts)) > MOST_SUMS
    if is_many or problem.counts.sum() > FEW_DEVICES:
        return [np.arange(len(group.batch)) for group in problem.groups]
    whole = problem.global_batch_size
    within = (2 << whole) - 1
    before = [1]  # all but one of each group with those before it
    for own, count in zip(batches, counts, strict=True):
        totals = [before.pop()]
        for _ in range(count):
            totals.append(reduce(or_, [totals[-1] << b for b in own]) & within)
        before += totals[-2:]
    wanted, kept = 1 << whole, list[Ints]()
    for group, own, others in zip(
        problem.groups[::-1], batches[::-1], before[-2::-1], strict=True
    ):
        fitting = [b for b in own if others & (wanted >> b)]
        kept.insert(0, np.flatnonzero(np.isin(group.batch, fitting)))
        for _ in range(group.count):
            wanted = reduce(or_, [wanted >> b for b in own])
    return kept


def best_of_all(problem: Problem, cutoff_s: float) -> Incumbent:
    """The best choice and the next best; none is faster than the best.

    Nothing is found that is not faster than ``cutoff_s``, or if nothing fits.
    """
    best = Incumbent(problem, cutoff_s=cutoff_s)
    sets = [_multisets(len(group.batch), group.count) for group in problem.groups]  # [K, n]
    taken = _that_meet_batch(problem, sets)  # [G, N] indices into sets
    phases_s = np.zeros(taken.shape[1])
    for costs in problem.costs:
        slowest = [costs[g][each].max(axis=1) for g, each in enumerate(sets)]
        phases_s += np.max([s[k] for s, k in zip(slowest, taken, strict=True)], axis=0)
    min_s = phases_s + problem.least_optimizer_s  # no choice is faster
    kept = np.flatnonzero(min_s < best.target_s)
    order = kept[np.argsort(min_s[kept], kind="stable")]
    nearest: list[tuple[float, int]] = []  # objectives without the fixed part, and choices
    for start in range(0, len(order), AT_ONCE):
        part = order[start : start + AT_ONCE]
        if len(nearest) > NUM_RUNNERS_UP and min_s[part[0]] > nearest[NUM_RUNNERS_UP][0]:
            break
        objective_s = phases_s[part] + _optimizer_s(problem, sets, taken[:, part])
        near = np.argsort(objective_s, kind="stable")[: 1 + NUM_RUNNERS_UP]
        nearest += [(float(objective_s[i]), int(part[i])) for i in near]
        nearest = sorted(nearest)[: 1 + NUM_RUNNERS_UP]
    for seconds, k in nearest:
        if seconds < inf:
            best.offer(_choices(sets, taken[:, k]))
    return best


def _multisets(size: int, count: int) -> Ints:
    """[K, count] candidates of all devices of a group, in any order."""
    if count == 1:
        return np.arange(size)[:, None]
    if count == 2:
        return np.stack(np.triu_indices(size), axis=1)
    return np.array(list(combinations_with_replacement(range(size), count)))


def _that_meet_batch(problem: Problem, sets: list[Ints]) -> Ints:
    """[G, N] for every choice that meets the batch, the multiset of each group."""
    wanted = problem.global_batch_size
    taken: Ints = np.zeros((0, 1), dtype=np.int64)
    batch: Ints = np.zeros(1, dtype=np.int64)
    for g, (group, of_group) in enumerate(zip(problem.groups, sets, strict=True)):
        together = batch[:, None] + group.batch[of_group].sum(axis=1)
        is_last = g == len(sets) - 1
        before, own = np.nonzero(together == wanted if is_last else together <= wanted)
        taken = np.concatenate((taken[:, before], own[None]))
        batch = together[before, own]
    return taken


def _optimizer_s(problem: Problem, sets: list[Ints], taken: Ints) -> Floats:
    """[N] seconds of the optimizer; inf where the state does not fit.

    As ``fill_level``, of many choices.
    """
    groups = np.concatenate([np.full(each.shape[1], g) for g, each in enumerate(sets)])
    candidates = np.concatenate(
        [each[k] for each, k in zip(sets, taken, strict=True)], axis=1
    )  # [N, devices]
    fits = problem.room[groups, candidates].sum(axis=1) >= problem.state_numel
    room, rate = (  # [N, K * devices]
        np.concatenate(each[:, groups, candidates], axis=1) for each in problem.parts
    )
    is_free = np.isinf(rate)  # full at once
    demand = problem.state_numel - np.where(is_free, room, 0.0).sum(axis=1, keepdims=True)
    room, rate = np.where(is_free, 0.0, room), np.where(is_free, 0.0, rate)
    kinks = np.divide(room, rate, out=np.zeros(room.shape), where=rate > 0)
    order = np.argsort(kinks, axis=1, kind="stable")
    kinks, room, rate = (
        np.take_along_axis(each, order, axis=1) for each in (kinks, room, rate)
    )
    full = np.cumsum(room, axis=1)
    rates = np.cumsum(rate[:, ::-1], axis=1)[:, ::-1]  # of devices that are not full before
    # Between kink i-1 and kink i: those before i are full, the others take u rate_j.
    before = np.concatenate((np.zeros((len(full), 1)), full[:, :-1]), axis=1)
    is_reached = before + kinks * rates >= demand
    is_reached[:, -1] = True  # but for rounding
    first = np.argmax(is_reached, axis=1)[:, None]
    left = (demand - np.take_along_axis(before, first, axis=1))[:, 0]
    rest = np.take_along_axis(rates, first, axis=1)[:, 0]
    level = np.divide(left, rest, out=np.zeros(len(left)), where=(left > 0) & (rest > 0))
    return np.where(fits, np.maximum(level, problem.fixed_optimizer_s), inf)


def _choices(sets: list[Ints], taken: Ints) -> Choices:
    found = []
    for g, (of_group, k) in enumerate(zip(sets, taken.tolist(), strict=True)):
        candidates, number = np.unique(of_group[k], return_counts=True)
        pairs = zip(candidates.tolist(), number.tolist(), strict=True)
        found += [Choice(g, candidate, n) for candidate, n in pairs]
    return tuple(found)
