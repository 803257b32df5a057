"""Exchanges and uneven collectives among processes on one host that map each other's memory.

The process that needs a peer's tensor reads it in place: there is no socket, no copy on the
sender's side, and none through the kernel.  Over loopback, the same bytes pass through the
kernel twice and cost both processes time in which they could compute.

    owner     place of its tensor ->                 may write the tensor again
    reader                           reads it, done ->

One thread per channel does the reading in launch order, so that the caller can compute in the
meantime.  A tensor that is not in an arena is copied into one first.
"""

import os
import platform
import queue
import threading
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.comm.calls import (
    AllGather,
    Pending,
    ReduceScatter,
    pieces_of,
    sum_into,
    timeout_of,
)
from shardhet.comm.channel import Channel, progress
from shardhet.comm.devices import BufferPool
from shardhet.comm.failure import LostPeerError
from shardhet.extras.shared_host.arena import (
    BOARD_WORDS,
    BROKEN,
    EXCHANGED,
    NUM_PLACES,
    PLACED,
    READ,
    ROW_WORDS,
    Arena,
    ArenaHandle,
    PeerArena,
    SharedCounters,
    own_arena,
    peer_of,
)


class SharedHost:
    """A ``Transport`` among the processes of a group, all on one host, that read each other's
    memory.

    Collectives and exchanges are numbered: all processes make them in the same order.
    """

    def __init__(
        self,
        rank: int,
        boards: Sequence[SharedCounters],
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
        """Return ``number`` transports over the same processes, each with its own queue.

        Returns None if some process cannot or should not read the memory of others.
        Collective over the group; either all ranks get them, or all get None.
        """
        is_possible = is_wanted and platform.machine() == "x86_64"
        arena = own_arena() if is_possible else None
        own: list[torch.Tensor] = []
        told: tuple[ArenaHandle, list[int]] | None = None
        if arena is not None:
            with suppress(OSError, MemoryError):  # then nobody shares memory
                own = [arena.empty(BOARD_WORDS, torch.int64).zero_() for _ in range(number)]
                _never_freed.extend(own)  # a slow peer may read them after we have finished
                told = ArenaHandle.of(arena), [each.data_ptr() - arena.base for each in own]
        heard: list[Any] = [None] * group.size()
        dist.all_gather_object(heard, told, group=group)
        try:
            peers = [peer_of(each, told) for each in heard]
        except OSError:
            peers = []
        answers = [False] * group.size()
        dist.all_gather_object(answers, bool(peers), group=group)
        if arena is None or not all(answers):
            return None
        timeout_s = timeout_of(group, torch.device("cpu")).total_seconds()
        boards = [
            [
                SharedCounters(
                    peer.view(places[i], BOARD_WORDS, torch.int64) if peer else own[i],
                    pid=whereabouts.pid,
                    timeout_s=timeout_s,
                )
                for peer, (whereabouts, places) in zip(peers, heard, strict=True)
            ]
            for i in range(number)
        ]
        return tuple(cls(group.rank(), each, arena, peers) for each in boards)

    # Collectives #

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See ``Transport``; peers read these tensors without a copy."""
        return self.arena.empty(numel, dtype)

    def gather(self, call: AllGather) -> Pending:
        """See ``Transport``: every receiver reads every owner's shard."""
        traffic = _Traffic(call.channel, self)
        if call.shard.numel():
            traffic.offer(call.shard, call.receivers)
        if call.output is None:
            return traffic.pending(None, call.shard)
        pieces = pieces_of(call.output, call.split_numels)
        owners = traffic.others([i for i, piece in enumerate(pieces) if piece.numel()])

        def read_all() -> None:
            call.copy_own_shard()
            for position in owners:
                traffic.copy_from(position, pieces[position])

        return traffic.pending(read_all, call.shard)

    def reduce(self, call: ReduceScatter) -> Pending:
        """See ``Transport``: every owner adds up its part of every contribution."""
        output, full, position = call.output, call.full, call.channel.position
        traffic = _Traffic(call.channel, self)
        if full is not None:
            traffic.offer(full, [i for i, numel in enumerate(call.split_numels) if numel])
        if not call.contributors:
            output.zero_()
        if not call.contributors or not output.numel():
            return traffic.pending(None, full)
        owners = traffic.others(call.contributors)
        own = None if full is None else pieces_of(full, call.split_numels)[position]
        first = sum(call.split_numels[:position]) * output.element_size()

        def add_all() -> None:
            with ExitStack() as stack:
                parts = {
                    owner: stack.enter_context(traffic.part(owner, output, first))
                    for owner in owners
                }
                if own is not None:
                    parts[position] = own
                _sum_in_chunks(output, [parts[i] for i in call.contributors])

        return traffic.pending(add_all, full)

    # What they are made of #

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
        """See ``Transport``."""
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
        """See ``Transport``."""
        if os.getpid() != self.arena.pid:
            return  # in a process forked from this one
        self._own.put(BROKEN, 1)
        for counter in (PLACED, READ, EXCHANGED):
            self._own.wake(counter)


_never_freed: list[torch.Tensor] = []


CHUNK_BYTES = 512 * 1024  # stays in a core's cache while several parts are added to it


def _sum_in_chunks(output: Tensor, parts: Sequence[Tensor]) -> None:
    """Do what ``sum_into`` does, several parts chunk by chunk."""
    numel = CHUNK_BYTES // output.element_size() if len(parts) > 2 else output.numel()
    for chunk, *rest in zip(*(each.split(numel) for each in (output, *parts)), strict=True):
        sum_into(chunk, rest)


class _Traffic:
    """What one collective moves to and from one rank."""

    def __init__(self, channel: Channel, host: SharedHost) -> None:
        assert channel.group is not None
        self._channel = channel
        self._group = channel.group
        self._host = host
        self._number = self._host.next_collective()
        self._readers: list[int] = []  # ranks that read this rank's tensor
        self._staged: Tensor | None = None

    def offer(self, tensor: Tensor, readers: Sequence[int]) -> None:
        """Tell the readers where this rank's tensor is."""
        self._readers = [self._channel.rank_by_position[i] for i in self.others(readers)]
        if self._readers:
            place = self._place_of(tensor)
            kept = tensor if self._staged is None else self._staged
            self._host.offer(self._number, place, self._readers, kept)

    def _place_of(self, tensor: Tensor) -> int:
        place = self._host.arena.place_of(tensor)
        if place is None:
            self._staged = _staging.lend(
                tensor.numel(), dtype=tensor.dtype, device=tensor.device
            )
            self._staged.copy_(tensor)
            place = self._host.arena.place_of(self._staged)
        assert place is not None
        return place

    def copy_from(self, position: int, piece: Tensor) -> None:
        """Fill ``piece`` with the peer's tensor."""
        arena, place = self._find(position)
        arena.copy_to(piece, place)

    @contextmanager
    def part(self, position: int, like: Tensor, skipped_bytes: int = 0) -> Iterator[Tensor]:
        """Yield the part of the peer's tensor that has the length and dtype of ``like``."""
        arena, place = self._find(position)
        place += skipped_bytes
        yield arena.view(place, like.numel(), like.dtype)
        arena.forget(place, like.nbytes)

    def _find(self, position: int) -> tuple[PeerArena, int]:
        """Wait for the peer's announcement and return where its tensor is."""
        rank = self._channel.rank_by_position[position]
        place = self._host.wait_for_place(self._number, rank)
        arena = self._host.peers[rank]
        assert arena is not None
        return arena, place

    def pending(self, job: Callable[[], None] | None, read_by_peers: Tensor | None) -> Pending:
        """Return the collective in flight; ``job`` does the reading."""
        reading = []
        if job is not None:
            reading.append(_reader_of(self._group).start(partial(self._read, job)))
        kept = [] if read_by_peers is None else [read_by_peers]
        return Pending(receiving=reading, sending=[self], tensors=kept)

    def _read(self, job: Callable[[], None]) -> None:
        job()
        self._host.say_read(self._number)

    def wait(self) -> None:
        """Wait until all readers have finished reading."""
        self._host.wait_for_readers(self._number, self._readers)
        if self._staged is not None:
            _staging.take_back(self._staged)
            self._staged = None

    def is_completed(self) -> bool:
        """Whether all readers have finished reading."""
        return self._host.have_read(self._number, self._readers)

    def others(self, positions: Sequence[int]) -> list[int]:
        """Return the ``positions`` but this rank's, nearest first."""
        me, others = self._channel.position, sorted(positions)
        after = bisect(others, me)
        return [*others[after:], *others[: after - (me in others)]]


def _allocate(numel: int, dtype: torch.dtype) -> Tensor:
    arena = own_arena()
    assert arena is not None
    return arena.empty(numel, dtype)


_staging = BufferPool(_allocate)


class _Job:
    """A piece of work of a reader, which others can wait for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the job, on the reader's thread."""
        try:
            with torch.no_grad():
                self._run()
        except TimeoutError as error:  # no other rank knows about it
            self._error = error
        except (RuntimeError, OSError) as error:
            self._error = LostPeerError(str(error))
        except BaseException as error:  # raised in whichever thread waits
            self._error = error
        del self._run  # it holds tensors and the group, and the thread holds its last job
        self._is_done.set()

    def wait(self) -> None:
        """Wait until the job has run; raises ``LostPeerError`` if it failed."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether the job has run."""
        return self._is_done.is_set()


class _Reader:
    """A thread that runs jobs one after the other."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon, so that a process whose peers are gone can end.
        self._thread = threading.Thread(target=self._serve, name="shardhet reader", daemon=True)
        self._thread.start()

    def start(self, run: Callable[[], None]) -> _Job:
        """Queue ``run`` behind all jobs started before."""
        job = _Job(run)
        self.jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread, unless it is waiting for a lost peer."""
        self.jobs.put(None)
        if threading.current_thread() is not self._thread:  # which may drop the group last
            self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()


_readers: WeakKeyDictionary[dist.ProcessGroup, _Reader] = WeakKeyDictionary()


def _reader_of(group: dist.ProcessGroup) -> _Reader:
    if group not in _readers:
        reader = _readers[group] = _Reader()
        # This also runs at exit: a thread still running at interpreter shutdown aborts it.
        finalize(group, reader.close)
    return _readers[group]
