"""How a rank is made slow: by a quota from outside, or in the process where that is denied."""

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusters import MixedCluster

from experiments.control_groups import Group, NoControlGroupsError, quotas
from shardhet.emulation import EmulatedDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """Of one rank; can be sent to its process."""

    group: Group | None  # None: emulated in the process, for HetFSDP only
    device: EmulatedDevice  # of full speed where the group slows the whole process

    @contextmanager
    def applied(self) -> Iterator[None]:
        """This process is under the quota inside, if there is one."""
        if self.group is None:
            yield
            return
        self.group.join()
        try:
            yield
        finally:
            self.group.leave()

    def cap_memory(self, level_bytes: int) -> None:
        """Hold the process to its device's memory, counted from ``level_bytes``.

        What the allocator keeps of memory that was freed goes back to the system first, and
        the record of the highest resident memory starts again.
        """
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # of the C library
        assert self.device.memory_bytes is not None
        limit_bytes = level_bytes + self.device.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def slowness_of(cluster: MixedCluster, *, has_groups: bool) -> Iterator[list[Slowness]]:
    """One per rank; control groups are gone afterwards."""
    memory = [cluster.memory_bytes(rank) for rank in range(cluster.world_size)]
    if not has_groups:
        yield [
            Slowness(group=None, device=EmulatedDevice(speed=cores, memory_bytes=nbytes))
            for cores, nbytes in zip(cluster.cores, memory, strict=True)
        ]
        return
    with quotas(cluster.cores) as groups:
        yield [
            Slowness(group=group, device=EmulatedDevice(memory_bytes=nbytes))
            for group, nbytes in zip(groups, memory, strict=True)
        ]


def why_no_groups() -> str | None:
    """Why other programs cannot be slowed down here; None if they can."""
    try:
        with quotas([0.5]):
            return None
    except NoControlGroupsError as error:
        return str(error)
