"""What neighbouring stages send each other: rows of the results of units, and gradients.

The samples of a round are cut at other places in one stage than in the next.  A rank sends each
rank of the next stage the samples that both have; gradients return the same way:

    samples    0     1     2     3
    stage 0    [    rank 0     ][ rank 1 ]       rank 0 sends 0 1 to rank 2, and 2 to rank 3
    stage 1    [ rank 2  ][   rank 3     ]       rank 1 sends 3 to rank 3

A tensor without rows is the same on all ranks of a stage.  A rank receives it from the first of
those that send it samples, and returns its gradient there, where gradients are summed.

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
    is_first: bool  # whether the earlier of both is the first that has samples of the later


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that is handed over."""

    value: Returned
    example: Tensor  # for a few samples, on the meta device
    axis: BatchAxis | None  # None: it has no samples
    is_differentiable: bool

    def goes_to(self, peer: Peer) -> bool:
        """Whether this peer is sent it, or sends it."""
        return self.axis is not None or peer.is_first

    def new_whole(self, num_samples: int, device: torch.device) -> Tensor:
        """An empty tensor for so many samples."""
        if self.axis is not None:
            return self.axis.new_whole(self.example, num_samples, device)
        return torch.empty(self.example.shape, dtype=self.example.dtype, device=device)

    def put(self, whole: Tensor, piece: Tensor, samples: Span, num_samples: int) -> None:
        """Write ``piece`` to those of ``whole``; without samples it is all of it."""
        if self.axis is None:
            whole.copy_(piece)
        else:
            self.axis.put(whole, piece, samples, num_samples)

    def of_samples(self, tensor: Tensor | None, samples: Span, num_samples: int) -> Tensor:
        """Those of a tensor for ``num_samples``; zeros on the host if it is None."""
        shape = tuple(self.example.shape)
        if tensor is None:
            if self.axis is not None:
                shape = self.axis.shape(shape, samples.numel)
            return torch.zeros(shape, dtype=self.example.dtype)
        return tensor if self.axis is None else self.axis.narrow(tensor, samples, num_samples)


class Arriving:
    """Tensors of a round on their way to this rank."""

    def __init__(self, channel: Channel, peers: Sequence[Peer], num_samples: int) -> None:
        self._messages = Messages(channel)
        self._peers = peers
        self._num_samples = num_samples
        self._carried: Sequence[Carried] = ()
        self._flags: list[Tensor] = []  # by peer
        self._wholes: list[Tensor] = []
        self._pieces: list[tuple[BatchAxis, Tensor, Tensor, Span]] = []
        self._addends: list[tuple[Tensor, Tensor]] = []  # for a tensor without samples
        self._pending = Pending()

    def post(
        self, carried: Sequence[Carried], device: torch.device, *, has_flags: bool
    ) -> None:
        """Receive ``carried``, after flags that say which of them are there."""
        self._carried = carried
        for peer in self._peers if has_flags else ():
            self._flags.append(torch.zeros(len(carried), dtype=torch.bool, device=device))
            self._messages.receive(self._flags[-1], peer.position)
        for each in carried:
            whole = each.new_whole(self._num_samples, device)
            self._wholes.append(whole)
            peers = [peer for peer in self._peers if each.goes_to(peer)]
            if each.axis is None:
                self._post_one(whole, peers)
                continue
            for peer in peers:
                piece = each.axis.view(whole, peer.samples, self._num_samples)
                if not piece.is_contiguous():
                    shape = each.axis.shape(each.example.shape, peer.samples.numel)
                    piece = whole.new_empty(shape)
                    self._pieces.append((each.axis, whole, piece, peer.samples))
                self._messages.receive(piece, peer.position)
        self._pending = self._messages.post()

    def _post_one(self, whole: Tensor, peers: Sequence[Peer]) -> None:
        """Receive a tensor without samples; gradients of several peers are added up."""
        for i, peer in enumerate(peers):
            addend = torch.empty_like(whole) if i else whole
            self._addends += [(whole, addend)] * (i > 0)
            self._messages.receive(addend, peer.position)

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        self._pending.wait()
        for axis, whole, piece, samples in self._pieces:
            axis.put(whole, piece, samples, self._num_samples)
        for whole, addend in self._addends:
            whole += addend
        return self._wholes

    def wait_for_gradients(self) -> list[Tensor | None]:
        """The tensors, None in place of those that no peer has."""
        wholes = self.wait()
        flags = [flags.tolist() for flags in self._flags]
        have = [
            any(
                has[i] and each.goes_to(peer)
                for has, peer in zip(flags, self._peers, strict=True)
            )
            for i, each in enumerate(self._carried)
        ]
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
        for peer in peers if has_flags else ():
            messages.send(flags, peer.position)
        for tensor, each in zip(tensors, carried, strict=True):
            for peer in peers:
                if each.goes_to(peer):
                    piece = each.of_samples(tensor, peer.samples, num_samples)
                    messages.send(piece.to(self._device).contiguous(), peer.position)
        self._unsent.append(messages.post())
        while self._unsent and self._unsent[0].is_sent():
            self._unsent.popleft().wait_sent()

    def flush(self) -> None:
        """Wait until everything has been received."""
        while self._unsent:
            self._unsent.popleft().wait_sent()
