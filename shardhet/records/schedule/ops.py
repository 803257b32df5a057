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
``fsdp.step.turn_walk`` takes a rank through the list, and the simulator runs it.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

from shardhet.records.schedule.pipeline import Handover, RoundPhase, phases_of
from shardhet.records.schedule.turns import LaunchKind, Phase, Schedule


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
    handover: Handover | None = None  # of a message, the same on both sides, or of its room
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
        for handover in each.ready:
            ops.add(OpKind.ROOM, handover=handover)
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

    def hand_over(self, stage: int, handovers: Sequence[Handover]) -> None:
        """Launch messages."""
        for each in handovers:
            if each == Handover.to(stage, each.of):
                self.received[each.of] = [self.add(OpKind.RECV, handover=each)]
            else:
                self.sent.append(self.add(OpKind.SEND, handover=each))
