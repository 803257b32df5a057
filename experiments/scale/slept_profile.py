"""The records that describe ranks whose compute is slept: cluster, workload, profile.

Compute is derived: a sleep takes as long as it is told to.  Collectives, and the runtime's own
time per turn, are measured on the ranks themselves, through the code that training uses.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from experiments.scale.paced import BACKWARD_OVER_FORWARD, ROW_NUMEL
from shardhet.profiler.assemble import with_unevenness
from shardhet.profiler.stopwatch import timing_of
from shardhet.profiler.traffic import Channels, CollectiveSamples, Traffic
from shardhet.profiler.turns import turn_overhead_seconds
from shardhet.records import profiles
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.workload import Unit, UnitKind, Workload

SPEEDS = (1.0, 0.5, 0.25, 0.25)  # of the ranks, over and over
UNIT_KIND = "block"
MICROBATCH_SIZES = (1, 2, 4)
CAPACITY_BYTES = 2**30  # so that nothing is short of memory


def speed_of(rank: int) -> float:
    """Of the rank's device."""
    return SPEEDS[rank % len(SPEEDS)]


def device_kind(speed: float) -> str:
    """What a device of this speed is called."""
    return f"speed {speed:g}"


def cluster_of(world_size: int) -> Cluster:
    """One host; devices in the order of ranks."""
    devices = tuple(
        DeviceSpec(kind=device_kind(speed_of(rank)), memory_capacity_bytes=CAPACITY_BYTES)
        for rank in range(world_size)
    )
    return Cluster(nodes=(Node(host="here", devices=devices),))


def workload_of(num_units: int, unit_numel: int) -> Workload:
    """``PacedModel`` in counts and bytes; what it computes is time and no FLOPs."""
    kind = UnitKind(
        name=UNIT_KIND,
        param_shapes=((unit_numel // ROW_NUMEL, ROW_NUMEL),),
        forward_flops=0,
        backward_flops=0,
        input_bytes=4,
        activation_bytes=0,
        transient_bytes=0,
    )
    units = tuple(Unit(fqn=f"blocks.{i}", kind=UNIT_KIND) for i in range(num_units))
    return Workload(kinds=(kind,), units=units)


def slept_devices(forward_s_per_sample: float) -> tuple[profiles.DeviceProfile, ...]:
    """One profile per speed."""
    found = []
    for speed in dict.fromkeys(SPEEDS):
        points = tuple(
            profiles.ComputePoint(
                microbatch_size=size,
                forward=profiles.Timing.single(size * forward_s_per_sample / speed),
                backward=profiles.Timing.single(
                    BACKWARD_OVER_FORWARD * size * forward_s_per_sample / speed
                ),
            )
            for size in MICROBATCH_SIZES
        )
        unit = profiles.UnitProfile(unit_kind=UNIT_KIND, points=points)
        found.append(
            profiles.DeviceProfile(
                device_kind=device_kind(speed), source=profiles.Source.DERIVED, units=(unit,)
            )
        )
    return tuple(found)


def measured_profile(
    cluster: Cluster, workload: Workload, forward_s_per_sample: float, *, num_repeats: int
) -> tuple[profiles.Profile, list[float], list[float]]:
    """The profile, and seconds of gathers and reductions of one unit.  Collective."""
    measured = _measure_collectives(workload, num_repeats)
    points = tuple(
        profiles.CollectivePoint(
            nbytes=each.nbytes, gather=timing_of(each.gather_s), reduce=timing_of(each.reduce_s)
        )
        for each in measured
    )
    profile = profiles.Profile(
        devices=slept_devices(forward_s_per_sample),
        collectives=profiles.Collectives(source=profiles.Source.MEASURED, points=points),
        turn_overhead_s=_turn_overhead_s(num_repeats),
    )
    even = profile.collectives
    weighted = with_unevenness(even, measured, profile, cluster, workload)
    profile = replace(profile, collectives=weighted)
    unit_nbytes = workload.kinds[0].numel * workload.param_itemsize
    of_unit = next(each for each in measured if each.nbytes == unit_nbytes)
    return profile, of_unit.gather_s, of_unit.reduce_s


def _turn_overhead_s(num_repeats: int) -> float:
    """Of the slowest rank, as the profiler takes it."""
    mine = turn_overhead_seconds(dist.group.WORLD, torch.device("cpu"), num_repeats)
    slowest = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _measure_collectives(workload: Workload, num_repeats: int) -> list[CollectiveSamples]:
    channels = Channels.meet(dist.group.WORLD, torch.device("cpu"), DeviceSpec())
    traffic = Traffic(
        channels, workload, torch.device("cpu"), orig_dtype=getattr(torch, workload.param_dtype)
    )
    unit_nbytes = workload.kinds[0].numel * workload.param_itemsize
    sizes = [unit_nbytes // 4, unit_nbytes, unit_nbytes * 4]
    return [traffic.collectives(nbytes, num_repeats) for nbytes in sizes]
