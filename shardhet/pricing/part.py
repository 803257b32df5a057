"""The same workload on a part of a cluster, or on one device more, from what was measured.

Compute is that of each kind of device.  Measured collectives are those of all devices.  Of R
with curve t, let l = t(0) be the latency and p the time per byte of their slowest link.  Each
device sends R - 1 messages and moves (R - 1) / R of the bytes past every other, so for R'
devices with p'

    t'(n) = l (R' - 1) / (R - 1)  +  (t(n) - l) ((R' - 1) / R') / ((R - 1) / R) p' / p

where p'/p is 1 unless pairs of both were measured.

What was derived from specifications is derived anew, in the proportion in which the profile
has since been changed: the links that the others cross, how many take part in a collective, in
one level or in two, and how much slower the slowest of so many devices is.

With one device more, collectives follow in the same two ways from those of the whole.

A member of a context group computes a part of each sample: mirrored spans have as large a part
of a causal sample's pairs as of its tokens.  On top comes the exchange of keys and values,
which nothing hides.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from shardhet.pricing.derive import (
    derive_collectives,
    derive_device,
    derive_two_levels,
    slowest_of,
)
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster
from shardhet.records.margin import with_libraries
from shardhet.records.profiles import (
    CollectivePoint,
    Collectives,
    ComputePoint,
    Curve,
    DeviceProfile,
    PairLink,
    Profile,
    Source,
    Timing,
    UnitProfile,
)
from shardhet.records.workload import UnitKind


def _among(profile: Profile, world_size: int, positions: Collection[int]) -> Collectives:
    """The collectives among some of so many devices, estimated from those of all."""
    kept = tuple(sorted(positions))
    if len(kept) == 1 or not profile.collectives.points:
        return replace(profile.collectives, points=(), note="one device")
    pace, pace_there = _slowest(profile, kept), _slowest(profile, range(world_size))
    slower = pace / pace_there if pace and pace_there else 1.0
    return _of_number(profile.collectives, world_size, len(kept), slower=slower)


def _of_number(
    measured: Collectives, size_there: int, size: int, *, slower: float = 1.0
) -> Collectives:
    """What was measured of ``size_there`` devices, for ``size`` of them.

    A byte takes ``slower`` times as long over the slowest link.
    """
    messages = (size - 1) / (size_there - 1)
    nbytes = messages * size_there / size * slower

    def scaled(curve: Curve | None, nbytes_whole: int) -> Timing:
        assert curve is not None
        latency_s = curve.intercept_at_zero
        moving_s = curve.at(nbytes_whole) - latency_s
        return Timing.single(messages * latency_s + nbytes * moving_s)

    return replace(
        measured,
        source=Source.DERIVED,
        points=tuple(
            CollectivePoint(
                nbytes=point.nbytes,
                gather=scaled(measured.gather_s, point.nbytes),
                reduce=scaled(measured.reduce_s, point.nbytes),
            )
            for point in measured.points
        ),
        note=f"estimated from those of {size_there} devices; {measured.note}",
    )


def _slowest(profile: Profile, positions: Sequence[int]) -> float | None:
    """Seconds per byte of the slowest pair in the group; None if too few were measured."""
    inside = set(positions)
    known: dict[frozenset[int], PairLink] = {
        frozenset((each.sender, each.receiver)): each
        for each in profile.pairs
        if inside.issuperset((each.sender, each.receiver))
    }
    in_a_row = {frozenset(each) for each in pairwise(positions)}
    if not known or not in_a_row <= set(known):
        return None
    return 1 / min(each.bandwidth_bytes_per_s for each in known.values())


@dataclass(frozen=True, slots=True)
class Member:
    """A device that computes its part of the tokens of samples, as others of a group do."""

    token_share: float
    device_kind: str | None
    collectives: Collectives  # of the group
    unevenness: float  # of their parts
    recomputed: tuple[tuple[str, ...], ...] = ()  # units, by member; (): all the same ones

    def exchange_s(self, nbytes: float) -> tuple[float, float]:
        """Seconds of gathering so many bytes, and of reducing their gradients."""
        of, beyond = self.collectives, self.unevenness - 1
        if of.gather_s is None or of.reduce_s is None or not nbytes:
            return 0.0, 0.0
        return (
            of.gather_s.at(nbytes * (1 + of.gather_unevenness_weight * beyond)),
            of.reduce_s.at(nbytes * (1 + of.reduce_unevenness_weight * beyond)),
        )


def part_of_samples(scenario: Scenario, member: Member) -> Scenario:
    """The scenario for a device that computes a part of each sample."""
    workload, share = scenario.workload, member.token_share
    kinds = tuple(kind.of_tokens(share) for kind in workload.kinds)
    num_tokens = max(1, round(share * workload.tokens_per_sample))
    part = replace(workload, kinds=kinds, tokens_per_sample=num_tokens)
    device = scenario.profile.device(member.device_kind)
    described = {kind.kind: kind for kind in scenario.cluster.kinds}.get(device.device_kind)
    derived: list[DeviceProfile] = []
    if device.source is Source.DERIVED and described is not None:
        derived = [derive_device(described, each) for each in (workload, part)]

    def unit(each: UnitProfile) -> UnitProfile:
        of_kind = [w.kind_by_name[each.unit_kind] for w in (workload, part)]
        in_derived = [of.unit_by_kind[each.unit_kind] for of in derived]
        return _unit_of_member(each, of_kind[0], of_kind[1], member, in_derived)

    units = tuple(
        unit(each) if each.unit_kind in workload.kind_by_name else each for each in device.units
    )
    profile = replace(scenario.profile, devices=(replace(device, units=units),))
    return replace(scenario, workload=part, profile=profile)


def _unit_of_member(
    unit: UnitProfile,
    whole: UnitKind,
    part: UnitKind,
    member: Member,
    derived: Sequence[UnitProfile],  # of the whole and of the part; (): it was measured
) -> UnitProfile:
    """The unit on a part of each sample, with the exchange.

    What was measured is read off its curves there; what was derived is derived anew, in the
    proportion in which the profile has since been changed.
    """
    share = member.token_share
    more_bytes = part.activation_bytes + part.transient_bytes
    more_bytes -= round(share * (whole.activation_bytes + whole.transient_bytes))

    def at(own: Curve, size: int, of_derived: Sequence[Curve]) -> float:
        if not of_derived:
            return own.at(share * size)
        there_s, here_s = (curve.at(size) for curve in of_derived)
        return own.at(size) * here_s / there_s if there_s else 0.0

    def point(size: int) -> ComputePoint:
        gather_s, reduce_s = member.exchange_s(size * whole.kv_bytes)
        forward_s = at(unit.forward_s, size, [each.forward_s for each in derived])
        backward_s = at(unit.backward_s, size, [each.backward_s for each in derived])
        peak = unit.peak_bytes
        return ComputePoint(
            microbatch_size=size,
            forward=Timing.single(forward_s + gather_s),
            backward=Timing.single(backward_s + reduce_s),
            peak_bytes=None if peak is None else int(peak.at(share * size)) + size * more_bytes,
        )

    return replace(unit, points=tuple(point(each.microbatch_size) for each in unit.points))


def part_of(scenario: Scenario, positions: Collection[int]) -> Scenario:
    """The scenario with the devices at ``positions`` only."""
    smaller = links_of(scenario, positions)
    devices = _devices(scenario, smaller.cluster, smaller.cluster.number_by_kind)
    return replace(smaller, profile=replace(smaller.profile, devices=devices))


def links_of(scenario: Scenario, positions: Collection[int]) -> Scenario:
    """The same, but with the profiles of all devices, which wait for as many as before."""
    cluster, profile = scenario.cluster, scenario.profile
    smaller = cluster.only(positions)
    place = {}
    if profile.pairs:
        place = {position: i for i, position in enumerate(sorted(positions))}
    pairs = tuple(
        replace(each, sender=place[each.sender], receiver=place[each.receiver])
        for each in profile.pairs
        if each.sender in place and each.receiver in place
    )
    if len(positions) == cluster.world_size:
        collectives, two_levels = profile.collectives, profile.two_levels
    elif _is_derived(scenario):
        collectives, two_levels = _derived(scenario, smaller)
    else:
        collectives, two_levels = _among(profile, cluster.world_size, positions), None
    return replace(
        scenario,
        cluster=smaller,
        profile=replace(
            profile,
            collectives=collectives,
            two_levels=two_levels,
            pairs=pairs,
        ),
    )


def with_one_more(scenario: Scenario, position: int) -> Scenario | None:
    """The scenario with the device at ``position`` twice, side by side.

    None if nothing says how long collectives take: the first link between two devices, or of a
    host that has one device, need not have been stated.
    """
    cluster, profile = scenario.cluster, scenario.profile
    try:
        larger = _with_copy(cluster, position)
        derived: tuple[Collectives, Collectives | None] | None = None
        if cluster.world_size == 1:
            derived = derive_collectives(larger, profile.link_fraction), None
        elif _is_derived(scenario):
            derived = _derived(scenario, larger)
    except ValueError:
        return None
    if derived is not None:
        one, two = derived
    elif profile.collectives.points:
        profile = replace(profile, pairs=_moved(profile.pairs, position))
        one = _of_number(profile.collectives, cluster.world_size, larger.world_size)
        two = profile.two_levels and _in_proportion(
            profile.two_levels, one, profile.collectives
        )
    else:
        one, two = profile.collectives, profile.two_levels
    devices = _devices(scenario, larger, [each.device_kind for each in profile.devices])
    return replace(
        scenario,
        cluster=larger,
        profile=replace(profile, devices=devices, collectives=one, two_levels=two),
    )


def _moved(pairs: Sequence[PairLink], position: int) -> tuple[PairLink, ...]:
    """The pairs where another device follows that at ``position``."""

    def moved(i: int) -> int:
        return i + (i > position)

    return tuple(
        replace(each, sender=moved(each.sender), receiver=moved(each.receiver))
        for each in pairs
    )


def _with_copy(cluster: Cluster, position: int) -> Cluster:
    """The cluster with the device at ``position`` twice, and what libraries take there."""
    nodes = list(cluster.nodes)
    for n, here in enumerate(cluster.positions_by_node):
        if position in here:
            before = nodes[n].devices[: position - here.start + 1]
            devices = (*before, before[-1], *nodes[n].devices[len(before) :])
            nodes[n] = replace(nodes[n], devices=devices)
    larger = replace(cluster, nodes=tuple(nodes))
    if any(node.library_bytes is None for node in nodes):
        return larger
    return with_libraries(larger, has_stages=with_libraries(cluster) != cluster)


def _devices(
    scenario: Scenario, other: Cluster, kinds: Collection[str | None]
) -> tuple[DeviceProfile, ...]:
    """Profiles of devices of these kinds, of which so many are waited for as ``other`` has."""
    pace = slowest_of(other.world_size) / slowest_of(scenario.cluster.world_size)
    return tuple(
        each.with_times(lambda s: pace * s) if each.source is Source.DERIVED else each
        for each in scenario.profile.devices
        if each.device_kind in kinds
    )


def _is_derived(scenario: Scenario) -> bool:
    """Whether collectives follow from specifications, so that those of a part do too."""
    collectives = scenario.profile.collectives
    if collectives.source is not Source.DERIVED or not collectives.points:
        return False
    try:
        return bool(scenario.cluster.links)
    except ValueError:  # a link is not stated: they were estimated from measured ones
        return False


@lru_cache(maxsize=128)  # of the whole and of its parts, for each change that is tried
def _stated(
    cluster: Cluster, link_fraction: float | None
) -> tuple[Collectives, Collectives | None]:
    return derive_collectives(cluster, link_fraction), derive_two_levels(cluster, link_fraction)


def _derived(scenario: Scenario, other: Cluster) -> tuple[Collectives, Collectives | None]:
    """The collectives of a part of the cluster, or of more, in one level and in two."""
    cluster, profile = scenario.cluster, scenario.profile
    fraction = profile.link_fraction
    (stated, _), (one, two) = _stated(cluster, fraction), _stated(other, fraction)
    one = _in_proportion(one, profile.collectives, stated)
    return one, two and _in_proportion(two, profile.collectives, stated)


def _in_proportion(there: Collectives, now: Collectives, stated: Collectives) -> Collectives:
    """Those of others, changed as those of the whole are from what was stated."""

    def changed(timing: Timing, now_s: Curve | None, stated_s: Curve | None, at: int) -> Timing:
        assert now_s is not None
        assert stated_s is not None
        was_s = stated_s.at(at)
        return Timing.single(now_s.at(at) / was_s * timing.mean_s if was_s else timing.mean_s)

    points = tuple(
        CollectivePoint(
            nbytes=each.nbytes,
            gather=changed(each.gather, now.gather_s, stated.gather_s, each.nbytes),
            reduce=changed(each.reduce, now.reduce_s, stated.reduce_s, each.nbytes),
        )
        for each in there.points
    )
    return replace(
        there,
        points=points,
        gather_unevenness_weight=now.gather_unevenness_weight,
        reduce_unevenness_weight=now.reduce_unevenness_weight,
    )
