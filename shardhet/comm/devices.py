"""Where a tensor lives: its device, with streams, events and memory counters, and the host.

Everything that treats an accelerator differently from the host asks here, so that tests can
put an emulated accelerator in its place (see ``tests/emulated``).  Memory of the host is
pinned for copies to and from a device, and lent out again where collectives receive into it.
"""

import mmap
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import dlpack


def of_this_rank() -> torch.device:
    """This rank's accelerator, made the current device; the CPU if there is none.

    It is the current device if the program has chosen another than the first, and else that of
    LOCAL_RANK.  Apple's has no streams, over which units would be gathered.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":
        return torch.device("cpu")
    chosen, found = torch.accelerator.current_device_index(), torch.accelerator.device_count()
    index = chosen or int(os.environ.get("LOCAL_RANK", "0"))
    if index >= found:
        raise ValueError(
            f"local rank {index}: this process sees {found} {kind.type} devices, from 0 on. "
            f"Start at most {found} ranks per host, or say which device it has (device=)."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def is_on_host(of: Tensor | torch.device) -> bool:
    """Whether a tensor lives, or a device computes, in the memory of the host."""
    device = of.device if isinstance(of, Tensor) else of
    return device.type == "cpu"


def module_of(device: torch.device) -> Any:
    """The module with the device's streams, events and memory counters, as ``torch.cuda``."""
    return torch.get_device_module(device)


def pin(tensor: Tensor, nbytes: int, device: torch.device) -> Callable[[], None] | None:
    """Lock ``nbytes`` from the start of a host tensor in memory, for copies to ``device``.

    Returns what unlocks them; None if the system refuses.
    """
    if device.type != "cuda":
        return None
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    if runtime is None:
        return None
    if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
        _forget_last_error(device)
        return None

    index = torch.cuda.current_device() if device.index is None else device.index

    def unpin() -> None:
        # Whichever thread collects garbage: in others than the one that trains the device is
        # the first, on which CUDA would make a context.
        with torch.cuda.device(index):
            runtime.cudaHostUnregister(address)

    return unpin


def unrecorded(tensor: Tensor) -> Tensor:
    """The same memory, in a tensor that the allocator of its device does not know.

    Of a tensor that it knows torch records that a message of NCCL uses it (``record_stream``).
    Its memory, once freed, is then not given out again before the host has seen the end of
    all messages that were launched until then.  A host that runs ahead does not look at them,
    and would fill the device (pytorch/pytorch, issue 132292).  Whoever frees the memory of what
    is returned has to let the stream that it was allocated on wait for the message.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    # From its start: the allocator of cudaMallocAsync asks for what it has given out.
    known = nothing.set_(tensor.untyped_storage())
    capsule = dlpack.to_dlpack(known)  # type: ignore[attr-defined]  # re-exported by torch
    whole = dlpack.from_dlpack(capsule)
    start = tensor.storage_offset() * tensor.dtype.itemsize
    return whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _forget_last_error(device: torch.device) -> None:
    """Take back the error that the runtime keeps of a call that has failed.

    The next kernel that torch launches from this thread would raise it as its own.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def give_back_cached(device: torch.device) -> None:
    """Return what no tensor uses from the allocator to the driver: libraries may need it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that carries the group's tensors on ``device``.

    That of NCCL is "nccl", however torch talks to it: from 2.15 it has "nccl2", its default,
    and "nccl-lazy" beside the one of before.
    """
    name: str = group._get_backend(device).name()
    return "nccl" if name.startswith("nccl") else name


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors on ``device``."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def backends_for(device: torch.device) -> str:
    """What to give ``init_process_group`` so that host and ``device`` can both communicate."""
    if is_on_host(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


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
        self._pins = not is_on_host(device)

    @property
    def lets_copies_wait(self) -> bool:
        """Whether the host goes on while copies to and from this memory wait their turn."""
        return self._pins or is_on_host(self._device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, [numel]."""
        nbytes = numel * dtype.itemsize
        if not nbytes or not self._pins:
            return torch.empty(numel, dtype=dtype)
        block = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        tensor = torch.frombuffer(block, dtype=dtype, count=numel)
        unpin = pin(tensor, len(block), self._device)
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


Allocate = Callable[[int, torch.dtype], Tensor]


def host_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized tensor [numel] on the host."""
    return torch.empty(numel, dtype=dtype)


class BufferPool:
    """A pool of flat host tensors that are lent out, returned and reused.

    Touching fresh host memory costs as much as receiving into it (reducing 128 MiB took 110 ms
    with reused buffers and 234 ms with fresh ones).  On an accelerator the caching allocator
    does the same job, so the pool keeps nothing.
    """

    def __init__(self, allocate: Allocate = host_empty) -> None:
        self._allocate = allocate
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}  # by address

    def lend(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of ``numel`` elements."""
        if not is_on_host(device) or numel == 0:
            return torch.empty(numel, dtype=dtype, device=device)
        fitting = [
            (buffer.numel(), i)
            for i, buffer in enumerate(self._free)
            if buffer.dtype == dtype and numel <= buffer.numel() <= numel + numel // 4 + 1024
        ]
        buffer = self._free.pop(min(fitting)[1]) if fitting else self._allocate(numel, dtype)
        self._lent[buffer.data_ptr()] = buffer
        return buffer[:numel]

    def take_back(self, tensor: Tensor) -> None:
        """Return ``tensor``, exactly as ``lend`` returned it, to the pool."""
        buffer = self._lent.pop(tensor.data_ptr(), None)
        if buffer is not None:
            self._free.append(buffer)

    def release(self) -> None:
        """Return the memory of the free buffers to the system."""
        self._free.clear()
