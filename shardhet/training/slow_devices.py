"""Find devices that are slower than their profile, from their compute times.

Let m_i be the seconds that device i has computed in a step, and p_i those that the profile
predicts for what the plan lets it compute.  Then

    r_i = m_i / p_i,   s_i = r_i / (the lower median of all r)

and device i is slow if s_i >= SLOW.  What a profile gets wrong for all devices alike, as their
clocks or a compiled model, makes no s_i differ from one, and no other plan better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

from shardhet.planner.advice.explain import Situation, at_other_speed
from shardhet.planner.problem.constraints import Constraints
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan
from shardhet.simulator.stages import devices_of, price_of

# Predictions of single ranks are up to a fifth off (experiments/predicted_and_measured).
SLOW = 1.3
# Speeds are rounded to powers of this, so that noise does not make every device a kind of its
# own, for which the planner searches longer.
SPEED_STEP = 1.05


def slownesses(
    measured_s: Sequence[float], predicted_s: Sequence[float]
) -> tuple[float | None, ...]:
    """s_i by position; None for a device that does not compute."""
    ratios = [
        measured / predicted if measured > 0 and predicted > 0 else None
        for measured, predicted in zip(measured_s, predicted_s, strict=True)
    ]
    known = sorted(ratio for ratio in ratios if ratio is not None)
    if not known:
        return (None,) * len(ratios)
    usual = known[(len(known) - 1) // 2]
    return tuple(None if ratio is None else ratio / usual for ratio in ratios)


def rounded(slowness: float) -> float:
    """The nearest power of ``SPEED_STEP``."""
    return float(SPEED_STEP ** round(log(slowness) / log(SPEED_STEP)))


def compute_seconds(
    plan: Plan, scenario: Scenario, places: Sequence[int] | None = None
) -> tuple[float, ...]:
    """p_i by position: forward and backward in one step, without waits.

    ``places`` are the devices' positions in the cluster; None: the same as in the plan.
    """
    ranks = price_of(of_devices(plan, scenario, places), scenario).ranks
    return tuple(rank.forward_s + rank.backward_s for rank in ranks)


def step_seconds(plan: Plan, scenario: Scenario, places: Sequence[int] | None = None) -> float:
    """The predicted time of one step."""
    return price_of(of_devices(plan, scenario, places), scenario).step_time_s


def places_of(plan: Plan, scenario: Scenario) -> tuple[int, ...]:
    """The positions in the cluster of the plan's devices, which stages take in any order."""
    if plan.stages is None:
        return tuple(range(plan.world_size))
    try:
        return tuple(devices_of(plan, scenario.cluster))
    except ValueError:  # hosts may have other names than when they were measured
        kinds = [DeviceSpec(kind=rank.device.kind) for rank in plan.ranks]
        ranks = [replace(r, device=kind) for r, kind in zip(plan.ranks, kinds, strict=True)]
        return tuple(devices_of(replace(plan, ranks=tuple(ranks)), scenario.cluster))


def of_devices(plan: Plan, scenario: Scenario, places: Sequence[int] | None = None) -> Plan:
    """The plan as one for the devices of the scenario, which may be renamed by their speed."""
    if plan.stages is None or places is None:
        return of_any_device(plan)
    devices = [scenario.cluster.devices[i] for i in places]
    ranks = [replace(r, device=device) for r, device in zip(plan.ranks, devices, strict=True)]
    return replace(plan, ranks=tuple(ranks), units=())


def at_speeds(scenario: Scenario, slowness_by_position: Mapping[int, float]) -> Scenario:
    """The scenario with some devices slower (above one) or faster than their profile."""
    names: dict[tuple[str | None, float], str] = {}
    devices = list(scenario.cluster.devices)
    for position, slowness in slowness_by_position.items():
        kind = devices[position].kind
        name = names.setdefault((kind, slowness), f"{kind} at {1 / slowness:.2f} of its speed")
        devices[position] = replace(devices[position], kind=name)
    for (kind, slowness), name in names.items():
        profile = scenario.profile
        same = replace(profile.device(kind), device_kind=name)
        profile = replace(profile, devices=(*profile.devices, same))
        here = Situation(scenario=replace(scenario, profile=profile), constraints=Constraints())
        scenario = at_other_speed(here, frozenset({name}), 1 / slowness).scenario
    return replace(scenario, cluster=scenario.cluster.with_devices(devices))


def of_any_device(plan: Plan) -> Plan:
    """The plan as one for devices of any kind, because kinds are renamed by their speed."""
    ranks = tuple(replace(rank, device=DeviceSpec()) for rank in plan.ranks)
    return replace(plan, ranks=ranks, units=())
