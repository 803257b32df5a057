"""How the devices of a host share its memory.

The search lets each device take all of it, so that its bound holds however it is shared.  What
devices store is then within what there is (``within_hosts``).  Where that is slower than the
bound, or does not fit, the memory is divided before the search: among some devices of each
host, and then as in the best plan that was found.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

import numpy as np

from shardhet.planner.problem.constraints import Constraints, host_bytes
from shardhet.planner.problem.problem import Floats, fill_level
from shardhet.planner.problem.solution import PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.records.cluster import Cluster
from shardhet.records.plan import RankPlan

Parts = dict[int, float]  # bytes by position
MAX_REFINED = 4  # divisions as in the best plan so far


def within_hosts(
    model: CostModel,
    constraints: Constraints,
    ranks: Sequence[RankPlan],
    room: Floats,
    row_numel: float,
) -> Floats:
    """[devices] elements of ``room`` such that hosts have memory for what is kept there."""
    cluster, room = model.cluster, room.copy()
    for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
        on_host = [i for i in here if ranks[i].optimizer_on_host]
        if on_host and node.host_memory_bytes is not None:
            inputs = sum(
                ranks[i].rank_batch_size
                * model.of_member(constraints.member(i)).host_bytes_per_sample(ranks[i])
                for i in here
            )
            left = (node.host_memory_bytes - inputs) / model.workload.state_bytes_per_element
            left -= len(on_host) * row_numel  # that rounding to rows may add
            room[on_host] = as_evenly(room[on_host], max(0.0, left))
            for equal in map(list, constraints.equal):
                room[equal] = room[equal].min()
    return room


def as_evenly(room: Floats, wanted: float) -> Floats:
    """Elements on each device, the same where there is room."""
    ones = np.ones(len(room))
    level = fill_level(room, ones, ones, min(wanted, float(room.sum())))  # equal up to rounding
    return np.minimum(room, level)


def divisions(
    constraints: Constraints, cluster: Cluster, found: Sequence[PlanSolution]
) -> Iterator[Parts]:
    """Ways to divide each host's memory: evenly among all its devices; among those with the
    least, or the most, memory of their own; then as the best plan in ``found`` uses it (the
    caller may append to ``found``).

    None if no host says how much it has, or nothing may be kept there.
    """
    if min(host_bytes(constraints, cluster)) == inf:
        return
    budgets, known = constraints.budgets(cluster), list[Parts]()
    most = max(map(len, cluster.positions_by_node))
    numbers = dict.fromkeys(-(-most // 2**i) for i in range(most.bit_length() + 1))
    for number, sign in product(numbers, (1, -1)):
        weights = Parts()
        for here in cluster.positions_by_node:
            chosen = sorted(here, key=lambda i: sign * budgets[i])[:number]
            weights |= {i: float(i in chosen) for i in here}
        if weights not in known:
            known.append(weights)
            yield _divided(cluster, weights)
    for _ in range(MAX_REFINED if found else 0):
        ranks = min(found, key=step_s).predicted.ranks
        weights = {i: float(rank.memory.host_bytes) for i, rank in enumerate(ranks)}
        if weights in known:
            return
        known.append(weights)
        yield _divided(cluster, weights)


def _divided(cluster: Cluster, weights: Parts) -> Parts:
    """All memory of each host in proportion to these weights, or equal parts if all are 0; what
    is not stated is not limited.
    """
    parts = Parts()
    for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
        total = sum(weights[i] for i in here)
        for i in here:
            part = weights[i] / total if total else 1 / len(here)
            parts[i] = inf if node.host_memory_bytes is None else part * node.host_memory_bytes
    return parts


def step_s(solution: PlanSolution) -> float:
    """Seconds of the step."""
    return solution.predicted.step_time_s
