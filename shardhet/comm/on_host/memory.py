"""Memory of the host: pinned, so that copies to and from a device need no processor."""

import mmap
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from shardhet.comm import devices

CGROUPS = (  # most memory, and memory in use, of the container
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


class HostAllocator:
    """Allocates memory of the host for copies to and from one device.

    It is mapped and pinned as it is: torch's own pinned memory is rounded up to powers of two.
    Where pinning is refused (a small limit of locked memory, WSL2), it stays pageable, and the
    host waits for each copy; a warning says so once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = not devices.is_on_host(device)

    @property
    def lets_copies_wait(self) -> bool:
        """Whether the host goes on while copies to and from this memory wait their turn."""
        return self._pins or devices.is_on_host(self._device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, [numel]."""
        nbytes = numel * dtype.itemsize
        if not nbytes or not self._pins:
            return torch.empty(numel, dtype=dtype)
        block = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        tensor = torch.frombuffer(block, dtype=dtype, count=numel)
        unpin = devices.pin(tensor, len(block), self._device)
        if unpin is None:
            self._pins = False
            warnings.warn(
                f"{self._device}: the system refuses to pin {nbytes / 2**20:.0f} MiB of the "
                "host's memory, so copies to and from the device are slower and the host waits "
                "for them. Raise the limit of locked memory (ulimit -l).",
                stacklevel=2,
            )
        else:
            finalize(tensor.untyped_storage(), _give_back, block, unpin).atexit = False
        return tensor


def _give_back(block: mmap.mmap, unpin: Callable[[], None]) -> None:
    """Unpin memory that no tensor uses any more; ``block`` is unmapped after that."""
    unpin()
    del block


def available_bytes() -> int | None:
    """Bytes that this host, or this container, still has; None if it does not say so."""
    found = []
    facts = Path("/proc/meminfo")
    if facts.exists():
        said = re.search(r"MemAvailable:\s+(\d+) kB", facts.read_text("ascii"))
        found += [int(said[1]) * 1024] if said else []
    for most, used in CGROUPS:
        try:
            limit, current = (Path(each).read_text("ascii").strip() for each in (most, used))
        except OSError:
            continue
        found += [int(limit) - int(current)] if limit.isdigit() else []
    return min(found, default=None)


def processors() -> list[int]:
    """The numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_of_processors(mine: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """How many threads to use, beside the other ranks of this host that work at that time."""
    sharers = sum(not set(mine).isdisjoint(each) for each in others)
    return max(1, len(mine) // (1 + sharers))
