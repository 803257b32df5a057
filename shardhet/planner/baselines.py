"""Simpler ways to plan, as planners: what the best plan is compared with.

``even``          every device computes and stores the same (stock FSDP, well tuned)
``compute_only``  batches by what devices can do, state even
``memory_only``   batches even, state by what devices have room for
``cephalo_choice``  the dynamic programme of Cephalo (Guo et al., ICS 2025)

The first three are the search of ``solve`` over fewer candidates, so each is the best plan
of its form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from shardhet.cluster import Cluster
from shardhet.planner.demands import NO_LIMITS, Demands
from shardhet.planner.find import NO_DEMANDS, solve
from shardhet.planner.problem import Floats, Ints
from shardhet.planner.search import DEFAULT_EFFORT, Effort
from shardhet.planner.solution import PlanSolution
from shardhet.profiles import Profile
from shardhet.workload import Workload


def _solve_as(
    cluster: Cluster,
    workload: Workload,
    profile: Profile,
    *,
    global_batch_size: int,
    has_even_batches: bool,
    has_even_state: bool,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
) -> PlanSolution:
    """The best plan of one form that keeps to ``demands`` too."""
    if has_even_batches:
        demands = _with_even_batches(demands, cluster.world_size, global_batch_size)
    return solve(
        cluster,
        workload,
        profile,
        global_batch_size=global_batch_size,
        demands=replace(demands, has_even_state=has_even_state),
        effort=effort,
        num_rescored=1,
    )


even = partial(_solve_as, has_even_batches=True, has_even_state=True)
compute_only = partial(_solve_as, has_even_batches=False, has_even_state=True)
memory_only = partial(_solve_as, has_even_batches=True, has_even_state=False)


def _with_even_batches(demands: Demands, world_size: int, global_batch_size: int) -> Demands:
    """The same number of samples for everyone; what does not divide goes to the first."""
    each, rest = divmod(global_batch_size, world_size)
    limits = {
        position: replace(
            demands.limits.get(position, NO_LIMITS), rank_batch_size=each + (position < rest)
        )
        for position in range(world_size)
    }
    # What does not divide may fall between devices that must be equal.
    return replace(demands, limits=limits, equal=() if rest else demands.equal)


@dataclass(frozen=True, slots=True)
class WholeMicrobatches:
    """A device's batch as Cephalo writes it: ``number`` microbatches of ``size``."""

    size: int
    number: int


def cephalo_choice(
    seconds: Sequence[Floats],  # per device [M + 1, n]: of n microbatches of each size
    bytes_by_size: Sequence[Floats],  # per device [M + 1]: of compute, by microbatch size
    *,
    global_batch_size: int,
    total_bytes: float,  # of all devices together, less the state
) -> tuple[WholeMicrobatches, ...] | None:
    """What Cephalo's released planner chooses; None where it finds nothing.

    best_i(j, k) = min over sizes m and numbers n of max(best_{i-1}(j - m n, k - m), t_i(m, n))

    with j samples and k the sum of the microbatch sizes, which stands for memory: of all k
    the fastest is taken whose memory fits the devices' total.  Every device computes at
    least one sample, all microbatches of a device are equal.  O(N B^3 log B), vectorised
    over (j, k).
    """
    batch = global_batch_size
    best = np.full((batch + 1, batch + 1), np.inf)
    best[0, 0] = 0.0
    taken = []
    for times in seconds:
        following = np.full_like(best, np.inf)
        pick = np.zeros(best.shape, dtype=np.int64)
        pairs = [
            (size, number)
            for size in range(1, len(times))
            for number in range(1, min(batch // size, times.shape[1] - 1) + 1)
        ]
        for index, (size, number) in enumerate(pairs):
            samples = size * number
            slower = np.maximum(
                best[: batch + 1 - samples, : batch + 1 - size], times[size, number]
            )
            target = following[samples:, size:]
            is_better = slower < target
            target[is_better] = slower[is_better]
            pick[samples:, size:][is_better] = index
        taken.append((pairs, pick, following))
        best = following
    for k in np.argsort(best[batch], kind="stable"):
        if not np.isfinite(best[batch, k]):
            break
        choice = _traced(taken, batch, int(k))
        used = sum(table[each.size] for table, each in zip(bytes_by_size, choice, strict=True))
        if used <= total_bytes:
            return choice
    return None


def _traced(
    taken: Sequence[tuple[list[tuple[int, int]], Ints, Floats]], j: int, k: int
) -> tuple[WholeMicrobatches, ...]:
    """The choices that lead to (j, k) after the last device."""
    choice = []
    for pairs, pick, _ in reversed(taken):
        size, number = pairs[int(pick[j, k])]
        choice.append(WholeMicrobatches(size, number))
        j, k = j - size * number, k - size
    return tuple(reversed(choice))
