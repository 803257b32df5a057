"""Point-to-point messages between positions of a channel, and operations in flight."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.channel import Channel
from shardhet.comm.peers import LostPeerError

# An error of this rank, whatever it was waiting for: no memory, or work that failed earlier.
OF_THIS_DEVICE = (torch.AcceleratorError, torch.OutOfMemoryError)


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

    def is_sent(self) -> bool:
        """Whether ``wait_sent`` would return at once."""
        return all(work.is_completed() for work in self._sending)


class Messages:
    """Point-to-point messages to post together.

    Empty messages and messages to this rank itself are left out.
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
        return dist.P2POp(op, tensor, group=self._channel.group, group_peer=peer)

    def post(self, *, finish: Callable[[], None] | None = None) -> Pending:
        """Post the messages; ``finish`` runs when all receives have completed."""
        sends = [op for _, op in sorted(self._sends, key=lambda entry: entry[0])]
        ops = [*self._receives, *sends]
        works: list[dist.Work] = []
        if ops:
            try:
                works = dist.batch_isend_irecv(ops)
            except OF_THIS_DEVICE:
                raise
            except RuntimeError as error:
                raise LostPeerError(str(error)) from error
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


def wait_all(works: list[InFlight]) -> None:
    """Wait for all of ``works`` and empty the list.

    A failure means that a peer is lost, unless this rank's own device has failed.
    """
    try:
        while works:
            works[-1].wait()
            works.pop()
    except OF_THIS_DEVICE:
        raise
    except RuntimeError as error:
        raise LostPeerError(str(error)) from error
