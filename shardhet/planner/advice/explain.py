"""What limits a plan, and what would help: every change to what is planned for is tried.

A gain is the improvement of the best plan after one change: more of a resource, or plans that
were not allowed.  It includes everything that a plan may change, and it is 0 for a resource
that does not limit the plan.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.pricing.part import with_one_more
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec
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
MAX_KINDS = 8  # that are asked about one by one
MAX_FULL_KINDS = 3  # that are asked which of them is full
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
    FORM = (
        "form"  # of plans: what they may keep on hosts, stages, number formats, who takes part
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that a planner is given, except the objective."""

    setting: Setting
    demands: Demands

    @property
    def cluster(self) -> Cluster:
        """The cluster of the setting."""
        return self.setting.cluster

    @property
    def profile(self) -> Profile:
        """The profile of the setting."""
        return self.setting.profile

    def with_profile(self, profile: Profile) -> "Situation":
        """The same situation with another profile."""
        return replace(self, setting=replace(self.setting, profile=profile))

    def with_cluster(self, cluster: Cluster, demands: Demands) -> "Situation":
        """The same workload and profile on another cluster."""
        return Situation(setting=replace(self.setting, cluster=cluster), demands=demands)


Objective = Callable[[Situation], float]  # larger is better; PlanError if nothing is better
Reach = Callable[
    [], tuple[float, str]
]  # the objective, and what is said of it; PlanError likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One change to what is planned for."""

    resource: Resource
    device_kind: str | None  # None: of all devices, or of the links
    of: str  # "compute of NVIDIA A100", "host memory"
    change: str  # "10 % faster", "1 GiB more each", or the key that makes it
    reach: Reach

    @property
    def is_advice(self) -> bool:
        """Whether somebody may do it; otherwise it only shows what limits the plan."""
        if self.resource is Resource.MEMORY:
            return self.device_kind is not None
        return self.resource in (Resource.FORM, Resource.DEVICES)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What limits a plan."""

    gains: tuple[Gain, ...]
    slowest_kinds: tuple[str, ...]  # whose compute is longest
    fullest_kinds: tuple[str, ...]  # that have next to no memory left
    links_s: float  # the part of the step in which communication sets the pace
    compute_s: float  # the part of the step in which a device's compute sets the pace
    optimizer_s: float
    overhead_s: float  # the runtime's own

    @property
    def step_time_s(self) -> float:
        """Seconds of the whole step."""
        return self.links_s + self.compute_s + self.optimizer_s + self.overhead_s

    @property
    def limit(self) -> Gain | None:
        """The largest gain from a tenth more of one resource on all devices, if any."""
        tenths = [
            gain
            for gain in self.gains
            if gain.variant.device_kind is None
            and gain.variant.resource is not Resource.FORM
            and gain.variant.change != EIGHTFOLD_NAME
        ]
        helpful = [gain for gain in tenths if not gain.is_none]
        return max(helpful, key=lambda gain: gain.relative, default=None)

    @property
    def endless_memory(self) -> Gain | None:
        """The gain from practically unlimited memory on all devices, if it was asked."""
        each = (gain for gain in self.gains if gain.variant.change == EIGHTFOLD_NAME)
        return next(each, None)


def explained(
    solution: PlanSolution, situation: Situation, gains: Sequence[Gain]
) -> Explanation:
    """The explanation with these gains."""
    predicted = solution.predicted
    paced_by_links_s = sum(turn.seconds for turn in predicted.turns if turn.is_paced_by_links)
    return Explanation(
        gains=tuple(gains),
        slowest_kinds=_slowest_kinds(solution, situation.cluster),
        fullest_kinds=_fullest_kinds(solution, situation.cluster),
        links_s=paced_by_links_s + predicted.exposed_comm_s,
        compute_s=predicted.forward_s + predicted.backward_s - paced_by_links_s,
        optimizer_s=predicted.optimizer_s,
        overhead_s=predicted.overhead_s,
    )


def more_of_each(situation: Situation, objective: Objective) -> list[Variant]:
    """More of each resource, as ``larger_situations`` has it."""

    def named(resource: Resource, kind: str | None) -> str:
        if kind is None:
            return f"all {resource.value}"
        return kind if resource is Resource.DEVICES else f"{resource.value} of {kind}"

    def reached(more: Situation) -> tuple[float, str]:
        return objective(more), ""

    return [
        Variant(
            resource=resource,
            device_kind=kind,
            of=named(resource, kind),
            change=change,
            reach=partial(reached, more),
        )
        for resource, kind, change, more in larger_situations(situation)
    ]


def gain_of(variant: Variant, value: float) -> Gain:
    """What a change would give over ``value``; nothing if no plan with it is better."""
    try:
        reached, note = variant.reach()
    except ValueError:  # a PlanError, or what is asked for excludes it
        reached, note = value, ""
    relative = max(0.0, reached / value - 1)
    return Gain(variant=variant, value=max(value, reached), note=note, relative=relative)


def full_kind(
    solution: PlanSolution, situation: Situation, *, value: float, objective: Objective
) -> str | None:
    """The kind of device whose memory a step has several rounds for.

    Of those that are fullest, the first of which more memory would help; None if it would of
    none alone.
    """
    ranks = zip(solution.plan.ranks, solution.predicted.ranks, strict=True)
    filled = [
        (cost.memory.total_bytes / max(1, cost.memory_budget_bytes), str(rank.device.kind))
        for rank, cost in ranks
        if rank.rank_batch_size
    ]
    kinds = list(dict.fromkeys(kind for _, kind in sorted(filled, reverse=True)))
    for kind in kinds[:MAX_FULL_KINDS]:
        more = _roomier(situation, frozenset({kind}), EIGHTFOLD)
        with suppress(PlanError):
            if objective(more) > value * (1 + NEGLIGIBLE):
                return kind
    return None


Larger = tuple[Resource, str | None, str, Situation]


def larger_situations(situation: Situation) -> list[Larger]:
    """Situations with more of one resource: on all devices first, then per kind of device.

    Of many kinds only the most frequent are asked about, and of more than ``MANY_KINDS`` none,
    because every situation takes a search.
    """
    cluster, profile = situation.cluster, situation.profile
    kinds = [kind for kind in dict.fromkeys(device.kind for device in cluster.devices) if kind]
    tenth = f"{MORE:.0%}".replace("%", " %")
    everyone, of_all = tuple(kinds), frozenset(kinds)
    larger: list[Larger] = [
        (Resource.COMPUTE, None, f"{tenth} faster", _faster(situation, of_all)),
        (Resource.MEMORY, None, f"{tenth} more", _roomier(situation, of_all, 1 + MORE)),
        (Resource.MEMORY, None, EIGHTFOLD_NAME, _roomier(situation, of_all, EIGHTFOLD)),
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
        numbers = Counter(device.kind for device in cluster.devices)
        kinds = sorted(kinds, key=lambda kind: -numbers[kind])[:MAX_KINDS]
        everyone = tuple(kinds)
    for kind in kinds:
        one = frozenset({kind})
        larger.append((Resource.COMPUTE, kind, f"{tenth} faster", _faster(situation, one)))
        roomier = _roomier(situation, one, 1.0, GIB)
        larger.append((Resource.MEMORY, kind, "1 GiB more each", roomier))
    added = ((kind, with_another(situation, kind)) for kind in everyone)
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
        grown = cluster.capacity_for(more(cluster.memory_budget_bytes(position)), library)
        return replace(found, memory_capacity_bytes=grown)

    limits = dict(situation.demands.limits)
    for position, stated in limits.items():
        budget = stated.memory_budget_bytes
        if budget is not None and cluster.devices[position].kind in kinds:
            limits[position] = replace(stated, memory_budget_bytes=more(budget))
    return situation.with_cluster(
        cluster.with_devices(map(device, range(cluster.world_size))),
        replace(situation.demands, limits=limits),
    )


def with_another(situation: Situation, kind: str) -> Situation | None:
    """One more device of a kind, next to the last one; None if nothing says what links do then.

    Demands move with their devices.
    """
    cluster, demands = situation.cluster, situation.demands
    last = max(i for i, device in enumerate(cluster.devices) if device.kind == kind)
    larger = with_one_more(situation.setting, last)
    if larger is None:
        return None

    def moved(position: int) -> int:
        return position + (position > last)

    demands = replace(
        demands,
        limits={moved(position): each for position, each in demands.limits.items()},
        equal=tuple(tuple(map(moved, each)) for each in demands.equal),
    )
    return Situation(setting=larger, demands=demands)


def _slowest_kinds(solution: PlanSolution, cluster: Cluster) -> tuple[str, ...]:
    compute_s = [rank.forward_s + rank.backward_s for rank in solution.predicted.ranks]
    slowest_s = max(compute_s) * (1 - SLOWEST_MARGIN)
    return _kinds(cluster, [i for i, seconds in enumerate(compute_s) if seconds >= slowest_s])


def _fullest_kinds(solution: PlanSolution, cluster: Cluster) -> tuple[str, ...]:
    full = [
        i
        for i, rank in enumerate(solution.predicted.ranks)
        if rank.memory.total_bytes >= (1 - SLOWEST_MARGIN) * rank.memory_budget_bytes
    ]
    return _kinds(cluster, full)


def _kinds(cluster: Cluster, positions: list[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cluster.devices[i].kind or "device" for i in positions))
