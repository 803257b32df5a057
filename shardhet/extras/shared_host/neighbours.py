"""Processes on one host that communicate through shared memory instead of sockets.

Every process has a board in its own arena; only this process writes it, and the others read
it.  A board holds counters that only grow, and the data that they announce: where the tensor
of the k-th collective is, that this process has finished reading in the k-th collective, and
its row of the k-th exchange.  A process that waits for a counter sleeps on it (futex) and
checks now and then whether the counter's owner is still alive.

With gloo, the same took wake-ups of two threads and four system calls per message.  With all
cores busy, gloo's transport threads spent 20 to 40 ms of a 500 ms step spinning on a lock
whose holder had been preempted (torch 2.13, two ranks on two cores).

This works only on x86-64, where stores become visible in the order in which they were made.
"""

import ctypes
import errno
import os
import platform
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardhet.comm.calls import timeout_of
from shardhet.comm.channel import progress
from shardhet.comm.failure import LostPeerError, birth
from shardhet.extras.shared_host.arena import Arena, PeerArena, Whereabouts, own_arena

SYS_FUTEX = 202  # on x86-64
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 2**31 - 1
SECONDS_BETWEEN_LOOKS = 0.05  # between checks that the owner of a counter is alive

# Offsets of the words of a board; each counter has a cache line of its own.
BROKEN, PLACED, READ, EXCHANGED, PLACES = 0, 8, 16, 24, 32
NUM_PLACES = 64  # collectives in flight at once; the next one waits for the oldest
ROW_WORDS = 256  # longer rows are exchanged in pieces
ROWS = PLACES + NUM_PLACES
BOARD_WORDS = ROWS + 2 * ROW_WORDS


class Board:
    """The shared memory in which one process publishes its state to the others."""

    def __init__(self, words: torch.Tensor, *, pid: int, patience_s: float) -> None:
        self._words: NDArray[np.int64] = words.numpy()
        self._rows: NDArray[np.float64] = words[ROWS:].view(torch.float64).numpy()
        self._address = words.data_ptr()
        self._pid = pid
        self._birth = birth(pid)
        self._patience_s = patience_s

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
        the owner is alive but does not raise it ``within_s`` (None: the board's patience).
        """
        patience_s = self._patience_s if within_s is None else min(within_s, self._patience_s)
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
                deadline_s = deadline_s or time.monotonic() + patience_s
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"process {self._pid} of this host lives but has not come for "
                        f"{patience_s:g} s. See in its log what it does instead, or give "
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


class Neighbours:
    """The processes of one group, all on one host; positions are ranks in the group.

    Collectives and exchanges are numbered: all processes make them in the same order.
    """

    def __init__(
        self,
        rank: int,
        boards: Sequence[Board],
        arena: Arena,
        peers: Sequence[PeerArena | None],
    ) -> None:
        self.rank = rank
        self.arena = arena
        self.peers = tuple(peers)  # None at this process's own rank
        self._boards = tuple(boards)
        self._own = self._boards[rank]
        self._num_collectives = 0
        self._num_exchanges = 0
        self._offered: dict[int, tuple[int, Sequence[int]]] = {}  # collective, readers
        # The same in order, with the tensors being read, which must live until then.
        self._lent: deque[tuple[int, Sequence[int], torch.Tensor]] = deque()

    @classmethod
    def meet(
        cls, group: dist.ProcessGroup, number: int = 1, is_wanted: bool = True
    ) -> tuple[Self, ...] | None:
        """Return ``number`` sets of neighbours over the same processes, each with own boards.

        Returns None if some process cannot or should not read the memory of others.
        Collective over the group; either all ranks get neighbours, or all get None.
        """
        is_possible = is_wanted and platform.machine() == "x86_64"
        arena = own_arena() if is_possible else None
        own: list[torch.Tensor] = []
        told: tuple[Whereabouts, list[int]] | None = None
        if arena is not None:
            with suppress(OSError, MemoryError):  # then nobody shares memory
                own = [arena.empty(BOARD_WORDS, torch.int64).zero_() for _ in range(number)]
                _never_freed.extend(own)  # a slow peer may read them after we have finished
                told = Whereabouts.of(arena), [each.data_ptr() - arena.base for each in own]
        heard: list[Any] = [None] * group.size()
        dist.all_gather_object(heard, told, group=group)
        try:
            peers = [_peer(each, told) for each in heard]
        except OSError:
            peers = []
        answers = [False] * group.size()
        dist.all_gather_object(answers, bool(peers), group=group)
        if arena is None or not all(answers):
            return None
        patience_s = timeout_of(group, torch.device("cpu")).total_seconds()
        boards = [
            [
                Board(
                    peer.view(places[i], BOARD_WORDS, torch.int64) if peer else own[i],
                    pid=whereabouts.pid,
                    patience_s=patience_s,
                )
                for peer, (whereabouts, places) in zip(peers, heard, strict=True)
            ]
            for i in range(number)
        ]
        return tuple(cls(group.rank(), each, arena, peers) for each in boards)

    # Collectives #

    def next_collective(self) -> int:
        """Return the number of the collective that begins."""
        self._num_collectives += 1
        progress.num_collectives += 1
        return self._num_collectives

    def offer(
        self, collective: int, place: int, readers: Sequence[int], tensor: torch.Tensor
    ) -> None:
        """Announce that this process's ``tensor`` is at ``place`` in its arena."""
        # Wait for the readers of the entry that this call overwrites.
        self.wait_for_readers(*self._offered.get(collective % NUM_PLACES, (0, ())))
        self._offered[collective % NUM_PLACES] = collective, readers
        self._lent.append((collective, readers, tensor))
        self._own.write_place(collective, place)
        self._own.put(PLACED, collective)

    def wait_for_place(self, collective: int, owner: int) -> int:
        """Wait for the owner's tensor and return its place in the owner's arena."""
        self._boards[owner].wait_for(PLACED, collective)
        return self._boards[owner].place(collective)

    def say_read(self, collective: int) -> None:
        """Announce that this process has finished reading in the collective."""
        self._own.put(READ, collective)

    def wait_for_readers(self, collective: int, readers: Sequence[int]) -> None:
        """Wait until all of ``readers`` have finished reading."""
        for reader in readers:
            self._boards[reader].wait_for(READ, collective)
        while self._lent and self.have_read(*self._lent[0][:2]):
            self._lent.popleft()

    def have_read(self, collective: int, readers: Sequence[int]) -> bool:
        """Whether ``wait_for_readers`` would return at once."""
        return all(self._boards[reader].has(READ, collective) for reader in readers)

    # Exchanges #

    def exchange(
        self, row: Sequence[float], within_s: float | None = None
    ) -> list[list[float]]:
        """Return every process's row, by rank.  All rows have the same length."""
        rows: list[list[float]] = [[] for _ in self._boards]
        for start in range(0, len(row), ROW_WORDS):
            piece = row[start : start + ROW_WORDS]
            self._num_exchanges += 1
            progress.num_collectives += 1
            # No process reads the row before last any more: all have begun the last exchange.
            self._own.write_row(self._num_exchanges, piece)
            self._own.put(EXCHANGED, self._num_exchanges)
            for board, whole in zip(self._boards, rows, strict=True):
                board.wait_for(EXCHANGED, self._num_exchanges, within_s)
                whole += board.row(self._num_exchanges, len(piece))
        return rows

    # Failures #

    def give_up(self) -> None:
        """Make every process that waits for this one, now or later, fail with an error."""
        if os.getpid() != self.arena.pid:
            return  # in a process forked from this one
        self._own.put(BROKEN, 1)
        for counter in (PLACED, READ, EXCHANGED):
            self._own.wake(counter)


def _peer(its: Any, own: Any) -> PeerArena | None:
    """Map the arena that another process announced; None stands for this process itself."""
    if its is None or own is None or its[0].boot_id != own[0].boot_id:
        raise OSError("a process that shares no memory")
    if its[0] == own[0]:
        return None
    peer = _peers.get(its[0])
    if peer is None:
        peer = _peers[its[0]] = PeerArena(its[0])
    return peer


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
_never_freed: list[torch.Tensor] = []
_peers: WeakValueDictionary[Whereabouts, PeerArena] = WeakValueDictionary()
