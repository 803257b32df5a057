"""One list for every step: what the ranks of a stage launch, wait for and compute, in order.

A plan without stages is one stage.  An op is issued once the one before it in the list has been
issued and the ops in its ``after`` have ended.  Turns have ended before the next op is issued;
transfers go on beside them, from when all ranks that take part have issued theirs.  A rank
without samples has the same list, and its turns take no time.  In each phase of a round a stage

    makes room for what it receives soon
    launches messages, among them what it receives for a later phase
    launches gathers for its first turns
    waits for what it receives for this phase
    takes its turns: gathers for one and the next, BEGIN, the turn, what is launched after it
    launches messages that the phase has made possible

Ranks without stages meet between phases, to share samples and the loss; gathers for backward
are launched before.  The root is left out: all ranks gather it first and reduce it last.
``fsdp.step.schedule_executor`` takes a rank through the list, and the simulator runs it.

[Note: Rounds of a pipeline]
One forward, one backward (Narayanan et al., "Efficient large-scale language model training on
GPU clusters", 2021): a stage begins rounds until so many are in flight as it may have; from
then on it finishes the oldest before it begins another.  With two rounds in flight on the
first stage and one on the second:

    stage 0   F0 F1    B0 F2    B1 F3    B2    B3
    stage 1      F0 B0    F1 B1    F2 B2    F3 B3

The orders of all stages complete if and only if the number in flight does not grow from one
stage to the next.  Samples of a round are handed over by intervals: a device of one stage sends
a device of the next the samples that both have.  Gradients go the same way back.

[Note: One order of messages]
NCCL does not promise that communicators make progress beside each other.  So all ranks launch
messages in one order: no message is launched behind another one that waits for it.  With
K rounds in flight on a stage and K' on the next, the forward of round x is handed over before
the backward of round r if and only if x <= r + c; a stage computes round r + K' - 1 before the
backward of r, and the one before it at most r + K - 1, so K' - 1 <= c <= K - 1.  With
c = min(K', K - 1) no stage receives more than one round ahead.  Where K' + 2 < K a stage has to
put sends off, until it has launched a receive; the next stage is not ready for them earlier.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardhet.records.layout import Span
from shardhet.records.schedule import (
    GATHER,
    REDUCE,
    LaunchKind,
    Phase,
    RoundPhase,
    Schedule,
    StepForm,
    one_forward_one_backward,
    straight_schedule,
)


class StageTransfer(NamedTuple):
    """What a stage hands to the next one in a forward, or gets from it in a backward."""

    of: RoundPhase
    stage: int  # the earlier of the two

    @classmethod
    def to(cls, stage: int, of: RoundPhase) -> "StageTransfer":
        """What ``stage`` receives for the phase."""
        return cls(of, stage - (of.phase is Phase.FORWARD))

    @classmethod
    def by(cls, stage: int, of: RoundPhase) -> "StageTransfer":
        """What ``stage`` sends after the phase."""
        return cls(of, stage - (of.phase is Phase.BACKWARD))


class StagePhase(NamedTuple):
    """A phase of a stage, and its messages around it, in the order of launching."""

    of: RoundPhase
    ready: tuple[StageTransfer, ...]  # received from now on: the memory is there
    before: tuple[StageTransfer, ...]
    after: tuple[StageTransfer, ...]


def phases_of(
    stage: int, in_flight: Sequence[int], num_rounds: int, *, in_one_order: bool
) -> list[StagePhase]:
    """What ``stage`` does in a step, given how many rounds each stage may have in flight.

    It receives what a phase needs at most one round ahead.  ``in_one_order``: messages are
    launched as in [Note: One order of messages]; else as early as possible.
    """
    held = [min(each, num_rounds) for each in in_flight]
    borders = [i for i in (stage - 1, stage) if 0 <= i < len(held) - 1]
    queues = [_between(i, held, num_rounds) for i in borders]
    possible: set[StageTransfer] = set()

    def launch() -> tuple[StageTransfer, ...]:
        launched: list[StageTransfer] = []
        for queue in queues:
            number = next((i for i, each in enumerate(queue) if each not in possible), None)
            going = queue[:number] if in_one_order else [e for e in queue if e in possible]
            queue[:] = [each for each in queue if each not in going]
            launched += going
        return tuple(launched)

    phases = []
    order = one_forward_one_backward(num_rounds, held[stage])
    for now, following in zip(order, [*order[1:], order[-1]], strict=True):
        ahead = (now, following, now._replace(round=now.round + 1))
        received = dict.fromkeys(StageTransfer.to(stage, each) for each in ahead)
        ready = [e for e in received if e not in possible and any(e in q for q in queues)]
        possible.update(ready)
        before = launch()
        possible.add(StageTransfer.by(stage, now))
        phases.append(StagePhase(now, tuple(ready), before, launch()))
    return phases


def _between(stage: int, held: Sequence[int], num_rounds: int) -> list[StageTransfer]:
    """What ``stage`` and the next hand each other; see [Note: One order of messages]."""
    ahead = min(held[stage + 1], held[stage] - 1)
    forwards = [RoundPhase(x, Phase.FORWARD) for x in range(num_rounds)]
    order: list[RoundPhase] = []
    for number in range(num_rounds):
        order += forwards[number + ahead if number else 0 : number + ahead + 1]
        order.append(RoundPhase(number, Phase.BACKWARD))
    return [StageTransfer(each, stage) for each in order]


class Message(NamedTuple):
    """Samples that one device hands to another, whose places in a round are ``samples``."""

    sender: int  # index within its stage
    receiver: int
    samples: Span


def intervals(sizes: Sequence[int]) -> list[Span]:
    """The samples of each device of a stage, given how many each has in a round."""
    return [Span(stop - n, stop) for n, stop in zip(sizes, accumulate(sizes), strict=True)]


def messages_between(senders: Sequence[int], receivers: Sequence[int]) -> list[Message]:
    """What the devices of two stages send each other, given how many samples each has.

    At most as many messages as both have devices, less one.
    """
    return [
        Message(i, j, part)
        for i, own in enumerate(intervals(senders))
        for j, other in enumerate(intervals(receivers))
        if (part := own.intersect(other)).numel
    ]


class OpKind(Enum):
    """What is neither the compute of a turn (``Phase``) nor a launch for one."""

    BEGIN = auto()  # the runtime's own work for a turn
    ROOM = auto()  # memory for what is received
    SEND = auto()  # to another stage
    RECV = auto()
    AGREE = auto()  # all ranks meet
    STEP = auto()  # of the optimizer


class Op(NamedTuple):
    """What a rank does, or launches, next."""

    kind: Phase | LaunchKind | OpKind
    unit: int = -1  # of a turn or a launch, among those of the stage
    stage_transfer: StageTransfer | None = (
        None  # of a message, the same on both sides, or of its room
    )
    after: tuple[int, ...] = ()  # ops that have ended before, in the order of waiting


@lru_cache(maxsize=64)
def ops_of(
    schedule: Schedule,
    stage: int = 0,
    in_flight: tuple[int, ...] = (),
    *,
    in_one_order: bool = False,
) -> tuple[Op, ...]:
    """What each rank of ``stage`` does in a step, given its turns and how many rounds each
    stage may have in flight; of none, what each rank does of a plan without stages.

    ``in_one_order`` is that of messages, as in ``phases_of``.
    """
    ops, number = _Ops(schedule), schedule.form.num_rounds
    for each in phases_of(stage, in_flight or (1,), number, in_one_order=in_one_order):
        if not in_flight and ops.cursor:
            ops.due = [ops.add(OpKind.AGREE)]
        for stage_transfer in each.ready:
            ops.add(OpKind.ROOM, stage_transfer=stage_transfer)
        ops.hand_over(stage, each.before)
        ops.launch_ahead()
        ops.due += ops.received.pop(each.of, ())
        ops.take_turns(each.of)
        if not in_flight and each.of.phase is Phase.FORWARD:
            ops.launch_ahead()  # while the loss is shared
        ops.hand_over(stage, each.after)
    for launch in schedule.launched_last():
        ops.launch_after(launch.kind, launch.unit)
    ops.due = [*(i for launched in ops.launched.values() for i in launched), *ops.sent]
    ops.due = [ops.add(OpKind.AGREE)]
    ops.add(OpKind.STEP)
    return tuple(ops.ops)


class _Ops:
    """A list that is being written."""

    def __init__(self, schedule: Schedule) -> None:
        self.ops: list[Op] = []
        self.due: list[int] = []  # what the next op waits for
        self.cursor = 0  # the next turn
        self.received: dict[RoundPhase, list[int]] = {}
        self.sent: list[int] = []
        self.launched = defaultdict[LaunchKind, deque[int]](deque)  # after turns, not finished
        self._schedule = schedule
        self._ahead = defaultdict[int, list[int]](list)  # launched for a turn
        self._last_ahead = -1  # the latest of them

    def add(self, kind: Phase | LaunchKind | OpKind, *after: int, **of: Any) -> int:
        """Add an op and return its index."""
        self.ops.append(Op(kind, after=(*self.due, *after), **of))
        self.due = []
        return len(self.ops) - 1

    def launch_ahead(self) -> None:
        """Launch what this turn and the next need, unless it is launched already."""
        before = self._last_ahead
        for each in self._schedule.launched_by(self.cursor):
            if each.turn > before:
                self._ahead[each.turn].append(self.add(each.kind, unit=each.unit))
                self._last_ahead = each.turn

    def take_turns(self, of: RoundPhase) -> None:
        """Take those of a phase."""
        for turn in self._schedule.turns[self.cursor :]:
            if (turn.round, turn.phase) != of:
                return
            self.launch_ahead()
            self.add(OpKind.BEGIN, unit=turn.unit)
            waits = self._ahead.pop(self.cursor, [])
            if turn.phase is Phase.BACKWARD:
                for launched in self.launched.values():
                    while any(self.ops[i].unit == turn.unit for i in launched):
                        waits.append(launched.popleft())  # its gradients of the round before
            self.add(turn.phase, *waits, unit=turn.unit)
            for kind in turn.after:
                self.launch_after(kind, turn.unit)
            self.cursor += 1

    def launch_after(self, kind: LaunchKind, unit: int) -> None:
        """Launch what follows a turn, once there is room for it."""
        launched, waits = self.launched[kind], list[int]()
        while kind.max_in_flight is not None and len(launched) >= kind.max_in_flight:
            waits.append(launched.popleft())
        launched.append(self.add(kind, *waits, unit=unit))

    def hand_over(self, stage: int, handovers: Sequence[StageTransfer]) -> None:
        """Launch messages."""
        for each in handovers:
            if each == StageTransfer.to(stage, each.of):
                self.received[each.of] = [self.add(OpKind.RECV, stage_transfer=each)]
            else:
                self.sent.append(self.add(OpKind.SEND, stage_transfer=each))


MAX_ROUNDS = 3  # those between the first and the last are alike
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUnits:
    """By turn: whose tensors are alive, in steps of at most ``MAX_ROUNDS`` rounds."""

    unit: Ints  # [turns]
    round: Ints  # [turns]
    is_backward: Bools  # [turns]
    unsharded: Bools  # [turns, units]
    grads: Bools  # [turns, units] whole gradients
    num_rows: Ints  # [turns, units] parts of sums: rows of the gradient, and of one to come
    last_grads: Bools  # [units] while the last reductions are on their way


@lru_cache(maxsize=64)
def held_units(num_units: int, form: StepForm) -> HeldUnits:
    """Walk the schedule of a step of such a form."""
    form = replace(form, num_rounds=min(form.num_rounds, MAX_ROUNDS))
    schedule = straight_schedule(num_units, form)
    turns, ops = iter(schedule.turns), ops_of(schedule)
    unsharded, grads = np.zeros(num_units, dtype=bool), np.zeros(num_units, dtype=bool)
    rows = np.zeros(num_units, dtype=np.int64)
    held = []
    for op in ops[:-2]:  # the last reductions have not ended
        for i in op.after:
            if ops[i].kind is REDUCE:
                grads[ops[i].unit], rows[ops[i].unit] = False, 1
        if isinstance(op.kind, Phase):
            grads[op.unit] |= op.kind is Phase.BACKWARD
            held.append((unsharded.copy(), grads.copy(), rows.copy()))
            unsharded[op.unit] &= not next(turns).reshards
        elif op.kind is GATHER:
            unsharded[op.unit] = True
        elif op.kind is REDUCE:
            rows[op.unit] += 1
    each = [np.array(values) for values in zip(*held, strict=True)]
    return HeldUnits(
        unit=np.array([turn.unit for turn in schedule.turns]),
        round=np.array([turn.round for turn in schedule.turns]),
        is_backward=np.array([turn.phase is Phase.BACKWARD for turn in schedule.turns]),
        unsharded=each[0],
        grads=each[1],
        num_rows=each[2],
        last_grads=grads,
    )
