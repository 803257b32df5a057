"""Uneven collectives among processes of one Linux host that may read each other's memory.

A peer's tensor is copied once, by the process that needs it, with ``process_vm_readv``
(cross-memory attach): no socket, no copy on the sender's side.  Over loopback the same bytes
pass through the kernel twice and cost both processes time that they could compute in.

    owner     address of its tensor ->                    may write the tensor again
    reader                             copies it, done ->

Addresses and acknowledgements are 8-byte gloo messages.  A thread per channel does the
copying in launch order, so that the caller computes meanwhile; ctypes and gloo leave it the
interpreter.
"""

import ctypes
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.distributed import Channel, LostPeerError
from shardhet.layout import Span
from shardhet.messages import Pending, Work, pieces_of, wait_all

ADDRESS_TAG = 1
DONE_TAG = 2
CHUNK_BYTES = 256 * 1024  # stays in a core's cache from being read to being added
SMALLEST_SHARED_BYTES = 2**23  # of a shard that two threads add up: the largest comes last
SMALLEST_BYTES = 64 * 1024  # of a whole collective; below that messages cost less


# It never waits for a peer, so a program that ends may join it.
_second_hand = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardhet adder")


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, output: Tensor) -> None:
    """Fill ``output`` (contiguous, on the host) from another process's memory.

    Raises ``OSError`` where the system does not permit it or the process is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    nbytes, read = output.numel() * output.element_size(), 0
    while read < nbytes:  # the system reads at most 2 GiB at a time
        local = _IoVec(output.data_ptr() + read, nbytes - read)
        remote = _IoVec(address + read, nbytes - read)
        count = libc.process_vm_readv(
            pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, ctypes.c_ulong(0)
        )
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"process {pid} cannot be read: {os.strerror(error)}")
        read += count


def find_readable_pids(channel: Channel, device: torch.device) -> tuple[int, ...] | None:
    """Process ids by position if every process may read every other's memory, else None.

    Collective over the channel; the answer is the same on every rank.
    """
    if channel.group is None or device.type != "cpu":
        return None
    host = socket.gethostname()
    probe = torch.tensor([os.getpid(), id(channel)], dtype=torch.int64)
    peers = channel.exchange_objects((host, os.getpid(), probe.data_ptr(), probe.tolist()))
    is_readable = all(each[0] == host for each in peers)
    for _, pid, address, content in peers if is_readable else []:
        seen = torch.zeros(2, dtype=torch.int64)
        try:
            read_memory(pid, address, seen)
        except (OSError, AttributeError):  # not permitted; not Linux
            is_readable = False
        is_readable &= seen.tolist() == content  # another pid namespace reads other memory
    everybody = channel.exchange([float(is_readable)])
    # The second exchange also kept the probe alive until all had read it.
    return tuple(pid for _, pid, _, _ in peers) if all(ok for (ok,) in everybody) else None


def is_worth_it(channel: Channel, nbytes: int, device: torch.device) -> bool:
    """Whether a collective of so many bytes goes this way; equal on all ranks."""
    return channel.pids is not None and device.type == "cpu" and nbytes >= SMALLEST_BYTES


def gather(
    output: Tensor | None,
    shard: Tensor,
    split_numels: Sequence[int],
    channel: Channel,
    receivers: Sequence[int],
) -> Pending:
    """``all_gather_uneven``: every receiver reads every owner's shard."""
    call = _Call(channel, shard)
    if shard.numel():
        call.offer(receivers)
    if output is None:
        return call.pending(None)
    pieces = pieces_of(output, split_numels)
    offers = call.accept([i for i, piece in enumerate(pieces) if piece.numel()])

    def read_all() -> None:
        for position, offer in offers.items():
            call.read(position, offer(), pieces[position])
            call.acknowledge(position)

    pending = call.pending(read_all)
    own = pieces[channel.position]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard)
    return pending


def reduce(
    output: Tensor,
    full: Tensor | None,
    split_numels: Sequence[int],
    channel: Channel,
    contributors: Sequence[int],
) -> Pending:
    """``reduce_scatter_uneven``: every owner reads its part of every contribution."""
    call = _Call(channel, output if full is None else full)
    if full is not None:
        call.offer([i for i, numel in enumerate(split_numels) if numel])
    if not output.numel():
        return call.pending(None)
    if not contributors:
        output.zero_()
    offers = call.accept(contributors)
    own = None if full is None else pieces_of(full, split_numels)[channel.position]
    first = sum(split_numels[: channel.position]) * output.element_size()

    def add_all() -> None:
        addresses = {position: offer() + first for position, offer in offers.items()}
        add = partial(_add, call, output, own, addresses, contributors)
        middle = output.numel() // 2 if output.nbytes >= SMALLEST_SHARED_BYTES else 0
        halves = [_second_hand.submit(add, Span(0, middle))] if middle else []
        add(Span(middle, output.numel()))
        for half in halves:
            half.result()
        for position in offers:
            call.acknowledge(position)

    return call.pending(add_all)


def _add(
    call: "_Call",
    output: Tensor,
    own: Tensor | None,  # this rank's contribution to it
    addresses: Mapping[int, int],  # of the others' contributions to it, by position
    contributors: Sequence[int],
    span: Span,
) -> None:
    """Sum the contributions to ``span`` of the output, in plan order."""
    scratch = torch.empty(CHUNK_BYTES // output.element_size(), dtype=output.dtype)
    for start in range(span.start, span.stop, scratch.numel()):
        chunk = output[start : min(span.stop, start + scratch.numel())]
        for i, position in enumerate(contributors):
            if position == call.position:
                assert own is not None
                part = own[start : start + chunk.numel()]
            else:
                part = scratch[: chunk.numel()] if i else chunk
                offset = start * output.element_size()
                call.read(position, addresses[position] + offset, part)
            if i:
                chunk.add_(part)
            elif part is not chunk:
                chunk.copy_(part)


class _Call:
    """The messages of one collective on one rank."""

    def __init__(self, channel: Channel, tensor: Tensor) -> None:
        assert channel.group is not None
        assert channel.pids is not None
        self.position = channel.position
        self._channel = channel
        self._group = channel.group
        self._pids = channel.pids
        self._tensor = tensor  # what peers read
        self._tokens: list[Tensor] = []  # alive while gloo uses them
        self._sending: list[Work] = []

    def offer(self, readers: Sequence[int]) -> None:
        """Tell the readers where this rank's tensor is, and expect them to acknowledge."""
        for position in self._others(readers):
            rank = self._channel.rank_by_position[position]
            address, done = self._token(self._tensor.data_ptr()), self._token(0)
            self._sending.append(self._post(self._group.send, address, rank, ADDRESS_TAG))
            self._sending.append(self._post(self._group.recv, done, rank, DONE_TAG))

    def accept(self, owners: Sequence[int]) -> dict[int, Callable[[], int]]:
        """For each other owner, nearest first, what waits for its address."""
        offers: dict[int, Callable[[], int]] = {}
        for position in self._others(owners):
            address = self._token(0)
            rank = self._channel.rank_by_position[position]
            work = self._post(self._group.recv, address, rank, ADDRESS_TAG)

            def wait(work: Work = work, address: Tensor = address) -> int:
                work.wait()
                return int(address.item())

            offers[position] = wait
        return offers

    def read(self, position: int, address: int, output: Tensor) -> None:
        """Copy from the memory of the process at ``position``."""
        read_memory(self._pids[position], address, output)

    def acknowledge(self, position: int) -> None:
        """Let the owner at ``position`` have its tensor back."""
        rank = self._channel.rank_by_position[position]
        self._sending.append(self._post(self._group.send, self._token(1), rank, DONE_TAG))

    def pending(self, job: Callable[[], None] | None) -> Pending:
        """The collective in flight; ``job`` copies."""
        copying = [_copier_of(self._group).start(job)] if job is not None else []
        return Pending(receiving=copying, sending=[self], tensors=[self._tensor])

    def wait(self) -> None:
        """Until all readers have acknowledged."""
        wait_all(self._sending)

    def is_completed(self) -> bool:
        """Whether they have."""
        return all(work.is_completed() for work in list(self._sending))

    def _others(self, positions: Sequence[int]) -> list[int]:
        me, world_size = self._channel.position, self._channel.world_size
        return sorted((i for i in positions if i != me), key=lambda i: (i - me) % world_size)

    def _token(self, value: int) -> Tensor:
        self._tokens.append(torch.tensor([value], dtype=torch.int64))
        return self._tokens[-1]

    def _post(
        self, op: Callable[[list[Tensor], int, int], Work], token: Tensor, rank: int, tag: int
    ) -> Work:
        try:
            return op([token], rank, tag)
        except RuntimeError as error:
            raise LostPeerError(str(error)) from error


class _Job:
    """What a copier does, as something to wait for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the copier's thread."""
        try:
            with torch.no_grad():
                self._run()
        except (RuntimeError, OSError) as error:
            self._error = LostPeerError(str(error))
        self._is_done.set()

    def wait(self) -> None:
        """Until it has run; raises ``LostPeerError`` if it failed."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has run."""
        return self._is_done.is_set()


class _Copier:
    """A thread that runs jobs one after the other."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon, so that a process whose peers are gone can end.
        self._thread = threading.Thread(target=self._serve, name="shardhet copier", daemon=True)
        self._thread.start()

    def start(self, run: Callable[[], None]) -> _Job:
        """Run it after all that was started before."""
        job = _Job(run)
        self.jobs.put(job)
        return job

    def close(self) -> None:
        """Let the thread end, unless a lost peer keeps it."""
        self.jobs.put(None)
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()


_copiers: WeakKeyDictionary[dist.ProcessGroup, _Copier] = WeakKeyDictionary()


def _copier_of(group: dist.ProcessGroup) -> _Copier:
    if group not in _copiers:
        copier = _copiers[group] = _Copier()
        # Also at exit: a thread that is left to the end of the interpreter aborts it.
        finalize(group, copier.close)
    return _copiers[group]
