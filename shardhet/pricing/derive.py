"""A profile from specifications, for a cluster that has not been measured.

All figures are labelled as derived.  Units are priced by ``shardhet.pricing.roofline``.

A collective is a ring over all devices, in plan order.  Its bytes pass the slowest link, of
whose bandwidth they get LINK_FRACTION.  GeForce cards have no peer-to-peer transfers: all that
share a host copy through its memory at once, so of n > 3 they get LINK_FRACTION (3 / n)^1.5.
Between nodes and regions, bytes pass a cable of bandwidth b and the memory of both hosts, one
after the other, so of b they get max(LINK_FRACTION, 1 / (1 / FRAMES + b / HOST_BYTES_PER_S)):
0.92 of 1 Gbit/s, 0.74 of 10, 0.57 of 25, and LINK_FRACTION from some 60 on.
Besides, the first byte takes R - 1 hops to reach the last of R devices, each with the latency
of its link, as in NCCL's own model of a ring (NVIDIA/nccl, src/graph/tuning.cc) and in Thakur,
Rabenseifner and Gropp (2005), section 4.1.  So a collective of 512 devices takes longer than
one of 128.

In two levels, the part k/R of a node's k devices crosses to each of the other nodes, and the
rest comes from them; then k devices pass all bytes on inside.  The two follow on each other:

    t(n) = l_across + max over nodes of max(k (N - 1), R - k) / R  n / p_across
           + max over nodes of ((k - 1) l_inside + (k - 1) / k  n / p_inside)

GPUs of AMD and of NVIDIA meet over gloo alone.  It sends rows to each device by itself, in one
level, so to a node of k of R devices k (R - k) / R of all bytes cross the cable, one link for
all of them; and k (k - 1) / R pass the memory of the host at HOST_BYTES_PER_S, whatever PCIe
carries.  This is not measured.

Devices meet in every collective, so a unit takes as long as on the slowest of R that are alike.
If their times are normal with a relative deviation s, the slowest of R is expected to take
about 1 + s sqrt(2 ln R) times the mean.  s is STRAGGLING.

The host launches kernels while the device computes, so a visit takes no less than launching all
of its kernels.  It takes longer on hosts of NVIDIA's cards without bfloat16, from before 2020.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, log, sqrt
from operator import ne

from shardhet.pricing.efficiency import Efficiency, efficiency_of
from shardhet.pricing.roofline import (
    BACKWARD_FACTOR,
    MEMORY_FRACTION,
    Roofline,
    matrices_of,
)
from shardhet.records.cluster import Cluster, Link
from shardhet.records.kinds import FP16_ACCUMULATION, DeviceKind
from shardhet.records.profiles import (
    CollectivePoint,
    Collectives,
    ComputePoint,
    DeviceProfile,
    Profile,
    Source,
    Timing,
    UnitProfile,
)
from shardhet.records.workload import UnitKind, Workload

# On PCIe hosts a ring reaches 1 / 2.7 of the point-to-point bandwidth (measured on Cephalo's).
LINK_FRACTION = 0.37
# The same of PCIe 3.0 x16, 12 GB/s after its protocol: what a ring through hosts reaches where
# no cable is slower.  NCCL over sockets reached 4.1 to 5.2 GB/s of a 100 Gbit/s network at
# best (NVIDIA/nccl, issue 450).
HOST_BYTES_PER_S = LINK_FRACTION * 12e9
FRAMES = 0.94  # of a cable's bits are data: 1,448 bytes of each 1,538 of TCP over Ethernet
# Two or three GeForce cards on a host reach 0.3 to 0.4 of the specification of PCIe, eight
# RTX 4090 0.08 to 0.09 (FSDP in the published artifact of RoundPipe): 0.37 (3 / 8)^1.5 = 0.085.
WITHOUT_PEER_TO_PEER = "GeForce"
UNCROWDED, CROWDING = 3, 1.5
# Compute that overlaps collectives takes 1.126 times as long: Cephalo's published coefficient.
OVERLAP_SLOWDOWN = 1 - 1 / 1.126
STATE_ITEMSIZE = 4
RESERVED_BYTES = 2**29  # a CUDA context with the libraries of torch
# From 8 to 128 H100 a training with FSDP lost 2.7 % of its tokens/s (pytorch/torchtitan,
# benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3): 1.08 s, if stragglers are all.
STRAGGLING = 0.025
NVIDIA, AMD = ("NVIDIA ", "Tesla ", "Quadro "), ("AMD ",)  # how the names of kinds begin
MICROBATCH_SIZES = (1, 2, 4, 8, 16)
# Of a kernel, with all that the host does between two.  A block of 20 kernels took 1.2 ms in
# forward beside an H200, a third of both passes where launches decide (358 ms for 96 of them;
# experiments/gpu).  Beside a V100 it took 3.9 ms, however many cards shared its products, and
# beside a T4 5.5 (DachengLi1/AMP, src/known_cost; experiments/derived).
LAUNCH_S, OLD_LAUNCH_S = 6e-5, 2e-4
KERNELS_PER_MATRIX = 5  # in forward: a block of four has about 20
COLLECTIVE_NBYTES = (2**20, 2**24, 2**28)


def derive_profile(
    cluster: Cluster,
    workload: Workload,
    *,
    compute_fraction: float | None = None,
    link_fraction: float | None = None,
    fp16_accumulation: bool = False,
) -> Profile:
    """The profile that follows from the cluster's specifications.

    ``compute_fraction`` of the peak FLOP/s replaces the efficiency of every kind, and
    ``link_fraction`` of the bandwidth what follows for every link.
    With ``fp16_accumulation`` products in float16 are summed in float16, which is faster on
    kinds that list a peak for it.
    """
    kinds = [cluster.kind(name) for name in dict.fromkeys(d.kind for d in cluster.devices)]
    dtype, slowest = workload.param_dtype, slowest_of(cluster.world_size)
    if fp16_accumulation and dtype == "float16":
        kinds = [summing_in_float16(kind) for kind in kinds]
    if compute_fraction is None:
        efficiencies = [efficiency_of(kind, dtype) for kind in kinds]
        spread = max(each.spread for each in efficiencies)
        said = f"within a factor of {spread:g} for nine of ten blocks"
    else:
        stated = Efficiency(forward=compute_fraction, backward=compute_fraction, spread=inf)
        efficiencies = [stated] * len(kinds)
        said = f"{compute_fraction:.2f} of peak FLOP/s"
    pairs = zip(kinds, efficiencies, strict=True)
    devices = tuple(_device_profile(kind, workload, each, slowest) for kind, each in pairs)
    return Profile(
        devices=devices,
        collectives=derive_collectives(cluster, link_fraction),
        two_levels=derive_two_levels(cluster, link_fraction),
        link_fraction=link_fraction,
        note=f"derived: {said}{_said_of_launches(kinds, devices, workload, slowest)}, "
        f"{_said_of_links(cluster, link_fraction)}",
    )


def _said_of_launches(
    kinds: Sequence[DeviceKind],
    devices: Sequence[DeviceProfile],
    workload: Workload,
    slowest: float,
) -> str:
    """In which microbatches launches take longer than the kernels, if in any."""
    numbers = workload.num_units_by_kind
    block = max(workload.kinds, key=lambda kind: numbers[kind.name] * kind.forward_flops)
    sizes = [
        point.microbatch_size
        for kind, device in zip(kinds, devices, strict=True)
        for point in device.unit_by_kind[block.name].points
        if point.forward.mean_s <= slowest * _launches_s(kind, block)
    ]
    if not sizes:
        return ""
    number = f"up to {max(sizes)} samples" if max(sizes) > 1 else "one sample"
    return f" (not in microbatches of {number}, which take as long as launching their kernels)"


def _launches_s(kind: DeviceKind, unit: UnitKind) -> float:
    """Seconds in which a host with devices of a kind launches the unit's forward."""
    peaks = dict(kind.peak_flops_per_s)
    is_old = peaks.get("float16") and not peaks.get("bfloat16")
    is_slow = is_old and kind.kind.startswith(NVIDIA)
    launch_s = OLD_LAUNCH_S if is_slow else LAUNCH_S
    return KERNELS_PER_MATRIX * len(matrices_of(unit)) * launch_s


def summing_in_float16(kind: DeviceKind) -> DeviceKind:
    """The kind with its peak in float16 replaced by that with sums in float16, if listed."""
    peaks = dict(kind.peak_flops_per_s)
    peaks["float16"] = peaks.get(FP16_ACCUMULATION) or peaks.get("float16", 0.0)
    return replace(kind, peak_flops_per_s=tuple(peaks.items()))


def slowest_of(number: int) -> float:
    """The time that the slowest of so many devices is expected to take, over the mean."""
    return 1 + STRAGGLING * sqrt(2 * log(number))


def derive_device(kind: DeviceKind, workload: Workload) -> DeviceProfile:
    """A device of the kind, alone and with its usual efficiency."""
    return _device_profile(kind, workload, efficiency_of(kind, workload.param_dtype), 1.0)


def _device_profile(
    kind: DeviceKind, workload: Workload, efficiency: Efficiency, slowest: float
) -> DeviceProfile:
    roofline = Roofline.of(kind, workload.param_dtype)
    bytes_per_s = MEMORY_FRACTION * kind.memory_bandwidth_bytes_per_s
    # The optimizer reads parameter, gradient and moments, and writes all but the gradient.
    passes = workload.trained_numel / workload.numel * (3 + 2 * workload.num_moments)
    return DeviceProfile(
        device_kind=kind.kind,
        source=Source.DERIVED,
        units=tuple(
            _unit_profile(unit, roofline, efficiency, slowest, _launches_s(kind, unit))
            for unit in workload.kinds
            if workload.num_units_by_kind[unit.name]
        ),
        optimizer_seconds_per_element=passes * STATE_ITEMSIZE / bytes_per_s,
        overlap_slowdown=OVERLAP_SLOWDOWN,
        reserved_bytes=RESERVED_BYTES,
        note=kind.source,
    )


def _unit_profile(
    unit: UnitKind,
    roofline: Roofline,
    efficiency: Efficiency,
    slowest: float,
    launches_s: float,
) -> UnitProfile:
    def timing(kernels_s: float, factor: int) -> Timing:
        return Timing.single(slowest * max(kernels_s, factor * launches_s))

    return UnitProfile(
        unit_kind=unit.name,
        points=tuple(
            ComputePoint(
                microbatch_size=size,
                forward=timing(roofline.forward_s(unit, size, efficiency), 1),
                backward=timing(roofline.backward_s(unit, size, efficiency), BACKWARD_FACTOR),
            )
            for size in MICROBATCH_SIZES
        ),
    )


@lru_cache(maxsize=4)  # for collectives in one level, and in two
def _link_paces(cluster: Cluster, stated: float | None) -> list[tuple[float, float]]:
    """Of every link of the ring, the part of its bandwidth that is reached, and bytes/s.

    Raises ``ValueError`` naming a link that is not stated.
    """
    # A link that joins nodes may equal one within a node; the part within is never larger.
    parts = {link: _part_of_cable(link) for link in cluster.links}
    crowding = {kind for kind in cluster.number_by_kind if WITHOUT_PEER_TO_PEER in str(kind)}
    within: dict[tuple[int, int], Link | None] = {}  # the links inside nodes that are alike
    for node in cluster.nodes:
        if len(node.devices) > 1:
            crowd = crowding and sum(device.kind in crowding for device in node.devices)
            within[id(node.link), crowd or 0] = node.link
    for (_, crowd), link in within.items():
        assert link is not None  # or there are no ``cluster.links``
        parts[link] = min(parts[link], _part_within(crowd))
    return [
        (part, part * link.bandwidth_bytes_per_s)
        for link, part in ((link, stated or part) for link, part in parts.items())
    ]


def _part_within(crowd: int) -> float:
    """What the devices of a node reach of the link between them, with so many that copy."""
    return LINK_FRACTION * min(1.0, UNCROWDED / max(1, crowd)) ** CROWDING


def _part_of_cable(link: Link) -> float:
    """What a ring reaches of a link between nodes; see the module."""
    part = 1 / (1 / FRAMES + link.bandwidth_bytes_per_s / HOST_BYTES_PER_S)
    return max(LINK_FRACTION, part)


def _said_of_links(cluster: Cluster, stated: float | None) -> str:
    paces = _link_paces(cluster, stated) or [(stated or LINK_FRACTION, inf)]
    return f"links at {min(paces, key=lambda pace: pace[1])[0]:.2g} of their bandwidth"


def meets_over_gloo(cluster: Cluster) -> bool:
    """Whether the makers of its GPUs have no library in common that carries their tensors."""
    kinds = list(map(str, cluster.number_by_kind))
    return all(any(kind.startswith(maker) for kind in kinds) for maker in (NVIDIA, AMD))


def _gloo_seconds_per_byte(cluster: Cluster, stated: float | None) -> float:
    """Of an all-gather or a reduce-scatter of which each device sends each other its part."""
    paces = [pace for _, pace in _link_paces(cluster, stated)]
    pace_of, world_size = dict(zip(cluster.links, paces, strict=True)), cluster.world_size
    between = [cluster.between_nodes, cluster.between_regions]
    slowest = min((pace_of[each] for each in between if each in pace_of), default=inf)
    sizes = {len(node.devices) for node in cluster.nodes}
    per_byte_s = (k * ((world_size - k) / slowest + (k - 1) / HOST_BYTES_PER_S) for k in sizes)
    return max(per_byte_s) / world_size


def derive_collectives(cluster: Cluster, link_fraction: float | None) -> Collectives:
    """Times of a ring over all devices."""
    world_size = cluster.world_size
    if world_size == 1:
        return Collectives(source=Source.DERIVED, points=(), note="one device")
    if meets_over_gloo(cluster):
        per_byte_s = _gloo_seconds_per_byte(cluster, link_fraction)
    else:
        slowest = min(pace for _, pace in _link_paces(cluster, link_fraction))
        per_byte_s = (world_size - 1) / world_size / slowest
    number_by_link = _hops(cluster)
    latency_s = sum(number * link.latency_s for link, number in number_by_link.items())
    latency_s -= min(link.latency_s for link in number_by_link)  # the ring is not closed
    points = []
    for nbytes in COLLECTIVE_NBYTES:
        timing = Timing.single(latency_s + nbytes * per_byte_s)
        points.append(CollectivePoint(nbytes=nbytes, gather=timing, reduce=timing))
    note = "; ".join(dict.fromkeys(link.source for link in cluster.links if link.source))
    return Collectives(source=Source.DERIVED, points=tuple(points), note=note)


def derive_two_levels(cluster: Cluster, link_fraction: float | None) -> Collectives | None:
    """Times of collectives that cross between nodes once per node; see the module.

    None over gloo, where no row would cross twice in a ring, and between regions: a row would
    cross there once per node, in a ring once or twice.
    """
    sizes, across = [len(node.devices) for node in cluster.nodes], cluster.between_nodes
    has_regions = len({node.region for node in cluster.nodes}) > 1
    if across is None or has_regions or len(sizes) < 2 or max(sizes) < 2:
        return None
    if meets_over_gloo(cluster):
        return None
    paces = [pace for _, pace in _link_paces(cluster, link_fraction)]
    pace_of = dict(zip(cluster.links, paces, strict=True))
    # Of n bytes, a node of k devices sends its part to every other one, and receives the rest.
    world_size, alike = (
        cluster.world_size,
        {(len(n.devices), id(n.link)): n.link for n in cluster.nodes},
    )
    busiest = max(max(k * (len(sizes) - 1), world_size - k) for k, _ in alike) / world_size
    across_s = busiest / pace_of[across]
    inside = [
        ((k - 1) * link.latency_s, (k - 1) / k / pace_of[link])
        for (k, _), link in alike.items()
        if k > 1 and link is not None
    ]
    latency_s = across.latency_s + max(hops for hops, _ in inside)
    per_byte_s = across_s + max(seconds for _, seconds in inside)
    points = []
    for nbytes in COLLECTIVE_NBYTES:
        timing = Timing.single(latency_s + nbytes * per_byte_s)
        points.append(CollectivePoint(nbytes=nbytes, gather=timing, reduce=timing))
    return Collectives(source=Source.DERIVED, points=tuple(points))


def _hops(cluster: Cluster) -> Counter[Link]:
    """How often a ring passes each link in plan order, back to the first device included."""
    nodes, found = cluster.nodes, Counter[Link | None]()
    link_by_id, inside = {id(node.link): node.link for node in nodes}, Counter[int]()
    for node in nodes:
        inside[id(node.link)] += len(node.devices) - (len(nodes) > 1)
    for each, number in inside.items():
        found[link_by_id[each]] += number
    if len(nodes) > 1:
        regions = [node.region for node in nodes]
        across = sum(map(ne, regions, (*regions[1:], regions[0])))
        found[cluster.between_regions] += across
        found[cluster.between_nodes] += len(nodes) - across
    return Counter({link: n for link, n in found.items() if link is not None and n})
