"""Combine the measurements of all ranks into one profile and one cluster; pure functions.

Devices of one kind are interchangeable to the planner, and ranks meet at every unit.  So the
samples of the slowest rank of a kind stand for the whole kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean

from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.profiler.compute import Samples
from shardhet.profiler.here import HostPartReport, pace_of, room_of
from shardhet.profiler.stopwatch import timing_of, typical_mean
from shardhet.profiler.traffic import (
    CollectiveSamples,
    PairSamples,
    uneven_shares,
)
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.records.profiles import (
    CollectivePoint,
    Collectives,
    Curve,
    DeviceProfile,
    PairLink,
    Profile,
    Source,
)
from shardhet.records.workload import Workload

WEIGHT_STEPS = 100  # resolution of the unevenness weights, which lie between 0 and 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank measured about itself."""

    device: DeviceSpec  # as announced, with the memory that this rank may use
    samples: Samples  # while all ranks compute
    optimizer_s_per_element: list[float]
    unit_overhead_s: float
    reserved_bytes: int
    note: str  # versions and date
    host: HostPartReport | None = None

    @property
    def kind(self) -> str:
        """The kind of its device."""
        return self.device.kind or "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReport:
    """What all ranks measured about the links; the same on each."""

    collectives: list[CollectiveSamples]
    two_levels: list[CollectiveSamples]  # the same in two levels; empty: they have one
    pairs: list[PairSamples]
    overlap_slowdowns: list[float]  # by rank, see DeviceProfile.overlap_slowdown
    note: str


def make_cluster(
    ranks: Sequence[DeviceSpec],
    pairs: Sequence[PairSamples],
    parts: Sequence[HostPartReport | None] = (),
) -> Cluster:
    """The cluster: devices by host in the order of their ranks, and the slowest links.

    ``parts`` are what ranks found of their hosts.
    """
    hosts = list(dict.fromkeys(device.host or "" for device in ranks))
    within: dict[str, list[PairSamples]] = {host: [] for host in hosts}
    between: list[PairSamples] = []
    parts_of: dict[str, list[HostPartReport]] = {host: [] for host in hosts}
    for device, part in zip(ranks, parts, strict=False):
        if part is not None:
            parts_of[device.host or ""].append(part)
    for pair in pairs:
        host, other = ranks[pair.sender].host or "", ranks[pair.receiver].host or ""
        (within[host] if host == other else between).append(pair)
    return Cluster(
        nodes=tuple(
            Node(
                host=host,
                devices=tuple(device for device in ranks if (device.host or "") == host),
                link=_slowest_link(within[host]),
                host_memory_bytes=room_of(parts_of[host]),
                host_bytes_per_s=pace_of(parts_of[host]),
            )
            for host in hosts
        ),
        between_nodes=_slowest_link(between),
    )


def _slowest_link(pairs: Sequence[PairSamples]) -> Link | None:
    if not pairs:
        return None
    bandwidths = [pair.bandwidth_bytes_per_s for pair in pairs]
    return Link(
        latency_s=max(pair.latency_s for pair in pairs),
        bandwidth_bytes_per_s=min(bandwidths),
        source=f"measured: the slowest of {len(pairs)} pairs, one at a time; the fastest "
        f"{max(bandwidths) / 1e9:.2f} GB/s",
    )


def make_profile(
    reports: Sequence[RankReport],
    traffic: TrafficReport,
    cluster: Cluster,
    workload: Workload,
) -> Profile:
    """The profile of what the ranks have measured."""
    by_kind: dict[str, list[RankReport]] = {}
    slowdowns: dict[str, list[float]] = {}
    for report, slowdown in zip(reports, traffic.overlap_slowdowns, strict=True):
        by_kind.setdefault(report.kind, []).append(report)
        slowdowns.setdefault(report.kind, []).append(slowdown)
    points = _points(traffic.collectives)
    place = positions_by_rank([report.device for report in reports])
    profile = Profile(
        devices=tuple(
            replace(
                _device_profile(kind, reports),
                overlap_slowdown=fmean(slowdowns[kind]),
            )
            for kind, reports in by_kind.items()
        ),
        collectives=Collectives(source=Source.MEASURED, points=points, note=traffic.note),
        unit_overhead_s=max(report.unit_overhead_s for report in reports),
        pairs=tuple(
            PairLink(
                sender=place[each.sender],
                receiver=place[each.receiver],
                latency_s=each.latency_s,
                bandwidth_bytes_per_s=each.bandwidth_bytes_per_s,
            )
            for each in traffic.pairs
        ),
        note="all ranks computing at once",
    )
    if not points:
        return profile
    weighted = with_unevenness(
        profile.collectives, traffic.collectives, profile, cluster, workload
    )
    two_levels = None
    if traffic.two_levels:
        even = replace(profile.collectives, points=_points(traffic.two_levels))
        two_levels = with_unevenness(even, traffic.two_levels, profile, cluster, workload)
    return replace(profile, collectives=weighted, two_levels=two_levels)


def positions_by_rank(devices: Sequence[DeviceSpec]) -> dict[int, int]:
    """Where ``make_cluster`` puts the device of each rank."""
    hosts = list(dict.fromkeys(device.host or "" for device in devices))
    ranks = sorted(range(len(devices)), key=lambda i: hosts.index(devices[i].host or ""))
    return {rank: position for position, rank in enumerate(ranks)}


def _points(collectives: Sequence[CollectiveSamples]) -> tuple[CollectivePoint, ...]:
    return tuple(
        CollectivePoint(
            nbytes=each.nbytes,
            gather=timing_of(each.gather_s),
            reduce=timing_of(each.reduce_s),
        )
        for each in collectives
    )


def _device_profile(kind: str, reports: Sequence[RankReport]) -> DeviceProfile:
    totals_s = [_comparable_s(report.samples, reports) for report in reports]
    slowest = reports[totals_s.index(max(totals_s))]
    spread = max(totals_s) / min(totals_s)
    note = slowest.note
    if len(reports) > 1:
        note += f"; the slowest of {len(reports)} ranks, {spread:.2f} times the fastest"
    return DeviceProfile(
        device_kind=kind,
        source=Source.MEASURED,
        units=tuple(unit.to_record(name) for name, unit in slowest.samples.items()),
        optimizer_seconds_per_element=max(
            typical_mean(report.optimizer_s_per_element) for report in reports
        ),
        reserved_bytes=max(report.reserved_bytes for report in reports),
        note=note,
    )


def _comparable_s(own: Samples, reports: Sequence[RankReport]) -> float:
    """Mean seconds over the cases that every rank of the kind has measured."""
    total = 0.0
    for kind, unit in own.items():
        common = set.intersection(*(set(each.samples[kind].seconds) for each in reports))
        total += sum(typical_mean([sum(p) for p in unit.seconds[size]]) for size in common)
    return total


def with_unevenness(
    even: Collectives,
    collectives: Sequence[CollectiveSamples],
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
) -> Collectives:
    """``even``, with where gathers and reductions lie between a ring (0) and messages (1).

    Each weight w in [0, 1] minimises the squared logarithm of measured over predicted seconds
    of the uneven cut.  The prediction is t(n (1 - w + w u)), with the even curve t and the
    cut's unevenness u.
    """
    shares = uneven_shares(cluster.world_size)
    model = CostModel(Scenario(cluster, workload, profile))
    unevenness = model.unevenness(shares, [True] * cluster.world_size)
    assert even.gather_s is not None
    assert even.reduce_s is not None
    gather_s = {each.nbytes: typical_mean(each.uneven_gather_s) for each in collectives}
    reduce_s = {each.nbytes: typical_mean(each.uneven_reduce_s) for each in collectives}
    return replace(
        even,
        gather_unevenness_weight=_weight(even.gather_s, gather_s, unevenness),
        reduce_unevenness_weight=_weight(even.reduce_s, reduce_s, unevenness),
    )


def _weight(even: Curve, uneven_s: Mapping[int, float], unevenness: float) -> float:
    def error(weight: float) -> float:
        stretch = 1 - weight + weight * unevenness
        return sum(
            log(seconds / even.at(nbytes * stretch)) ** 2
            for nbytes, seconds in uneven_s.items()
        )

    return min((step / WEIGHT_STEPS for step in range(WEIGHT_STEPS + 1)), key=error)
