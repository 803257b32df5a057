"""Host memory that other processes on the same host can read as if it were their own.

Every process has one arena: a sparse anonymous file (memfd) as large as the machine's memory,
of which only the parts in use take memory.  A peer opens it through /proc, if the system
permits that, and maps it for reading.  From then on, the peer needs only two numbers to read
a tensor in the arena: where it begins and how long it is.
"""

import ctypes
import mmap
import os
import resource
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from shardhet.records.layout import Span

MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0x4000)


class Arena:
    """This process's own arena, from which tensors are allocated."""

    def __init__(self) -> None:
        """Raises ``OSError`` or ``AttributeError`` if the system does not support it."""
        self.pid = os.getpid()
        self.nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.fd = os.memfd_create("shardhet")
        os.ftruncate(self.fd, self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes, flags=MAP_FLAGS)
        self._map.madvise(mmap.MADV_REMOVE, 0, mmap.PAGESIZE)  # raises if unsupported
        self.base = _address(self._map)
        self._free = [Span(0, self.nbytes)]  # ascending, never adjacent
        # Spans freed by the thread that dropped the last view, with the bytes charged for them.
        self._given_back: deque[tuple[Span, int]] = deque()
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized tensor [numel], freed when its last view is gone.

        Raises ``MemoryError`` if it does not fit into the arena, or would exceed the limit on
        this process's data.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if os.getpid() != self.pid:
            raise MemoryError("the arena belongs to the process that this one was forked from")
        with self._lock:
            return self._cut(numel, dtype)

    def _cut(self, numel: int, dtype: torch.dtype) -> Tensor:
        while self._given_back:
            freed, charged_bytes = self._given_back.popleft()
            self._insert(freed)
            _move_data_limit(charged_bytes)
        nbytes = -(-max(1, numel * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        hole = next((span for span in self._free if span.numel >= nbytes), None)
        if hole is None:
            raise MemoryError(f"the shared arena has no {nbytes} bytes left in one piece")
        charged_bytes = _move_data_limit(-nbytes)
        self._free[self._free.index(hole)] = Span(hole.start + nbytes, hole.stop)
        span = Span(hole.start, hole.start + nbytes)
        block = (ctypes.c_char * nbytes).from_address(self.base + span.start)
        finalize(block, self._give_back, span, charged_bytes).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=numel)

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the offset of ``tensor`` in the arena; None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.base
        return offset if 0 <= offset < self.nbytes else None

    def _give_back(self, span: Span, charged_bytes: int) -> None:
        if os.getpid() != self.pid:
            return  # in a forked child; the memory belongs to its parent
        # This may run at any moment, even inside empty(), so it only does what is safe there.
        self._map.madvise(mmap.MADV_REMOVE, span.start, span.numel)
        self._given_back.append((span, charged_bytes))

    def _insert(self, freed: Span) -> None:
        spans = sorted([*self._free, freed], key=lambda span: span.start)
        merged: list[Span] = []
        for span in spans:
            if merged and merged[-1].stop == span.start:
                merged[-1] = Span(merged[-1].start, span.stop)
            else:
                merged.append(span)
        self._free = merged


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """How a peer finds an arena and recognizes it."""

    boot_id: str  # of the running system; containers on one host share it
    pid: int
    fd: int
    file: tuple[int, int]  # device and inode
    nbytes: int

    @classmethod
    def of(cls, arena: Arena) -> Self:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        status = os.fstat(arena.fd)
        return cls(boot_id, arena.pid, arena.fd, (status.st_dev, status.st_ino), arena.nbytes)


class PeerArena:
    """Another process's arena, opened for reading."""

    def __init__(self, whereabouts: Whereabouts) -> None:
        """Raises ``OSError`` if the arena cannot be found or may not be read."""
        path = f"/proc/{whereabouts.pid}/fd/{whereabouts.fd}"
        status = Path(path).stat()  # first: in another pid namespace it can be any file
        if (status.st_dev, status.st_ino) != whereabouts.file:
            raise OSError(f"{path} is not the file that the peer has")
        self._fd = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._fd)
        self._map = mmap.mmap(
            self._fd, whereabouts.nbytes, flags=MAP_FLAGS, prot=mmap.PROT_READ
        )
        self._base = _address(self._map)

    def copy_to(self, tensor: Tensor, offset: int) -> None:
        """Fill ``tensor``, which is contiguous, with the peer's memory from ``offset`` on.

        This reads the file rather than the mapping: mapping pages and releasing them took 15 %
        of a gather over two to four processes and 30 % over 32 (experiments/LOG.md).
        """
        block = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        left = memoryview(block)
        while left:
            copied = os.preadv(self._fd, [left], offset)
            if not copied:
                raise OSError(f"the peer's memory ends before byte {offset + len(left)}")
            left, offset = left[copied:], offset + copied

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a view [numel] of the peer's memory.

        It must only be read, and only while this object is alive.
        """
        block = (ctypes.c_char * (numel * dtype.itemsize)).from_address(self._base + offset)
        return torch.frombuffer(block, dtype=dtype)

    def forget(self, offset: int, nbytes: int) -> None:
        """Release the pages that reading has mapped; otherwise they count as this process's."""
        start = offset - offset % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)


def own_arena() -> Arena | None:
    """Return this process's arena, made on first use; None if the system has no support."""
    if not _own or (_own[0] is not None and _own[0].pid != os.getpid()):
        _own.clear()  # empty, or the arena of the process this one was forked from
        try:
            _own.append(Arena())
        except (OSError, AttributeError):
            _own.append(None)
    return _own[0]


_own: list[Arena | None] = []


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, dtype=np.uint8, count=1).ctypes.data)


def _move_data_limit(nbytes: int) -> int:
    """Raise or lower the limit on this process's data, if any; return by how much it fell.

    The system does not count shared memory as data (setrlimit(2), RLIMIT_DATA).  To a user
    who has set a limit, however, parameters are data wherever they are stored.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or not nbytes:
        return 0
    if nbytes > 0:
        raised = soft + nbytes if hard == resource.RLIM_INFINITY else min(soft + nbytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (raised, hard))
        return 0
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = next(line for line in status.splitlines() if line.startswith("VmData:"))
    if soft + nbytes < int(used.split()[1]) * 1024:
        raise MemoryError(f"can't allocate memory: {-nbytes} bytes are beyond the limit")
    resource.setrlimit(resource.RLIMIT_DATA, (soft + nbytes, hard))
    return -nbytes
