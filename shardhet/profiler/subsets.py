"""Measure collectives among some of the ranks, for plans that leave the others out."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.groups import count_alike, new_group
from shardhet.profiler.traffic import Channels, CollectiveSamples, GroupSamples
from shardhet.records.cluster import DeviceSpec

MAX_SUBSETS = 4
NUM_SIZES = 3  # of collectives


def subsets_to_measure(devices: Sequence[DeviceSpec]) -> list[tuple[int, ...]]:
    """Sets of at least two ranks, at most ``MAX_SUBSETS``, that may train without the others.

    They are the ranks without one kind of device, and those of one host.  If these are fewer
    than two, all but the last rank and the first half are measured as well.
    """
    every = range(len(devices))
    kinds = dict.fromkeys(device.kind for device in devices)
    hosts = dict.fromkeys(device.host for device in devices)
    found = [tuple(i for i in every if devices[i].kind != kind) for kind in kinds]
    found += [tuple(i for i in every if devices[i].host == host) for host in hosts]
    found = _several(found, len(devices))
    if len(found) < 2:
        found += [tuple(every[:-1]), tuple(every[: (1 + len(devices)) // 2])]
    return _several(found, len(devices))[:MAX_SUBSETS]


def _several(sets: Sequence[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    return [each for each in dict.fromkeys(sets) if 1 < len(each) < world_size]


def among_some(
    channels: Channels,
    ranks: Sequence[int],
    measure: Callable[[Channels], list[CollectiveSamples]],
    *,
    device: torch.device,
    found: DeviceSpec,
) -> GroupSamples:
    """What ``measure`` returns on ``ranks``, positions of ``channels``; the others wait.

    ``found`` describes this rank's device.  Collective over all ranks; a failure of one raises
    on all.
    """
    samples: list[CollectiveSamples] = []
    if channels.group is not None:
        count_alike(channels.group, device)
    if channels.control.position in ranks:
        assert channels.group is not None
        subgroup = new_group(
            channels.group,
            device,
            backend=devices.backend_of(channels.group, device),
            ranks=[channels.control.rank_by_position[i] for i in ranks],
        )
        some = Channels.meet(subgroup, device, found)
        with some.lifeline.guard("measuring some of the ranks"):
            samples = measure(some)
        # The name of the next group contains the number of groups that a process has (torch
        # 2.13), which must be the same on ranks that are not among these.
        made = (subgroup, some.gather.group, some.reduce.group, some.control.group)
        for each in dict.fromkeys(made):
            dist.destroy_process_group(each)
    rows = channels.control.exchange_objects(samples)
    return GroupSamples(ranks=tuple(ranks), collectives=rows[ranks[0]])


def some_of(sizes: Sequence[int]) -> list[int]:
    """The smallest, the middle and the largest size."""
    last = len(sizes) - 1
    return sorted({sizes[round(last * i / (NUM_SIZES - 1))] for i in range(NUM_SIZES)})
