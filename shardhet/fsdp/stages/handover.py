"""What neighbouring stages send each other: rows of the results of units, and gradients.

The samples of a round are cut at other places in one stage than in the next.  A rank sends each
rank of the next stage the samples that both have; gradients return the same way:

    samples    0     1     2     3
    stage 0    [    rank 0     ][ rank 1 ]       rank 0 sends 0 1 to rank 2, and 2 to rank 3
    stage 1    [ rank 2  ][   rank 3     ]       rank 1 sends 3 to rank 3

Between two ranks, messages of a direction arrive in the order of rounds.  Nothing waits for a
message that is being sent; a rank waits for those that it receives, in ``comm``, where a failed
peer ends the wait.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardhet.comm.calls import Messages, Pending
from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.batching import BatchAxis
from shardhet.fsdp.stages.flow import Returned
from shardhet.records.layout import Span


class Peer(NamedTuple):
    """A rank of another stage, and which of this rank's samples it has too."""

    position: int
    samples: Span  # of this rank's part of the round


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor with samples that is handed over."""

    value: Returned
    example: Tensor  # for a few samples, on the meta device
    axis: BatchAxis
    is_differentiable: bool


class Arriving:
    """Tensors of a round on their way to this rank."""

    def __init__(self, channel: Channel, peers: Sequence[Peer], num_samples: int) -> None:
        self._messages = Messages(channel)
        self._peers = peers
        self._num_samples = num_samples
        self._flags: list[Tensor] = []  # by peer
        self._wholes: list[Tensor] = []
        self._pieces: list[tuple[BatchAxis, Tensor, Tensor, Span]] = []
        self._pending = Pending()

    def post(
        self, carried: Sequence[Carried], device: torch.device, *, has_flags: bool
    ) -> None:
        """Receive ``carried``, after flags that say which of them are there."""
        for position, _ in self._peers if has_flags else ():
            self._flags.append(torch.zeros(len(carried), dtype=torch.bool, device=device))
            self._messages.receive(self._flags[-1], position)
        for each in carried:
            whole = each.axis.new_whole(each.example, self._num_samples, device)
            self._wholes.append(whole)
            for position, samples in self._peers:
                piece = each.axis.view(whole, samples, self._num_samples)
                if not piece.is_contiguous():
                    shape = each.axis.shape(each.example.shape, samples.numel)
                    piece = whole.new_empty(shape)
                    self._pieces.append((each.axis, whole, piece, samples))
                self._messages.receive(piece, position)
        self._pending = self._messages.post()

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        self._pending.wait()
        for axis, whole, piece, samples in self._pieces:
            axis.put(whole, piece, samples, self._num_samples)
        return self._wholes

    def wait_for_gradients(self) -> list[Tensor | None]:
        """The tensors, None in place of those that no peer has."""
        wholes = self.wait()
        have = torch.stack(self._flags).any(0).tolist()
        return [whole if has else None for whole, has in zip(wholes, have, strict=True)]


class Direction:
    """One direction of the messages of a pipeline, on this rank."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._unsent: deque[Pending] = deque()

    def receive(
        self,
        carried: Sequence[Carried],
        peers: Sequence[Peer],
        num_samples: int,
        *,
        has_flags: bool = False,
    ) -> Arriving:
        """Begin to receive a round's tensors from ``peers``."""
        arriving = Arriving(self._channel, peers, num_samples)
        arriving.post(carried, self._device, has_flags=has_flags)
        return arriving

    def send(
        self,
        tensors: Sequence[Tensor | None],
        carried: Sequence[Carried],
        peers: Sequence[Peer],
        num_samples: int,
        *,
        has_flags: bool = False,
    ) -> None:
        """Send ``peers`` their samples of a round's tensors; zeros for those that are None."""
        messages = Messages(self._channel)
        flags = torch.tensor([t is not None for t in tensors], device=self._device)
        for position, _ in peers if has_flags else ():
            messages.send(flags, position)
        for tensor, each in zip(tensors, carried, strict=True):
            for position, samples in peers:
                if tensor is None:
                    shape = each.axis.shape(each.example.shape, samples.numel)
                    piece = torch.zeros(shape, dtype=each.example.dtype, device=self._device)
                else:
                    piece = each.axis.narrow(tensor, samples, num_samples)
                messages.send(piece.contiguous(), position)
        self._unsent.append(messages.post())
        while self._unsent and self._unsent[0].is_sent():
            self._unsent.popleft().wait_sent()

    def flush(self) -> None:
        """Wait until everything has been received."""
        while self._unsent:
            self._unsent.popleft().wait_sent()
