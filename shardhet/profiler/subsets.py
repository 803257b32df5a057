"""Measure collectives among some of the ranks, for plans that leave the others out."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.groups import count_alike, new_group
from shardhet.comm.members import Members
from shardhet.profiler.traffic import Channels, CollectiveSamples, GroupSamples, Traffic
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan
from shardhet.records.workload import Workload

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


class SubsetTraffic:
    """Times collectives among some ranks while the others wait."""

    def __init__(
        self,
        channels: Channels,
        workload: Workload,
        device: torch.device,
        *,
        found: DeviceSpec,
        orig_dtype: torch.dtype,
    ) -> None:
        """``channels`` are those of all ranks; ``found`` describes this rank's device."""
        self._channels = channels
        self._workload = workload
        self._device = device
        self._found = found
        self._orig_dtype = orig_dtype

    def measure(
        self, ranks: Sequence[int], sizes: Sequence[int], num_repeats: int
    ) -> GroupSamples:
        """Time collectives among ``ranks``, positions of all channels.  Collective.

        A failure of one rank raises on all.
        """
        samples: list[CollectiveSamples] = []
        if self._channels.group is not None:
            count_alike(self._channels.group, self._device)
        if self._channels.control.position in ranks:
            samples = self._among(ranks, some_of(sizes), num_repeats)
        rows = self._channels.control.exchange_objects(samples)
        return GroupSamples(ranks=tuple(ranks), collectives=rows[ranks[0]])

    def _among(
        self, positions: Sequence[int], sizes: Sequence[int], num_repeats: int
    ) -> list[CollectiveSamples]:
        group, seats = self._channels.group, self._channels.control.rank_by_position
        assert group is not None
        subgroup = new_group(
            group,
            self._device,
            backend=devices.backend_of(group, self._device),
            ranks=[seats[i] for i in positions],
        )
        number = len(positions)
        anyone = Plan.by_hand(
            devices=[DeviceSpec()] * number,
            microbatch_sizes=[1] * number,
            state_shares=[1 / number] * number,
        )
        members = Members.meet(subgroup, anyone, device=self._device, device_spec=self._found)
        with members.lifeline.guard("measuring some of the ranks"):
            traffic = Traffic(
                Channels(
                    group=subgroup,
                    gather=members.gather,
                    reduce=members.reduce,
                    control=members.control,
                ),
                self._workload,
                self._device,
                orig_dtype=self._orig_dtype,
            )
            samples = [
                traffic.collectives(nbytes, num_repeats, with_uneven=False) for nbytes in sizes
            ]
        # The name of the next group contains the number of groups that a process has (torch
        # 2.13), which must be the same on ranks that are not among these.
        made = (subgroup, members.gather.group, members.reduce.group, members.control.group)
        for each in dict.fromkeys(made):
            dist.destroy_process_group(each)
        return samples


def some_of(sizes: Sequence[int]) -> list[int]:
    """The smallest, the middle and the largest size."""
    last = len(sizes) - 1
    return sorted({sizes[round(last * i / (NUM_SIZES - 1))] for i in range(NUM_SIZES)})
