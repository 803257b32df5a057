"""What a rank exchanges with the stages beside its own, in the rounds of a step."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.channel import progress
from shardhet.fsdp.stages.channels import StageChannels
from shardhet.fsdp.stages.kinds import CallKinds
from shardhet.fsdp.stages.stage_transfer import (
    Peer,
    PendingReceive,
    SendQueue,
    StageRoute,
    StageTensor,
)
from shardhet.fsdp.step.around import Activity
from shardhet.fsdp.step.rounds import Round
from shardhet.fsdp.step.runtime import Runtime
from shardhet.records.layout import Span
from shardhet.records.ops import Op, OpKind, StageTransfer, intervals, messages_between
from shardhet.records.schedule import Phase, RoundPhase


class StageExchange:
    """The messages of one rank."""

    def __init__(self, runtime: Runtime, kinds: CallKinds) -> None:
        self._runtime, self._kinds = runtime, kinds
        self._comm = comm = runtime.root_comm
        self._stage = stage = runtime.stage
        channels = StageChannels.of(runtime.plan, comm, runtime.control)
        # So that a receive waits neither for compute nor for a send.
        stream = devices.module_of(comm.device).Stream(priority=-1)
        self._routes = {  # by the earlier of two stages, and direction
            (cut, phase): StageRoute(by_cut[cut], comm, stream, told)
            for by_cut, phase, told in (
                (channels.onward, Phase.FORWARD, None),
                (channels.back, Phase.BACKWARD, channels.on_host),
            )
            for cut in {stage - 1, stage} & by_cut.keys()
        }
        # Of the step in progress
        self._rounds: Sequence[Round] = ()
        self._pending_receives: dict[RoundPhase, PendingReceive] = {}
        self._leaving: dict[RoundPhase, Sequence[Tensor | None]] = {}
        self._send_queues: dict[Phase, SendQueue] = {}

    def begin_step(self, rounds: Sequence[Round]) -> None:
        """Begin a step of ``rounds``, whose list says when messages are launched."""
        stage = self._stage
        held = [min(each, len(rounds)) for each in self._runtime.in_flight]
        # So many were sent since the last one that has surely been received, because something
        # has come from there that was made later.
        most = {Phase.FORWARD: held[stage], Phase.BACKWARD: 1}
        if stage:
            most[Phase.BACKWARD] += held[stage - 1] - held[stage]
        self.begin(rounds, most)

    def begin(self, rounds: Sequence[Round], max_unsent: Mapping[Phase, int]) -> None:
        """Begin ``rounds``, with at most so many messages that may not have been received."""
        self._rounds = rounds
        cut_by_phase = {Phase.FORWARD: self._stage, Phase.BACKWARD: self._stage - 1}
        self._send_queues = {
            phase: SendQueue(self._routes[cut, phase], max_unsent[phase])
            for phase, cut in cut_by_phase.items()
            if (cut, phase) in self._routes
        }

    def hand_over(self, op: Op) -> None:
        """Do what an op of the list says."""
        assert op.stage_transfer is not None
        of = op.stage_transfer.of
        if op.kind is OpKind.ROOM:
            self._make_room(of)
        elif op.kind is OpKind.SEND:
            self.send(of)
        elif of in self._pending_receives:
            self._pending_receives[of].post()

    def receive(self, of: RoundPhase) -> None:
        """Begin to receive what the phase needs, unless that is on its way."""
        if of not in self._pending_receives:
            self._make_room(of)
            if of in self._pending_receives:
                self._pending_receives[of].post()

    def _make_room(self, of: RoundPhase) -> None:
        """Allocate what a phase receives from another stage, if it gets anything."""
        stage_transfer, each = StageTransfer.to(self._stage, of), self._rounds[of.round]
        stage_tensors, n = self._carried(stage_transfer), each.num_samples
        if n and stage_tensors:
            peers = self._peers(each, stage_transfer)
            route = self._routes[stage_transfer.stage, of.phase]
            self._pending_receives[of] = PendingReceive(stage_tensors, peers, n, route)

    def give(self, of: RoundPhase, tensors: Sequence[Tensor | None]) -> None:
        """Have ``tensors`` sent, when it is time, to the stage that needs them."""
        self._leaving[of] = tensors

    def send(self, of: RoundPhase) -> None:
        """Send what the phase has made, if there is anything."""
        if (leaving := self._leaving.pop(of, None)) is not None:
            stage_transfer, each = StageTransfer.by(self._stage, of), self._rounds[of.round]
            peers = self._peers(each, stage_transfer)
            stage_tensors, n = self._carried(stage_transfer), each.num_samples
            self._send_queues[of.phase].send(leaving, stage_tensors, peers, n)

    def take(self, of: RoundPhase) -> list[Tensor | None]:
        """What the phase receives, once it is here; None for gradients that there are not."""
        if (arriving := self._pending_receives.pop(of, None)) is None:
            return []
        is_forward = of.phase is Phase.FORWARD
        what = f"round {of.round}" if is_forward else f"gradients of round {of.round}"
        sender = StageTransfer.to(self._stage, of).stage + (not is_forward)
        progress.mark(f"waiting for {what} of stage {sender}")
        with self._runtime.observers.watch("", Activity.WAIT_STAGE):
            return arriving.wait()

    def flush(self) -> None:
        """Wait until everything that was sent has been received."""
        for each in self._send_queues.values():
            each.flush()

    def _peers(self, each: Round, stage_transfer: StageTransfer) -> list[Peer]:
        """Who has this rank's samples at the other side of a cut."""
        plan, position = self._runtime.plan, self._runtime.control.position
        own, others = plan.groups[stage_transfer.stage : stage_transfer.stage + 2]
        is_earlier = position in own
        if not is_earlier:
            own, others = others, own
        mine = own.index(position)
        first = sum(each.sizes[i] for i in own[:mine])
        pair = [[each.sizes[i] for i in group] for group in (own, others)]
        later = intervals(pair[1] if is_earlier else pair[0])
        # The transpose of what the others send is what they receive.
        return [
            Peer(
                others[other],
                Span(samples.start - first, samples.stop - first),
                is_first=samples.start == later[other if is_earlier else one].start,
            )
            for one, other, samples in messages_between(*pair)
            if one == mine
        ]

    def _carried(self, stage_transfer: StageTransfer) -> list[StageTensor]:
        kind = self._kinds.of(self._rounds[stage_transfer.of.round])
        is_to_next = stage_transfer.stage == self._stage
        if stage_transfer.of.phase is Phase.FORWARD:
            return kind.sent if is_to_next else kind.received
        return kind.sent_with_grad if is_to_next else kind.received_with_grad
