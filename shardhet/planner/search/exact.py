"""The most room for state within given limits, exactly: a dynamic programme over devices.

    best_i(j) = max_b best_{i-1}(j - b) + a_i(b)

with a_i(b) the most room of an allowed candidate of batch b.  It settles what the relaxation
leaves open, where that is affordable.
"""

import numpy as np

from shardhet.planner.problem.problem import Bools, Choice, Floats, Ints, Limits, Problem

SMALL_ADDITIONS, FEW_DEVICES = 1e5, 32


def effort(problem: Problem) -> float:
    """The number of additions that one call takes."""
    widths = [group.batch.max() + 1.0 for group in problem.groups]
    return float(problem.counts @ np.array(widths)) * (problem.global_batch_size + 1)


def is_small(problem: Problem) -> bool:
    """Whether a call is so short that it can be part of every feasibility test."""
    is_few = bool(problem.counts.sum() <= FEW_DEVICES)
    return is_few and effort(problem) <= SMALL_ADDITIONS


def best_choice(problem: Problem, limits: Limits) -> tuple[Choice, ...] | None:
    """The choice with the most room that meets the batch exactly; None if none meets it."""
    batch_size = problem.global_batch_size
    best = np.full(batch_size + 1, -np.inf)
    best[0] = 0.0
    steps: list[tuple[int, Floats, Ints, Floats]] = []
    allowed = problem.allowed(limits)
    for g, group in enumerate(problem.groups):
        room, candidate = _room_by_batch(problem, g, allowed[g], limits.optimizer_s)
        for _ in range(group.count):
            steps.append((g, room, candidate, best))
            best = _with_one_more(best, room)
    if best[batch_size] == -np.inf:
        return None
    # Backtracking recomputes what was taken, for one batch instead of all.
    counts: dict[tuple[int, int], int] = {}
    left = batch_size
    for g, room, candidate, before in reversed(steps):
        width = min(len(room), left + 1)
        b = int((before[left - width + 1 : left + 1][::-1] + room[:width]).argmax())
        pair = (g, int(candidate[b]))
        counts[pair] = counts.get(pair, 0) + 1
        left -= b
    return tuple(Choice(g, c, n) for (g, c), n in sorted(counts.items()))


def _with_one_more(best: Floats, room: Floats) -> Floats:
    """max_b best(j - b) + room(b) for every j; [batch_size + 1]."""
    width, each = len(room), best.itemsize
    padded = np.concatenate((np.full(width - 1, -np.inf), best))
    # A view, [width, batch_size + 1]: row b holds best shifted by b.
    shifted: Floats = np.ndarray(
        (width, len(best)), buffer=padded, offset=(width - 1) * each, strides=(-each, each)
    )
    most: Floats = (shifted + room[:, None]).max(axis=0)
    return most


def _room_by_batch(
    problem: Problem, g: int, allowed: Bools, optimizer_s: float
) -> tuple[Floats, Ints]:
    """The most room per batch up to the largest allowed, and the candidate that has it.

    Both are [largest + 1]; room is -inf where no candidate of the batch is allowed.
    """
    group = problem.groups[g]
    cap = problem.numels_within(g, optimizer_s)
    is_allowed = allowed[: len(group.batch)] & (group.batch <= problem.global_batch_size)
    # Sorted by batch, then by most room: in reverse order the best is written last.
    indices = np.flatnonzero(is_allowed)[::-1]
    if len(cap) > 1:
        cap = cap[indices]
        order = np.lexsort((np.minimum(group.room[indices], cap), group.batch[indices]))
        indices, cap = indices[order], cap[order]
    batch = group.batch[indices]
    width = int(batch[-1]) + 1 if len(batch) else 1
    room = np.full(width, -np.inf)
    candidate = np.zeros(width, dtype=np.int64)
    room[batch] = np.minimum(group.room[indices], cap)
    candidate[batch] = indices
    return room, candidate
