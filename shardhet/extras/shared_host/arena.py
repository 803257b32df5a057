"""Host memory that other processes on the same host can read as if it were their own.

Every process has one arena: a sparse anonymous file (memfd) as large as the machine's memory,
of which only the parts in use take memory.  A peer opens it through /proc, if the system
permits that, and maps it for reading.  From then on, the peer needs only two numbers to read
a tensor in the arena: where it begins and how long it is.

[Note: Shared counters]
Every process has shared counters in its own arena, which only it writes and the others read.
They only grow, and come with the data that they announce: where the tensor of the k-th
collective is, that this process has finished reading in it, and its row of the k-th exchange.
A process that waits for a counter sleeps on it (futex) and
checks now and then whether the counter's owner is still alive.

With gloo, the same took wake-ups of two threads and four system calls per message.  With all
cores busy, gloo's transport threads spent 20 to 40 ms of a 500 ms step spinning on a lock
whose holder had been preempted (torch 2.13, two ranks on two cores).

This works only on x86-64, where stores become visible in the order in which they were made.
"""

import ctypes
import errno
import mmap
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardhet.comm.channel import progress
from shardhet.comm.failure import LostPeerError, birth
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
class ArenaHandle:
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

    def __init__(self, whereabouts: ArenaHandle) -> None:
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


def peer_of(its: Any, own: Any) -> PeerArena | None:
    """Map the arena that another process announced; None stands for this process itself."""
    if its is None or own is None or its[0].boot_id != own[0].boot_id:
        raise OSError("a process that shares no memory")
    if its[0] == own[0]:
        return None
    peer = _peers.get(its[0])
    if peer is None:
        peer = _peers[its[0]] = PeerArena(its[0])
    return peer


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
_peers: WeakValueDictionary[ArenaHandle, PeerArena] = WeakValueDictionary()


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


SYS_FUTEX = 202  # on x86-64
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 2**31 - 1
SECONDS_BETWEEN_LOOKS = 0.05  # between checks that the owner of a counter is alive
# Offsets of the words; each counter has a cache line of its own.
BROKEN, PLACED, READ, EXCHANGED, PLACES = 0, 8, 16, 24, 32
NUM_PLACES = 64  # collectives in flight at once; the next one waits for the oldest
ROW_WORDS = 256  # longer rows are exchanged in pieces
ROWS = PLACES + NUM_PLACES
BOARD_WORDS = ROWS + 2 * ROW_WORDS


class SharedCounters:
    """The shared memory in which one process publishes its state to the others."""

    def __init__(self, words: torch.Tensor, *, pid: int, timeout_s: float) -> None:
        self._words: NDArray[np.int64] = words.numpy()
        self._rows: NDArray[np.float64] = words[ROWS:].view(torch.float64).numpy()
        self._address = words.data_ptr()
        self._pid = pid
        self._birth = birth(pid)
        self._patience_s = timeout_s

    # Called by the owner #

    def put(self, counter: int, value: int) -> None:
        """Raise a counter and wake the processes that wait for it."""
        self._words[counter] = value
        self.wake(counter)

    def wake(self, counter: int) -> None:
        """Make the processes that wait for a counter check it again."""
        _futex(self._address + 8 * counter, FUTEX_WAKE, EVERYBODY, None)

    def write_place(self, collective: int, place: int) -> None:
        """Write the place of a collective's tensor; must be followed by ``put``."""
        self._words[PLACES + collective % NUM_PLACES] = place

    def write_row(self, exchange: int, row: Sequence[float]) -> None:
        """Write a row of at most ``ROW_WORDS`` numbers; must be followed by ``put``."""
        start = exchange % 2 * ROW_WORDS
        self._rows[start : start + len(row)] = row

    # Called by the others #

    def has(self, counter: int, value: int) -> bool:
        """Whether the counter has reached ``value``."""
        return bool(self._words[counter] >= value)

    def wait_for(self, counter: int, value: int, within_s: float | None = None) -> None:
        """Wait until the counter has reached ``value``.

        Raises ``LostPeerError`` if the owner has given up or is gone, and ``TimeoutError`` if
        the owner is alive but does not raise it ``within_s`` (None: its own timeout).
        """
        timeout_s = self._patience_s if within_s is None else min(within_s, self._patience_s)
        timeout = _Timespec(0, int(1e9 * SECONDS_BETWEEN_LOOKS))
        deadline_s = None
        while (seen := int(self._words[counter])) < value:
            if self._words[BROKEN] or not _futex(
                self._address + 8 * counter, FUTEX_WAIT, seen & 0xFFFFFFFF, timeout
            ):
                try:
                    self._check_lives()
                except LostPeerError:
                    if self._words[counter] < value:  # else the owner raised it just before
                        raise
                deadline_s = deadline_s or time.monotonic() + timeout_s
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"process {self._pid} of this host lives but has not come for "
                        f"{timeout_s:g} s. See in its log what it does instead, or give "
                        "init_process_group a longer timeout."
                    )

    def place(self, collective: int) -> int:
        """Return what ``write_place`` wrote for a collective."""
        return int(self._words[PLACES + collective % NUM_PLACES])

    def row(self, exchange: int, numel: int) -> list[float]:
        """Return what ``write_row`` wrote for an exchange."""
        start = exchange % 2 * ROW_WORDS
        values: list[float] = self._rows[start : start + numel].tolist()
        return values

    def _check_lives(self) -> None:
        if progress.failure is not None:
            raise LostPeerError("the watch over ranks ends the run")
        if self._words[BROKEN]:
            raise LostPeerError(f"process {self._pid} of this host has given up")
        try:
            now_born = birth(self._pid)
        except OSError:  # out of file descriptors, which says nothing about the peer
            return
        if now_born is None or now_born != self._birth:
            raise LostPeerError(f"process {self._pid} of this host is gone")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex(address: int, operation: int, value: int, timeout: _Timespec | None) -> bool:
    """Call futex(2); return False after a timeout or a signal."""
    result = _libc.syscall(
        ctypes.c_long(SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        None if timeout is None else ctypes.byref(timeout),
        None,
        ctypes.c_int(0),
    )
    return result >= 0 or ctypes.get_errno() == errno.EAGAIN


_libc = ctypes.CDLL(None, use_errno=True)
