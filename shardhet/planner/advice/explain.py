"""What limits a plan, and what would help: more of each resource is tried.

A gain is the improvement of the best plan after one change: more of a resource, or plans that
were not allowed.  It includes everything that a plan may change, and it is 0 for a resource
that does not limit the plan.  What a plan loses where devices are not as fast as the profile
says is such a gain, too: that of the best plan at the other speed over this one.  Changes that
a key of the command makes are in ``apps.planning.what_if``.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.solution import PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import with_one_more
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec
from shardhet.records.codec import first_places
from shardhet.records.profiles import (
    CollectivePoint,
    Collectives,
    DeviceProfile,
    Profile,
    Timing,
)

MORE = 0.1  # of compute, memory or links
# Memory helps in jumps (a larger microbatch, less recomputation), so a tenth more may do
# nothing although much more would help a lot.
EIGHTFOLD, EIGHTFOLD_NAME = 8.0, "8 times as much"
OFF = 0.2  # of a speed that is not as the profile says
MAX_KINDS = 8  # that are asked about one by one
MANY_KINDS = 32
NEGLIGIBLE = 3e-3  # a relative gain below this counts as none
SLOWEST_MARGIN = 0.02  # devices this close to the slowest also count as slowest
GIB = 2**30


class Resource(Enum):
    """A resource that a cluster may have more of."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LINKS = "links"
    DEVICES = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that a planner is given, except the objective."""

    scenario: Scenario
    constraints: Constraints
    # Only devices of this kind changed: what is as fast as asked for has one of them.
    changed_kind: str | None = None
    added: int | None = None  # the position of a device that the cluster had not

    @property
    def cluster(self) -> Cluster:
        """The cluster of the scenario."""
        return self.scenario.cluster

    @property
    def kinds(self) -> list[str]:
        """The kinds of its devices, as far as they have names."""
        return [*filter(None, self.cluster.number_by_kind)]

    @property
    def profile(self) -> Profile:
        """The profile of the scenario."""
        return self.scenario.profile

    def with_profile(self, profile: Profile) -> "Situation":
        """The same situation with another profile."""
        return replace(self, scenario=replace(self.scenario, profile=profile))

    def with_cluster(self, cluster: Cluster, constraints: Constraints) -> "Situation":
        """The same workload and profile on another cluster."""
        scenario = replace(self.scenario, cluster=cluster)
        return replace(self, scenario=scenario, constraints=constraints)


# The most that a plan reaches, if it is more than the second; PlanError if none is seen to be.
Objective = Callable[[Situation, float], float]
Reach = Callable[[float], tuple[float, str]]  # likewise, and what is said of the plan


@dataclass(frozen=True, slots=True)
class Variant:
    """One change to what is planned for."""

    of: str  # "compute of NVIDIA A100", "host memory"
    change: str  # "10 % faster", "1 GiB more each", or the key that makes it
    reach: Reach
    resource: Resource | None = None  # None: other plans, which a key allows
    device_kind: str | None = None  # None: of all devices, or of the links
    most: float = inf  # no plan reaches more
    within: str = ""  # a change that allows all that this one does

    @property
    def is_advice(self) -> bool:
        """Whether somebody may do it; otherwise it only shows what limits the plan."""
        is_bought = self.resource is Resource.MEMORY and self.device_kind is not None
        return self.resource in (None, Resource.DEVICES) or is_bought

    @property
    def is_endless(self) -> bool:
        """Whether it is practically unlimited memory on all devices."""
        return self.change == EIGHTFOLD_NAME

    @property
    def is_limit(self) -> bool:
        """Whether it limits the plan if it helps most: a tenth more of one resource on all."""
        return self.device_kind is None and not (self.resource is None or self.is_endless)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a change would give."""

    variant: Variant
    value: float  # the objective after the change
    note: str  # what the plan is, where the change does not say it
    relative: float  # improvement of the objective; 0.1 is a tenth better

    @property
    def is_none(self) -> bool:
        """Whether it counts as no gain."""
        return self.relative <= NEGLIGIBLE


def gain_of(variant: Variant, value: float, at_least: float = 0.0) -> Gain:
    """What a change would give over ``value``; nothing if no plan reaches ``at_least``."""
    least, reached, note = max(at_least, value * (1 + NEGLIGIBLE)), value, ""
    if variant.most > least:
        with suppress(ValueError):  # a PlanError, or what is asked for excludes it
            reached, note = variant.reach(least)
    relative = max(0.0, reached / value - 1)
    return Gain(variant=variant, value=max(value, reached), note=note, relative=relative)


def tried(
    variants: Iterable[Variant],
    value: float,
    *,
    num_best: int | None = None,
    within_s: float = inf,
    beside: Callable[[Variant], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Iterator[Gain]:
    """What changes give, one after the other in ``beside``, for about ``within_s`` seconds.

    With ``num_best``, a change counts as no gain once it is known to be worse than the best so
    many. A change also counts as none if the change that includes it (``within``) gained
    nothing.
    """
    begin_s, best, useless = time.monotonic(), list[float](), set[str]()
    for each in variants:
        with beside(each):
            asked = replace(each, most=value) if each.within in useless else each
            gain = gain_of(asked, value, best[-1] if len(best) == num_best else 0.0)
        yield gain
        useless |= {each.change} if gain.is_none else set()
        if time.monotonic() - begin_s > within_s:
            return
        best = sorted((*best, gain.value), reverse=True)[:num_best]


def more_of_each(situation: Situation, objective: Objective) -> list[Variant]:
    """More of each resource, as ``larger_situations`` has it."""

    def named(resource: Resource, kind: str | None) -> str:
        if kind is None:
            return f"all {resource.value}"
        return kind if resource is Resource.DEVICES else f"{resource.value} of {kind}"

    return [
        Variant(
            named(resource, kind),
            change,
            _reach(objective, more),
            resource,
            kind,
            within=EIGHTFOLD_NAME * (resource is Resource.MEMORY and change != EIGHTFOLD_NAME),
        )
        for resource, kind, change, more in larger_situations(situation)
    ]


def _reach(objective: Objective, situation: Situation) -> Reach:
    return lambda least: (objective(situation, least), "")


def lost_at_other_speeds(
    solution: PlanSolution, situation: Situation, objective: Objective
) -> Gain | None:
    """The most that a plan loses with one kind of device slower or faster by ``OFF``.

    None if the kinds are too many, or only one: its speed hardly changes the best plan.  Memory
    does not depend on speed, so what fits still fits.
    """
    kinds, worst = situation.kinds, None
    if not 1 < len(kinds) <= MAX_KINDS:
        return None
    fastest_s = solution.fastest_s or solution.predicted.step_time_s
    fastest = solution.plan.global_batch_size / fastest_s
    for kind in kinds:
        for speed, change in ((1 - OFF, "slower"), (1 + OFF, "faster")):
            other = at_other_speed(situation, frozenset({kind}), speed)
            predicted = CostModel(other.scenario).predict(solution.plan)
            value = solution.plan.global_batch_size / predicted.step_time_s
            most = inf if speed > 1 else fastest  # nothing gains by a slower device
            variant = Variant(kind, change, _reach(objective, other), most=most)
            loss = gain_of(variant, value, value * (1 + worst.relative) if worst else 0.0)
            if worst is None or loss.relative > worst.relative:
                worst = loss
    return worst


Larger = tuple[Resource, str | None, str, Situation]


def larger_situations(situation: Situation) -> list[Larger]:
    """Situations with more of one resource: on all devices first, then per kind of device.

    Of many kinds only the most frequent are asked about, and of more than ``MANY_KINDS`` none,
    because every situation takes a search; nor about one more of so many that are alike that
    their sum hardly changes.
    """
    cluster, profile, kinds = situation.cluster, situation.profile, situation.kinds
    tenth = f"{MORE:.0%}".replace("%", " %")
    everyone, of_all = tuple(kinds), frozenset(kinds)
    larger: list[Larger] = [
        (Resource.COMPUTE, None, f"{tenth} faster", _faster(situation, of_all)),
        (Resource.MEMORY, None, EIGHTFOLD_NAME, _roomier(situation, of_all, EIGHTFOLD)),
        (Resource.MEMORY, None, f"{tenth} more", _roomier(situation, of_all, 1 + MORE)),
    ]
    if profile.collectives.points and cluster.world_size > 1:
        two_levels = None if profile.two_levels is None else _faster_links(profile.two_levels)
        in_one = _faster_links(profile.collectives)
        links = replace(profile, collectives=in_one, two_levels=two_levels)
        larger.append((Resource.LINKS, None, f"{tenth} faster", situation.with_profile(links)))
    if len(kinds) == 1:
        kinds = []  # with one kind, "all" and "each" are the same
    if len(everyone) > MANY_KINDS:
        return larger
    if len(kinds) > MAX_KINDS:
        kinds = sorted(kinds, key=lambda kind: -cluster.number_by_kind[kind])[:MAX_KINDS]
        everyone = tuple(kinds)
    for kind in kinds:
        one, alone = frozenset({kind}), replace(situation, changed_kind=kind)
        larger.append((Resource.COMPUTE, kind, f"{tenth} faster", _faster(alone, one)))
        roomier = _roomier(alone, one, 1.0, GIB)
        larger.append((Resource.MEMORY, kind, "1 GiB more each", roomier))
    few = (kind for kind in everyone if cluster.number_by_kind[kind] * NEGLIGIBLE <= 1)
    added = ((kind, with_another(situation, kind)) for kind in few)
    larger += [(Resource.DEVICES, kind, "one more", more) for kind, more in added if more]
    return larger


def at_other_speed(situation: Situation, kinds: frozenset[str], speed: float) -> Situation:
    """The situation with some kinds of device ``speed`` times as fast."""

    def changed(device: DeviceProfile) -> DeviceProfile:
        if device.device_kind not in kinds:
            return device
        update_s = device.optimizer_seconds_per_element / speed
        faster = device.with_times(lambda seconds: seconds / speed)
        return replace(faster, optimizer_seconds_per_element=update_s)

    devices = tuple(map(changed, situation.profile.devices))
    return situation.with_profile(replace(situation.profile, devices=devices))


def _faster(situation: Situation, kinds: frozenset[str]) -> Situation:
    return at_other_speed(situation, kinds, 1 + MORE)


def _faster_links(collectives: Collectives) -> Collectives:
    def point(each: CollectivePoint) -> CollectivePoint:
        return replace(each, gather=_shorter(each.gather), reduce=_shorter(each.reduce))

    return replace(collectives, points=tuple(map(point, collectives.points)))


def _shorter(timing: Timing) -> Timing:
    return Timing.single(timing.mean_s / (1 + MORE))


def _roomier(
    situation: Situation, kinds: frozenset[str], factor: float, extra_bytes: int = 0
) -> Situation:
    """More memory for devices of some kinds; demanded budgets grow as well."""
    cluster = situation.cluster

    def more(nbytes: int) -> int:
        return int(nbytes * factor) + extra_bytes

    def device(position: int) -> DeviceSpec:
        found, library = cluster.devices[position], cluster.node_of[position].library_bytes
        if found.kind not in kinds or found.memory_capacity_bytes is None:
            return found
        grown = cluster.capacity_for(more(cluster.budgets[position]), library)
        return replace(found, memory_capacity_bytes=grown)

    looks = [(id(e), node.library_bytes) for node in cluster.nodes for e in node.devices]
    known = {look: device(i) for look, i in first_places(looks).items()}
    limits = dict(situation.constraints.limits)
    for position, stated in limits.items():
        budget = stated.memory_budget_bytes
        if budget is not None and cluster.devices[position].kind in kinds:
            limits[position] = replace(stated, memory_budget_bytes=more(budget))
    return situation.with_cluster(
        cluster.with_devices(map(known.__getitem__, looks)),
        replace(situation.constraints, limits=limits),
    )


def with_another(situation: Situation, kind: str) -> Situation | None:
    """One more device of a kind, next to the last one; None if nothing says what links do then.

    Demands move with their devices.
    """
    cluster, constraints = situation.cluster, situation.constraints
    last = max(i for i, device in enumerate(cluster.devices) if device.kind == kind)
    larger = with_one_more(situation.scenario, last)
    if larger is None:
        return None

    def moved(position: int) -> int:
        return position + (position > last)

    constraints = replace(
        constraints,
        limits={moved(position): each for position, each in constraints.limits.items()},
        equal=tuple(tuple(map(moved, each)) for each in constraints.equal),
    )
    return Situation(
        scenario=larger, constraints=constraints, changed_kind=kind, added=last + 1
    )


def slowest_kinds(solution: PlanSolution) -> str:
    """The kinds of devices whose compute is longest."""
    compute_s = [rank.forward_s + rank.backward_s for rank in solution.predicted.ranks]
    slowest_s = max(compute_s) * (1 - SLOWEST_MARGIN)
    return _kinds(solution, [seconds >= slowest_s for seconds in compute_s])


def fullest_kinds(solution: PlanSolution) -> str:
    """The kinds of devices that have next to no memory left."""
    return _kinds(
        solution,
        [
            rank.memory.total_bytes >= (1 - SLOWEST_MARGIN) * rank.memory_budget_bytes
            for rank in solution.predicted.ranks
        ],
    )


def _kinds(solution: PlanSolution, are_meant: Iterable[bool]) -> str:
    ranks = zip(solution.plan.ranks, are_meant, strict=True)
    return ", ".join(
        dict.fromkeys(rank.device.kind or "device" for rank, is_meant in ranks if is_meant)
    )
