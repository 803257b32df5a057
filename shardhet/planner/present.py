"""A plan for those of the measured devices that are present when a job starts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from shardhet.planner.find import find_plan
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.stages.find import find_pipeline
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec
from shardhet.records.plan import Plan


def positions_of(present: Sequence[DeviceSpec], measured: Cluster) -> tuple[int, ...]:
    """The position in ``measured`` of each device that is there; none is used twice.

    A device of a measured host is one of the measured devices of that host, if any is of its
    kind; otherwise any of its kind that is left.  Those with most memory choose first, so that
    all find one where that is possible.  Raises ``ValueError`` with what was measured if one is
    of a kind that was not, or there are more of a kind than were measured.
    """
    free = dict(enumerate(measured.devices))
    found: dict[int, int] = {}
    order = sorted(range(len(present)), key=lambda i: -_memory_of(present[i]))
    for asks_for_host in (True, False):
        for i in order:
            device = present[i]
            if i in found:
                continue
            position = _first(free, device, asks_for_host=asks_for_host)
            if position is not None:
                found[i] = position
                del free[position]
    missing = [device for i, device in enumerate(present) if i not in found]
    if missing:
        raise ValueError(_not_measured(missing[0], present, measured))
    return tuple(found[i] for i in range(len(present)))


def part_for(present: Sequence[DeviceSpec], measured: Scenario) -> Scenario:
    """What was measured of the devices that are there, in the measured order.

    Raises ``ValueError`` as ``positions_of`` does.
    """
    return part_of(measured, positions_of(present, measured.cluster))


def plan_for(
    present: Sequence[DeviceSpec],
    measured: Scenario,
    *,
    global_batch_size: int,
    constraints: Constraints | None = None,
    budgets: Mapping[int, int] | None = None,
    max_stages: int = 1,
) -> Plan:
    """The best plan for the devices that are there, named as they announce themselves.

    ``budgets`` are bytes of memory of some of them, by index, that are less than the usual.
    With ``max_stages`` above 1 also of pipelines of up to so many stages, of all devices.
    Raises ``ValueError`` as ``positions_of`` does, and ``PlanError`` if they cannot train the
    model.
    """
    positions = positions_of(present, measured.cluster)
    scenario = part_of(measured, positions)
    # The part has its devices in the order of the measured cluster.
    order = sorted(range(len(present)), key=positions.__getitem__)
    constraints = (constraints or Constraints()).with_budgets(
        {order.index(i): nbytes for i, nbytes in (budgets or {}).items()}
    )
    plan, problem, places, flat_s = None, None, tuple(range(len(present))), inf
    try:
        plan = find_plan(scenario, global_batch_size=global_batch_size, constraints=constraints)
        flat_s = CostModel(scenario).predict(plan).step_time_s
    except PlanError as error:
        problem = error
    if max_stages > 1:
        found = find_pipeline(
            scenario,
            global_batch_size=global_batch_size,
            smaller=partial(part_of, scenario),
            max_stages=max_stages,
            constraints=constraints,
            cutoff_s=flat_s,
            needs_all=True,
        )
        if found is not None and found.step_time_s < flat_s:
            plan, places = found.plan, sum(found.groups, ())
    if plan is None:
        assert problem is not None
        raise problem
    ranks = tuple(
        replace(rank, device=_named(rank.device, present[order[place]]))
        for rank, place in zip(plan.ranks, places, strict=True)
    )
    return replace(plan, ranks=ranks)


def _first(
    free: dict[int, DeviceSpec], device: DeviceSpec, *, asks_for_host: bool
) -> int | None:
    """The position of the one with most memory, of those that ``device`` may stand for."""
    found: list[int] = []
    for position, measured in free.items():
        wanted = replace(measured, uuid=None)
        if not asks_for_host:
            wanted = replace(wanted, host=None)
        if wanted.accepts(device):
            found.append(position)
    return max(
        found, key=lambda position: (_memory_of(free[position]), -position), default=None
    )


def _memory_of(device: DeviceSpec) -> int:
    return device.memory_capacity_bytes or 0


def _named(planned: DeviceSpec, present: DeviceSpec) -> DeviceSpec:
    """What is planned for, on the host that it is on now."""
    return replace(planned, host=present.host, uuid=present.uuid)


def _not_measured(device: DeviceSpec, present: Sequence[DeviceSpec], measured: Cluster) -> str:
    def listed(devices: Sequence[DeviceSpec]) -> str:
        numbers = Counter(str(replace(each, host=None, uuid=None)) for each in devices)
        return ", ".join(f"{number} x {kind}" for kind, number in numbers.items())

    return (
        f"plan.measured: {device} is not among the measured devices that are left for it. "
        f"Measured: {listed(measured.devices)}; here: {listed(present)}. Run shardhet measure "
        "on a cluster that has all that may take part."
    )
