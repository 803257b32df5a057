"""What neighbouring stages send each other: rows of the results of units, and gradients.

``parts_of`` says which part of a forward each stage computes, and what it receives and hands
over.  In the graph of a part neither end keeps a tensor alive: what has arrived may leave for
the memory of the host like any other input of a unit, and what was made is free once sent.

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

[Note: Streams of a transfer]
On an accelerator the host waits for no message.  Who waits for whom:

    receive, before it writes       for what the compute stream had done when the memory was
                                    allocated, a phase or more before: it overlaps compute
    compute, before it reads        for the receive (``PendingReceive.wait``)
    send, before it reads           for compute up to its launch
    compute, before it frees        for the send, of the round that has surely been received
    what was sent                   because something later has come back (``SendQueue.send``)

Received tensors are of the compute stream's memory, and so may be freed at any time.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardhet.comm.calls import Messages, Pending, drain
from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.batching import BatchAxis, Join, Rule
from shardhet.fsdp.probing.prober import Findings
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.stages.flow import DROPPED, Returned
from shardhet.records.layout import Span


class Peer(NamedTuple):
    """A rank of another stage, and which of this rank's samples it has too."""

    position: int
    samples: Span  # of this rank's part of the round
    is_first: bool  # whether the earlier of both is the first that has samples of the later


@dataclass(frozen=True, slots=True)
class StageTensor:
    """A tensor that is handed over."""

    value: Returned
    example: Tensor  # for a few samples, on the meta device
    rule: Rule  # without samples it is the same on all ranks of the stage
    is_differentiable: bool

    def goes_to(self, peer: Peer) -> bool:
        """Whether this peer is sent it, or sends it."""
        return isinstance(self.rule, BatchAxis) or peer.is_first


class PendingReceive:
    """Tensors of a round on their way to this rank; see [Note: Streams of a transfer]."""

    def __init__(
        self,
        stage_tensors: Sequence[StageTensor],
        peers: Sequence[Peer],
        num_samples: int,
        way: "StageRoute",
    ) -> None:
        self._carried, self._peers, self._num_samples = stage_tensors, peers, num_samples
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
                self._flags.append(torch.zeros(len(stage_tensors), dtype=torch.bool))
                told.receive(self._flags[-1], peer.position)
            self._telling = told.post()
        for each in stage_tensors:
            rule, example = each.rule, each.example
            whole = rule.new_whole(example, num_samples, way.comm.device)
            self._wholes.append(whole)
            those = [peer for peer in peers if each.goes_to(peer)]
            if not isinstance(rule, BatchAxis):
                self._expect_one(whole, those)
                continue
            for peer in those:
                piece = rule.view(whole, peer.samples, num_samples)
                if not piece.is_contiguous():
                    piece = whole.new_empty(rule.shape(example.shape, peer.samples.numel))
                    self._pieces.append((rule, whole, piece, peer.samples))
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
class StageRoute:
    """Between two stages, in one direction."""

    channel: Channel
    comm: CommContext
    stream: Any  # on which receives are launched
    told: Channel | None = None  # over which hosts tell which tensors there are; None: all


class SendQueue:
    """What this rank has sent in one direction."""

    def __init__(self, way: StageRoute, max_unsent: int) -> None:
        self._way = way
        self._max_unsent = max_unsent
        self._unsent: deque[Pending] = deque()
        self._told: deque[Pending] = deque()

    def send(
        self,
        tensors: Sequence[Tensor | None],
        stage_tensors: Sequence[StageTensor],
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
        for tensor, each in zip(tensors, stage_tensors, strict=True):
            for peer in peers:
                if not each.goes_to(peer):
                    continue
                if tensor is None:
                    shape = each.rule.shape(each.example.shape, peer.samples.numel)
                    dtype, device = each.example.dtype, way.comm.device
                    piece = torch.zeros(tuple(shape), dtype=dtype, device=device)
                else:
                    piece = each.rule.narrow(tensor, peer.samples, num_samples)
                messages.send(piece.contiguous(), peer.position)
        self._unsent.append(messages.post())
        # Compute waits for what is received already, so it does not stand still.  On the CPU
        # the host would be what waits.
        drain(self._unsent, self._max_unsent if way.comm.host_runs_ahead else None)
        drain(self._told)

    def flush(self) -> None:
        """Wait until everything has been received."""
        drain(self._unsent, 0)
        drain(self._told, 0)


class ReceivedTensors:
    """What a stage has received for a round, and its gradients after the round's backward."""

    def __init__(self) -> None:
        self.grads: list[Tensor | None] = []  # of those that are differentiable

    def with_grad(
        self, tensors: Sequence[Tensor], stage_tensors: Sequence[StageTensor], anchor: Tensor
    ) -> list[Tensor]:
        """The tensors, of which the differentiable ones require a gradient from now on.

        ``anchor`` is any tensor that does.
        """
        begun = differentiable(tensors, stage_tensors)
        self.grads = [None for _ in begun]
        made = iter(_Begin.apply(anchor, self, begun))  # type: ignore[no-untyped-call]
        return [
            next(made) if each.is_differentiable else t
            for t, each in zip(tensors, stage_tensors, strict=True)
        ]


class _Begin(torch.autograd.Function):
    """The first node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, arrived: ReceivedTensors, tensors: list[Tensor]
    ) -> Any:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.arrived.grads = list(grads)
        return None, None, None


def differentiable(
    tensors: Sequence[Tensor], stage_tensors: Sequence[StageTensor]
) -> list[Tensor]:
    """Those that get a gradient."""
    return [t for t, each in zip(tensors, stage_tensors, strict=True) if each.is_differentiable]


def edges_of(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Where backward begins, for each; None for those that need no gradient."""
    return [get_gradient_edge(t) if t.requires_grad else None for t in tensors]


@dataclass(frozen=True, slots=True)
class StagePart:
    """Calls of units from ``start`` to before ``stop``, by their place in forward."""

    start: int
    stop: int
    received: tuple[Returned, ...]  # of earlier calls, that reach ``start`` or a later one
    sent: tuple[Returned, ...]  # of calls before ``stop``, that reach it or a later one


def parts_of(
    findings: Findings, unit_fqns: Sequence[str], stage_by_fqn: Mapping[str, int], number: int
) -> list[StagePart]:
    """The parts of all stages, of which there are ``number``.

    Raises ``ValueError`` if a stage's units are not called one after the other.
    """
    called = [unit_fqns[each.unit] for each in findings.schedule.segments]
    stages = [stage_by_fqn[fqn] for fqn in called]
    for (one, other), pair in zip(pairwise(called), pairwise(stages), strict=True):
        if pair[0] > pair[1]:
            raise ValueError(
                f"stages: unit {other!r} of stage {pair[1]} is called after unit {one!r} of "
                f"stage {pair[0]}, but each stage computes its units and hands on. Give both "
                "to one stage."
            )
    idle = [i for i in range(number) if i not in stages]
    if idle:
        raise ValueError(
            f"stages: forward calls no unit of stage {idle[0]}. Give it units that are called."
        )
    borders = [0, *(stages.index(i) for i in range(1, number)), len(stages)]

    def reaching(border: int) -> tuple[Returned, ...]:
        found = frozenset[Returned]().union(*findings.reached[border:])
        return tuple(sorted(value for value in found if 0 <= value.place < border))

    return [
        StagePart(start, stop, reaching(start), reaching(stop) if stop < len(stages) else ())
        for start, stop in pairwise(borders)
    ]


def check_dropouts(findings: Findings, stages: Sequence[int]) -> None:
    """Raise ``ValueError`` if two stages use one dropout; ``stages`` are those of calls."""
    users: dict[Returned, set[int]] = {}
    for reached, stage in zip(findings.reached, [*stages, stages[-1]], strict=True):
        for mark in (each for each in reached if each.place == DROPPED):
            users.setdefault(mark, set()).add(stage)
    for using in users.values():
        if len(using) > 1:
            raise ValueError(
                f"stages: the result of dropout outside of units is used in stages "
                f"{sorted(using)}, where its microbatches may be others. Let one unit contain "
                "the dropout, or give all that use it to one stage."
            )


def stage_tensors_of(
    values: Sequence[Returned], findings: Findings, called: Sequence[str]
) -> list[StageTensor]:
    """The tensors of ``values``, given what a probe has found and of which unit calls are.

    Raises ``ValueError`` for one without a row for each sample that may differ between ranks,
    and for one that code outside of units changes.
    """
    stage_tensors = []
    for value in values:
        result = findings.results[value.place]
        if value in findings.altered:
            raise ValueError(
                f"stages: code outside of units writes to what unit {called[value.place]!r} "
                "has returned (x += y), or gives it a hook, and a later stage uses it, so two "
                "stages would do it. Make a new tensor there (x = x + y), do it inside a unit, "
                "or give both units to one stage."
            )
        rule = result.rules[value.number]
        if not isinstance(rule, BatchAxis) and not (
            rule is Join.SHARED and result.is_same_on_all
        ):
            raise ValueError(
                f"stages: unit {called[value.place]!r} returns a tensor without a row for each "
                "sample, which a later stage uses and which may differ between ranks. Give "
                "both units to one stage."
            )
        example = result.examples[value.number]
        is_used = result.is_differentiable[value.number]
        stage_tensors.append(StageTensor(value, example, rule, is_used))
    return stage_tensors
