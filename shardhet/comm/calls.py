"""What uneven collectives are made of: records of calls, messages, operations in flight.

[Note: Transports]
Everything works over torch's process groups alone.  If the ranks of a group share a host,
a ``Transport`` carries their agreements and their uneven collectives without sockets.  The
only implementation is ``extras.shared_host``, without which all goes on over gloo.

``SHARDHET_TRANSPORT=gloo`` disables it, and lets gloo carry the tensors of accelerators too, in
place of NCCL: the libraries of two vendors do not understand each other.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.channel import Channel, progress
from shardhet.comm.devices import BufferPool
from shardhet.comm.failure import LostPeerError, failing_as_peers, raise_as_peers

T = TypeVar("T")


class InFlight(Protocol):
    """An operation that another thread, process or stream performs."""

    def wait(self) -> object:
        """Wait until the operation is done; raises its error if it failed."""

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""


class Pending:
    """A collective in flight, and the tensors it reads and writes.

    ``wait`` returns when this rank's result is complete.  ``wait_sent`` returns when the peers
    have received what this rank sends, so that its input may be overwritten.  On an
    accelerator both make the current stream wait, not the host (except with gloo).
    """

    def __init__(
        self,
        *,
        receiving: Sequence[InFlight] = (),
        sending: Sequence[InFlight] = (),
        finish: Callable[[], None] | None = None,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        self._receiving = list(receiving)
        self._sending = list(sending)
        self._finish = finish
        self._tensors = list(tensors)  # kept alive while the transport uses them

    def wait(self) -> None:
        """Wait until the output of this rank is complete."""
        if self._receiving:
            waited = list(self._receiving)
            wait_all(self._receiving)
            # NCCL has one operation for both directions: nothing is left to wait for.
            self._sending = [work for work in self._sending if work not in waited]
        if self._finish is not None:
            self._finish()
            self._finish = None

    def wait_sent(self) -> None:
        """Wait until nothing reads this rank's input any more."""
        wait_all(self._sending)
        self._tensors.clear()

    def complete(self) -> None:
        """Wait for both: the output may be read, and the input freed."""
        self.wait()
        self.wait_sent()

    def is_sent(self) -> bool:
        """Whether ``wait_sent`` would return at once."""
        return not self._sending or all(work.is_completed() for work in self._sending)


def drain(unsent: deque[Pending], most: int | None = None) -> None:
    """Drop what peers have received, and wait for all but ``most``; None: for nothing."""
    while unsent and ((most is not None and len(unsent) > most) or unsent[0].is_sent()):
        unsent.popleft().wait_sent()


def wait_all(works: list[InFlight]) -> None:
    """Wait for all of ``works`` and empty the list."""
    try:
        while works:
            works[-1].wait()
            works.pop()
    except RuntimeError as error:
        raise_as_peers(error)


class Messages:
    """Point-to-point messages to post together.

    Empty messages and messages to this rank itself are left out.  Between two ranks, messages
    arrive in the order in which they were posted.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._receives: list[dist.P2POp] = []
        self._sends: list[tuple[int, dist.P2POp]] = []

    def receive(self, tensor: Tensor, position: int) -> None:
        """Fill ``tensor`` with what the peer at ``position`` sends."""
        if tensor.numel() and position != self._channel.position:
            self._receives.append(self._op(dist.irecv, tensor, position))

    def send(self, tensor: Tensor, position: int) -> None:
        """Send ``tensor`` to the peer at ``position``."""
        if tensor.numel() and position != self._channel.position:
            # Each rank starts with its neighbour, so that not all ranks send to the same
            # receiver first.
            distance = (position - self._channel.position) % self._channel.world_size
            self._sends.append((distance, self._op(dist.isend, tensor, position)))

    def _op(
        self, op: Callable[..., dist.Work | None], tensor: Tensor, position: int
    ) -> dist.P2POp:
        peer = self._channel.rank_by_position[position]
        group = self._channel.group
        if not devices.is_on_host(tensor):
            tensor = devices.unrecorded(tensor)  # the streams wait, see ``Pending``
        return dist.P2POp(op, tensor, group=group, group_peer=peer)

    def post(self, *, finish: Callable[[], None] | None = None) -> Pending:
        """Post the messages; ``finish`` runs when all receives have completed."""
        sends = [op for _, op in sorted(self._sends, key=lambda entry: entry[0])]
        ops = [*self._receives, *sends]
        works: list[dist.Work] = []
        if ops:
            with failing_as_peers():
                works = dist.batch_isend_irecv(ops)
        # NCCL has one operation for the whole group.  The stream that waits for it joins its
        # sends too, also on a rank that only sends.
        is_one_each = not ops or devices.is_on_host(ops[0].tensor)
        num_receives = len(self._receives)
        return Pending(
            receiving=works[:num_receives] if is_one_each else works,
            sending=works[num_receives:] if is_one_each else works,
            finish=finish,
            tensors=[op.tensor for op in ops],
        )


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """An all-gather of shards; see ``collectives.all_gather_uneven``."""

    output: Tensor | None  # [sum(split_numels)]; None if this rank receives nothing
    shard: Tensor  # [split_numels[position]]; may be a view of output
    split_numels: Sequence[int]
    channel: Channel
    receivers: Sequence[int]  # positions

    def __post_init__(self) -> None:
        _check_splits(self.shard, self.output, self.split_numels, self.channel)

    def copy_own_shard(self) -> None:
        """Copy this rank's shard into its output, unless it is there already."""
        assert self.output is not None
        own = pieces_of(self.output, self.split_numels)[self.channel.position]
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)


@dataclass(frozen=True, slots=True, eq=False)
class ReduceScatter:
    """A reduce-scatter of gradients; see ``collectives.reduce_scatter_uneven``."""

    output: Tensor  # [split_numels[position]]
    full: Tensor | None  # [sum(split_numels)]; None if this rank contributes nothing
    split_numels: Sequence[int]
    channel: Channel
    contributors: Sequence[int]  # positions
    scratch: BufferPool

    def __post_init__(self) -> None:
        _check_splits(self.output, self.full, self.split_numels, self.channel)


class Transport(Protocol):
    """One queue of agreements and collectives among the ranks of a group, all on the host.

    Every rank makes the same calls in the same order.
    """

    def exchange(
        self, row: Sequence[float], within_s: float | None = None
    ) -> list[list[float]]:
        """Return every process's row, by rank in the group.  Collective.

        All rows have the same length.  Raises ``TimeoutError`` if they do not arrive
        ``within_s``, and ``LostPeerError`` if a process is gone.
        """

    def gather(self, call: AllGather) -> Pending:
        """Perform ``collectives.all_gather_uneven``.  Collective."""

    def reduce(self, call: ReduceScatter) -> Pending:
        """Perform ``collectives.reduce_scatter_uneven``.  Collective."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized tensor [numel] in the memory that transfers fastest."""

    def give_up(self) -> None:
        """Make every process that waits for this one, now or later, fail with an error."""


def pieces_of(flat: Tensor, split_numels: Sequence[int]) -> list[Tensor]:
    """Return the consecutive parts of ``flat``, one per split, as views."""
    stops = accumulate(split_numels)
    return [flat[stop - n : stop] for n, stop in zip(split_numels, stops, strict=True)]


def in_rank_order(by_position: Sequence[T], channel: Channel) -> list[T]:
    """Return what ``by_position`` has for each rank of the group."""
    result = list(by_position)
    for position, rank in enumerate(channel.rank_by_position):
        result[rank] = by_position[position]
    return result


def sum_into(output: Tensor, parts: Sequence[Tensor]) -> None:
    """Store ``parts[0] + parts[1] + ...``, added in that order, in ``output``.

    One of the first two parts may be ``output`` itself.
    """
    if not parts:
        output.zero_()
    elif len(parts) == 1:
        if parts[0].data_ptr() != output.data_ptr():
            output.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=output)
        for part in parts[2:]:
            output.add_(part)


def received_sum(
    call: ReduceScatter, messages: Messages, positions: Sequence[int], own: Tensor | None
) -> Callable[[], None]:
    """Receive parts from ``positions``; what then puts their sum, in this order, in the output.

    ``own`` is this rank's part, read in place; the first of the others is received into the
    output, and the rest into scratch buffers.
    """
    output, scratch, here = call.output, call.scratch, call.channel.position
    others = [i for i in positions if i != here] if output.numel() else []
    buffers = [
        scratch.lend(output.numel(), dtype=output.dtype, device=output.device)
        for _ in others[1:]
    ]
    parts = dict(zip(others, [output, *buffers], strict=False))
    for other, part in parts.items():
        messages.receive(part, other)
    if own is not None:
        parts[here] = own

    def add_up() -> None:
        sum_into(output, [parts[i] for i in positions if i in parts])
        for buffer in buffers:
            scratch.take_back(buffer)

    return add_up


def _check_splits(
    shard: Tensor, full: Tensor | None, split_numels: Sequence[int], channel: Channel
) -> None:
    if len(split_numels) != channel.world_size:
        raise ValueError(
            f"{len(split_numels)} split sizes for {channel.world_size} ranks. Give one a rank."
        )
    if shard.numel() != split_numels[channel.position]:
        raise ValueError(
            f"position {channel.position}: the shard has {shard.numel()} elements but its "
            f"split is {split_numels[channel.position]}."
        )
    if full is not None and full.numel() != sum(split_numels):
        raise ValueError(
            f"position {channel.position}: the whole tensor has {full.numel()} elements but "
            f"the splits sum to {sum(split_numels)}."
        )


SWITCH = "SHARDHET_TRANSPORT"
CHOICES = ("auto", "gloo")
SHARED_HOST = "shardhet.extras.shared_host.transport"


def wants_gloo() -> bool:
    """Whether everything travels over gloo, by the environment of this process."""
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{SWITCH}={wanted!r}: it is one of {', '.join(CHOICES)}.")
    return wanted == "gloo"


def meet(group: dist.ProcessGroup, number: int) -> tuple[Transport, ...] | None:
    """Return ``number`` transports among the ranks of ``group``; None on all if unavailable.

    Collective over ``group``.
    """
    is_wanted = not wants_gloo()
    try:
        shared_host: Any = import_module(SHARED_HOST)
    except ModuleNotFoundError:
        return None
    found: tuple[Transport, ...] | None = shared_host.SharedHost.meet(group, number, is_wanted)
    return found


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout that ``group`` was made with."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


class HostCopy:
    """An asynchronous host copy of a device tensor, ready once the device has computed it.

    norm = HostCopy(model.clip_grad_norm_(1.0))
    optimizer.step()                    # the device works on this ...
    print(norm.read())                  # ... while the host waits only for what came before
    """

    def __init__(self, tensor: Tensor) -> None:
        """Copy the value that ``tensor`` has at this point of the current stream."""
        # The copy goes to pinned memory; otherwise the host would wait here.
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._copied_event = devices.module_of(tensor.device).Event()
        self._copied_event.record()
        self.value: Tensor | None = None  # once it was read

    def read(self) -> Tensor:
        """Return the values.  The host waits until the device has made the copy, no longer.

        Raises ``LostPeerError`` if the run has ended meanwhile: a communicator that is aborted
        lets the device go on, with whatever is in its buffers.
        """
        self._copied_event.synchronize()
        if progress.failure is not None:
            raise LostPeerError(progress.failure.message)
        self.value = self._copy
        return self._copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the host tensor ``tensor`` to ``device``, in the order of its current stream.

    The copy is made from pinned memory: with pageable memory, the host would wait until the
    device has finished all queued work.
    """
    if devices.is_on_host(device):
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
