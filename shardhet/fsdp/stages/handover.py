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
peer ends the wait.  Which gradients there are, the hosts tell each other.

[Note: Streams of a handover]
On an accelerator the host waits for no message.  Who waits for whom:

    receive, before it writes       for what the compute stream had done when the memory was
                                    allocated, a phase or more before: it overlaps compute
    compute, before it reads        for the receive (``Arriving.wait``)
    send, before it reads           for compute up to its launch
    compute, before it frees        for the send, of the round that has surely been received
    what was sent                   because something later has come back (``Departures.send``)

Received tensors are of the compute stream's memory, and so may be freed at any time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardhet.comm.calls import Messages, Pending, let_go
from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.batching import BatchAxis
from shardhet.fsdp.sharding.comm import CommContext
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

    def of_samples(self, tensor: Tensor, samples: Span, num_samples: int) -> Tensor:
        """Those of a tensor for ``num_samples``."""
        return tensor if self.axis is None else self.axis.narrow(tensor, samples, num_samples)

    def zeros(self, num_samples: int, device: torch.device) -> Tensor:
        """In place of a gradient that there is not."""
        shape = tuple(self.example.shape)
        if self.axis is not None:
            shape = self.axis.shape(shape, num_samples)
        return torch.zeros(shape, dtype=self.example.dtype, device=device)


class Arriving:
    """Tensors of a round on their way to this rank; see [Note: Streams of a handover]."""

    def __init__(
        self, carried: Sequence[Carried], peers: Sequence[Peer], num_samples: int, way: "Route"
    ) -> None:
        self._carried, self._peers, self._num_samples = carried, peers, num_samples
        self._way = way
        self._messages = Messages(way.channel)
        self._flags: list[Tensor] = []  # by peer
        self._telling, self._pending = Pending(), Pending()
        self._wholes: list[Tensor] = []
        self._pieces: list[tuple[BatchAxis, Tensor, Tensor, Span]] = []
        self._addends: list[tuple[Tensor, Tensor]] = []  # for a tensor without samples
        if way.told is not None:
            told = Messages(way.told)
            for peer in peers:
                self._flags.append(torch.zeros(len(carried), dtype=torch.bool))
                told.receive(self._flags[-1], peer.position)
            self._telling = told.post()
        for each in carried:
            whole = each.new_whole(num_samples, way.comm.device)
            self._wholes.append(whole)
            those = [peer for peer in peers if each.goes_to(peer)]
            if each.axis is None:
                self._expect_one(whole, those)
                continue
            for peer in those:
                piece = each.axis.view(whole, peer.samples, num_samples)
                if not piece.is_contiguous():
                    shape = each.axis.shape(each.example.shape, peer.samples.numel)
                    piece = whole.new_empty(shape)
                    self._pieces.append((each.axis, whole, piece, peer.samples))
                self._messages.receive(piece, peer.position)
        self._free = way.comm.record_event(way.comm.current_stream())

    def _expect_one(self, whole: Tensor, peers: Sequence[Peer]) -> None:
        """Receive a tensor without samples; gradients of several peers are added up."""
        for i, peer in enumerate(peers):
            addend = torch.empty_like(whole) if i else whole
            self._addends += [(whole, addend)] * (i > 0)
            self._messages.receive(addend, peer.position)

    def post(self) -> None:
        """Begin to receive."""
        way = self._way
        with way.comm.on_stream(way.stream):
            # From here on nothing else uses the memory: what did was launched before.
            way.stream.wait_event(self._free)
            self._pending = self._messages.post()

    def wait(self) -> list[Tensor | None]:
        """The tensors, once they are here; None in place of gradients that no peer has."""
        self._pending.wait()
        for axis, whole, piece, samples in self._pieces:
            axis.put(whole, piece, samples, self._num_samples)
        for whole, addend in self._addends:
            whole += addend
        if self._way.told is None:
            return [*self._wholes]
        self._telling.wait()
        flags = [flags.tolist() for flags in self._flags]
        return [
            whole
            if any(
                has[i] and each.goes_to(peer)
                for has, peer in zip(flags, self._peers, strict=True)
            )
            else None
            for i, (each, whole) in enumerate(zip(self._carried, self._wholes, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Route:
    """Between two stages, in one direction."""

    channel: Channel
    comm: CommContext
    stream: Any  # on which receives are launched
    told: Channel | None = None  # over which hosts tell which tensors there are; None: all


class Departures:
    """What this rank has sent in one direction."""

    def __init__(self, way: Route, max_unsent: int) -> None:
        self._way = way
        self._max_unsent = max_unsent
        self._unsent: deque[Pending] = deque()
        self._told: deque[Pending] = deque()

    def send(
        self,
        tensors: Sequence[Tensor | None],
        carried: Sequence[Carried],
        peers: Sequence[Peer],
        num_samples: int,
    ) -> None:
        """Send ``peers`` their samples of a round's tensors; zeros for those that are None."""
        way = self._way
        if way.told is not None:
            told = Messages(way.told)
            flags = torch.tensor([t is not None for t in tensors])
            for peer in peers:
                told.send(flags, peer.position)
            self._told.append(told.post())
        messages = Messages(way.channel)
        for tensor, each in zip(tensors, carried, strict=True):
            for peer in peers:
                if not each.goes_to(peer):
                    continue
                if tensor is None:
                    piece = each.zeros(peer.samples.numel, way.comm.device)
                else:
                    piece = each.of_samples(tensor, peer.samples, num_samples)
                messages.send(piece.contiguous(), peer.position)
        self._unsent.append(messages.post())
        # Compute waits for what is received already, so it does not stand still.  On the CPU
        # the host would be what waits.
        let_go(self._unsent, self._max_unsent if way.comm.host_runs_ahead else None)
        let_go(self._told)

    def flush(self) -> None:
        """Wait until everything has been received."""
        let_go(self._unsent, 0)
        let_go(self._told, 0)
