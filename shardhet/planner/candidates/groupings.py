"""Context groups that may be worth it: which devices share samples, and each one's tokens.

Devices of a node, of a kind in a node, neighbours in pairs, or all share samples.  A plan with
them is searched for as any other, with each group in place of a device (``GroupTimes``).  Parts
of the tokens are in proportion to

    p_i^(1 - x)  M_i^x

for the parts p_i with which members take equally long, and budgets M_i: by speed for x = 0, and
from there to memory.  Of many samples, whole ones are dealt out as evenly without an exchange.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, product
from math import inf

from shardhet.planner.problem.constraints import NO_LIMITS, Constraints
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import Member

MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW = 4  # samples of a step for each device; with more, groups are of use only if nothing fits
BALANCED = 1.02  # a step over its compute, spread perfectly: not worth groups
SIZES = 4  # of microbatches, for a bound
BALANCING = 4  # steps, after which members take equally long
Groups = Sequence[Mapping[int, Member]]


def with_groups(
    solved: Callable[..., PlanSolution],
    model: CostModel,
    constraints: Constraints,
    global_batch_size: int,
) -> PlanSolution:
    """The plan without context groups, or a faster one that has some.

    The bound then holds for plans that have the same.  ``solved`` gives the plan for
    constraints, and raises ``PlanError`` if none takes at most so long.
    """
    best: PlanSolution | None = None
    why_none = PlanError("")
    alone, devices = replace(constraints, may_share_samples=False), model.cluster.devices
    try:
        best = solved(alone)
    except PlanError as error:
        why_none = error
    whole_s = [_sample_s(model, device.kind) for device in devices]
    ideal_s = BALANCED * global_batch_size / sum(1 / each for each in whole_s)
    is_few = global_batch_size <= FEW * len(devices)
    if _may_have_groups(model, constraints) and (
        best is None or (is_few and best.predicted.step_time_s > ideal_s)
    ):
        for groups in _groupings(model, constraints, whole_s):
            most_s = inf if best is None else best.predicted.step_time_s
            if _least_s(model, groups, whole_s, global_batch_size) >= most_s:
                continue
            with suppress(PlanError):
                found = solved(replace(alone, context_groups=groups), most_s)
                if found.predicted.step_time_s < most_s:
                    best = found
    if best is None:
        raise why_none
    return best


def _may_have_groups(model: CostModel, constraints: Constraints) -> bool:
    """Whether anything is exchanged, and nothing but memory is demanded of devices."""
    free = (
        replace(e, memory_budget_bytes=None, host_bytes=inf)
        for e in constraints.limits.values()
    )
    all_alike = constraints.has_even_state or constraints.has_even_batches or constraints.equal
    has_attention = any(kind.kv_bytes for kind in model.workload.kinds)
    return has_attention and not all_alike and all(each == NO_LIMITS for each in free)


def _groupings(
    model: CostModel, constraints: Constraints, whole_s: Sequence[float]
) -> Iterator[Groups]:
    """Those by speed first."""
    cluster = model.cluster
    nodes = [list(each) for each in cluster.positions_by_node]
    ways = [
        nodes,
        [
            list(kind)
            for node in nodes
            for _, kind in groupby(node, lambda i: cluster.devices[i].kind)
        ],
        [node[i : i + 2] for node in nodes for i in range(0, len(node), 2)],
        [list(range(cluster.world_size))],
    ]
    budgets, seen = constraints.budgets(cluster), list[Groups]()
    for mix, way in product(MIXES, ways):
        groups = []
        for of in filter(lambda each: len(each) > 1, way):
            shares = _in_parts({i: 1 / whole_s[i] for i in of})
            for _ in range(BALANCING):
                shares = _in_parts(
                    {i: each / _member_s(model, shares, i) for i, each in shares.items()}
                )
            shares = _in_parts(
                {i: each ** (1 - mix) * budgets[i] ** mix for i, each in shares.items()}
            )
            groups.append({i: model.member_of(shares, i) for i in of})
        if groups and groups not in seen:
            seen.append(groups)
            yield groups


def _in_parts(weights: Mapping[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {i: each / total for i, each in weights.items()}


def _member_s(model: CostModel, shares: Mapping[int, float], position: int) -> float:
    member = model.member_of(shares, position)
    return _sample_s(model.of_member(member), member.device_kind)


def _least_s(
    model: CostModel, groups: Groups, whole_s: Sequence[float], num_samples: int
) -> float:
    """No step with these groups is shorter."""
    inside = {i for each in groups for i in each}
    paces_s = [s for i, s in enumerate(whole_s) if i not in inside]
    paces_s += [
        max(_sample_s(model.of_member(each), each.device_kind) for each in group.values())
        for group in groups
    ]
    return max(num_samples / sum(1 / each for each in paces_s), min(paces_s))


def _sample_s(model: CostModel, kind: str | None) -> float:
    """The least seconds of a sample in all units."""
    numbers = {n: k for n, k in model.workload.num_units_by_kind.items() if k}
    whole_s = sum(
        k * model.curves_s(kind, name, SIZES).sum(axis=0) for name, k in numbers.items()
    )
    return float(min(whole_s[size] / size for size in range(1, 1 + SIZES)))
