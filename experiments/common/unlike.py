"""Processes of one machine made unlike: which, and how each is made slow and small.

Slow by a quota from outside, so that any program can be compared, or in the process where
that is denied or not wanted, for HetFSDP only.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.common.control_groups import Group, NoControlGroupsError, quotas
from shardhet import DeviceSpec
from shardhet.training.emulation import EmulatedDevice, cores_for, stay_on
from shardhet.training.peak_memory import memory_of_process

MIB = 2**20
ROOMY_BYTES = 4 * 2**30  # memory is no matter


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCluster:
    """Processes of one machine made unlike from outside."""

    name: str
    cores: tuple[float, ...]  # CPU time of each, as a part of a core

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.cores)

    @property
    def slowest_rank(self) -> int:
        """The one with the least time."""
        return self.cores.index(min(self.cores))

    @property
    def slowest_ranks(self) -> list[int]:
        """All that have no more time than that."""
        return [i for i, each in enumerate(self.cores) if each == min(self.cores)]

    def device_spec(self, rank: int) -> DeviceSpec:
        """What the rank announces itself as; ranks of equal quota are one kind."""
        return DeviceSpec(
            host="here",
            kind=f"{self.cores[rank]:g} of a core",
            memory_capacity_bytes=ROOMY_BYTES,
        )

    @property
    def title(self) -> str:
        """For tables."""
        return f"{self.name} ({' : '.join(f'{each:g}' for each in self.cores)} of a core)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """Of one rank; can be sent to its process."""

    group: Group | None  # None: emulated in the process, for HetFSDP only
    device: EmulatedDevice  # of full speed where the group slows the whole process
    core: int | None = None  # where an emulated one is kept; groups have their own

    @contextmanager
    def applied(self) -> Iterator[None]:
        """This process is under the quota inside, if there is one."""
        if self.group is None:
            stay_on(self.core)
            yield
            return
        self.group.join()
        try:
            yield
        finally:
            self.group.leave()


def forget_building() -> None:
    """Give back to the system what the allocator keeps of memory that was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # of the C library


def forget_peak() -> None:
    """Let the system's record of this process's peak start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def data_bytes(key: str) -> int:
    """Of this process now (VmRSS) or at most (VmHWM), but for what is mapped from files now.

    Libraries' code is read in when it first runs, 4 KiB by 4 KiB, and is nobody's data.
    """
    return memory_of_process(key) - memory_of_process("RssFile")


@contextmanager
def slowness_of(cluster: MixedCluster, *, has_groups: bool) -> Iterator[list[Slowness]]:
    """One per rank; control groups are gone afterwards."""
    if not has_groups:
        yield [
            Slowness(
                group=None,
                device=EmulatedDevice(speed=speed, memory_bytes=ROOMY_BYTES),
                core=core,
            )
            for speed, core in zip(cluster.cores, cores_for(cluster.cores), strict=True)
        ]
        return
    with quotas(cluster.cores) as groups:
        yield [
            Slowness(group=group, device=EmulatedDevice(memory_bytes=ROOMY_BYTES))
            for group in groups
        ]


def why_no_groups() -> str | None:
    """Why other programs cannot be slowed down here; None if they can."""
    try:
        with quotas([0.5]):
            return None
    except NoControlGroupsError as error:
        return str(error)
