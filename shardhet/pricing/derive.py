"""A profile from specifications, for a cluster that has not been measured.

All figures are labelled as derived.  The time of a unit is the larger of the times for its
FLOPs and its bytes (the roofline of Williams, Waterman and Patterson, 2009), each at a stated
fraction of the peak, plus the launch time of its kernels.
"""

from math import ceil, log2

from shardhet.records.cluster import Cluster, DeviceKind
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

COMPUTE_FRACTION = 0.5  # of the peak that matrix products of training reach (PaLM: 0.46-0.58)
MEMORY_FRACTION = 0.8  # of the memory's bandwidth that streaming kernels reach
# On PCIe hosts a ring reaches 1 / 2.7 of the point-to-point bandwidth (measured on Cephalo's).
LINK_FRACTION = 0.37
# Compute that overlaps collectives takes 1.126 times as long: Cephalo's published coefficient.
OVERLAP_EXCESS = 1 - 1 / 1.126
LAUNCH_S = 1e-5  # per kernel
KERNELS_PER_UNIT = 20  # of a transformer block, forward
ACTIVATION_PASSES = 2  # every activation is written once and read once
ADAM_PASSES = 7  # reads of parameter, gradient and two moments; writes of all but the gradient
STATE_ITEMSIZE = 4
RESERVED_BYTES = 2**29  # a CUDA context with the libraries of torch
MICROBATCH_SIZES = (1, 2, 4, 8, 16)
COLLECTIVE_NBYTES = (2**20, 2**24, 2**28)


def derive_profile(
    cluster: Cluster,
    workload: Workload,
    *,
    compute_fraction: float = COMPUTE_FRACTION,
    link_fraction: float = LINK_FRACTION,
) -> Profile:
    """The profile that follows from the cluster's specifications at the stated fractions."""
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    return Profile(
        devices=tuple(
            _device_profile(cluster.kind(kind), workload, compute_fraction) for kind in kinds
        ),
        collectives=_collectives(cluster, link_fraction),
        note=f"derived: {compute_fraction:.2f} of peak FLOP/s, {link_fraction:.2f} of links",
    )


def _device_profile(
    kind: DeviceKind, workload: Workload, compute_fraction: float
) -> DeviceProfile:
    flops_per_s = compute_fraction * kind.peak(workload.param_dtype)
    bytes_per_s = MEMORY_FRACTION * kind.memory_bandwidth_bytes_per_s
    units = tuple(
        UnitProfile(
            unit_kind=unit.name,
            points=_points(unit, workload.param_itemsize, flops_per_s, bytes_per_s),
        )
        for unit in workload.kinds
        if workload.num_units_by_kind[unit.name]
    )
    return DeviceProfile(
        device_kind=kind.kind,
        source=Source.DERIVED,
        units=units,
        optimizer_seconds_per_element=ADAM_PASSES * STATE_ITEMSIZE / bytes_per_s,
        overlap_excess=OVERLAP_EXCESS,
        reserved_bytes=RESERVED_BYTES,
        note=kind.source,
    )


def _points(
    unit: UnitKind, itemsize: int, flops_per_s: float, bytes_per_s: float
) -> tuple[ComputePoint, ...]:
    points = []
    for size in MICROBATCH_SIZES:
        weights = unit.numel * itemsize
        activations = ACTIVATION_PASSES * size * (unit.activation_bytes + unit.input_bytes)
        seconds = [
            max(size * flops / flops_per_s, passes * (weights + activations) / bytes_per_s)
            + passes * KERNELS_PER_UNIT * LAUNCH_S
            for flops, passes in ((unit.forward_flops, 1), (unit.backward_flops, 2))
        ]
        forward, backward = map(Timing.single, seconds)
        points.append(ComputePoint(microbatch_size=size, forward=forward, backward=backward))
    return tuple(points)


def _collectives(cluster: Cluster, link_fraction: float) -> Collectives:
    """Times of a ring over all devices, which is as fast as its slowest link."""
    world_size = cluster.world_size
    if world_size == 1:
        return Collectives(source=Source.DERIVED, points=(), note="one device")
    bytes_per_s = link_fraction * min(link.bandwidth_bytes_per_s for link in cluster.links)
    latency_s = max(link.latency_s for link in cluster.links) * ceil(log2(world_size))
    points = []
    for nbytes in COLLECTIVE_NBYTES:
        seconds = latency_s + nbytes * (world_size - 1) / world_size / bytes_per_s
        timing = Timing.single(seconds)
        points.append(CollectivePoint(nbytes=nbytes, gather=timing, reduce=timing))
    note = "; ".join(dict.fromkeys(link.source for link in cluster.links if link.source))
    return Collectives(source=Source.DERIVED, points=tuple(points), note=note)
