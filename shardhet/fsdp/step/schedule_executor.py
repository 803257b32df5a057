"""The position of a rank in the list of a step, and what it does for each op.

The list (``records.ops``) says what is launched, waited for and freed.  Compute is the
model's: calls of units, and autograd, *reach* their turns, which have to be the next of the
list.  A new kind of launch adds a ``Handling`` here, or in a file of its own, and a line to
``RUNS``.

[Note: Turns without compute]
Every rank takes every turn of the schedule and launches the same collectives.  A rank without
samples does nothing else in a turn.  A computing rank does nothing else in the backward turn
of a unit that autograd skipped because none of the unit's outputs were used, and in turns of
units for ragged arguments of which it has no rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardhet.comm.channel import progress
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitState
from shardhet.fsdp.step.around import Activity, Observers
from shardhet.records.ops import Op, OpKind, ops_of
from shardhet.records.schedule import (
    GATHER,
    REDUCE,
    LaunchKind,
    Phase,
    Schedule,
    make_schedule,
    rest_of_step,
)


@dataclass(frozen=True, slots=True)
class Handling:
    """What a rank does for one kind of launch."""

    launch: Callable[[FSDPUnit], None]
    wait: Callable[[FSDPUnit], None]  # until its result may be used
    waiting: Activity  # what observers are told of the wait


RUNS: dict[LaunchKind, Handling] = {
    GATHER: Handling(FSDPUnit.unshard, FSDPUnit.wait_for_unshard, Activity.WAIT_GATHER),
    REDUCE: Handling(FSDPUnit.reduce, FSDPUnit.finish_reduce, Activity.WAIT_REDUCE),
}


END_OF_FORWARD = -1  # in place of a unit
BEGUN_BY_OTHERS = (*Phase, OpKind.AGREE, OpKind.STEP)


class ScheduleExecutor:
    """Takes a rank through the list of the step in progress."""

    def __init__(
        self,
        units: Sequence[FSDPUnit],
        root: FSDPUnit,
        *,
        comm: CommContext,
        observers: Observers,
    ) -> None:
        self._units = tuple(units)
        self._root = root
        # Unsharded for the whole step: the root, and units that code outside of them reads.
        self.always_unsharded = [root]
        self._comm = comm
        self._observers = observers
        self.schedule = make_schedule((), trainable_units=frozenset())
        self.base: Schedule | None = None  # that the round in progress follows
        self._ops: tuple[Op, ...] = ()
        self._at = 0  # the next op
        self.cursor = 0  # the turn in progress, or the next one
        self._first = 0  # the first turn of the round
        self._end = 0  # where the backward in progress ends
        self.is_behind = False  # it passes over turns of forward in which it calls nothing
        self._launched: list[tuple[LaunchKind, FSDPUnit]] = []  # nobody has waited for them
        self._then: list[Callable[[], None]] = []  # what to do when all of it is finished
        # Makes room for a message, receives or sends it, on a rank of a pipeline.
        self.hand_over: Callable[[Op], None] | None = None

    # Forward #

    def begin(
        self, schedule: Schedule, round_index: int = 0, always_unsharded: Iterable[int] = ()
    ) -> None:
        """Follow this schedule from the round that comes next on.

        If the rounds before followed another one, the rest of the step is laid out anew.
        """
        before = (i for i, unit in enumerate(self._units) if unit in self.always_unsharded)
        rest, always_unsharded = schedule, frozenset((*always_unsharded, *before))
        if round_index and schedule is not self.base:
            unreduced = self.schedule.unreduced_at(self.cursor) - always_unsharded
            rest = rest_of_step(schedule, round_index, unreduced, always_unsharded)
            self._reshard(self._units)
        for index in sorted(always_unsharded):
            self.take_in(self._units[index])
            if self._units[index] not in self.always_unsharded:
                self.always_unsharded.append(self._units[index])
        if not round_index or schedule is not self.base:
            self.lay_out(rest)
            self.base = schedule

    def lay_out(self, schedule: Schedule, *place: Any, in_one_order: bool = False) -> None:
        """Begin a step, or what is left of one, and do what comes before its first turn.

        ``place`` is the stage and what is in flight, as of ``ops_of``.
        """
        self.finish()  # of the rounds before
        self.schedule = self.base = schedule
        self._ops = ops_of(schedule, *place, in_one_order=in_one_order)
        self._at = self.cursor = 0
        self.go_on()

    def begin_round(self) -> None:
        """Begin the forward of the next round, and its first gathers, on all ranks together."""
        self._first = self.cursor
        self.go_on()
        while self._ops[self._at].kind is OpKind.AGREE:
            self._at += 1
        self.go_on()

    def expect(self, unit_index: int, needs_backward: bool) -> tuple[int, bool]:
        """The segment of a visit of the unit now, and whether the visit needs a backward.

        Raises ``RuntimeError`` if the schedule has another visit at this place, or one without
        a backward although this visit needs one.
        """
        turns, segments = self.schedule.turns, self.schedule.segments
        stop = self._first + len(segments)
        while self.is_behind and self.cursor < stop and turns[self.cursor].unit != unit_index:
            self._pass_until(self.cursor + 1)
        segment, has_backward, expected = self.cursor - self._first, False, END_OF_FORWARD
        if self.cursor < stop:
            expected, has_backward = segments[segment].unit, segments[segment].needs_backward
        if unit_index != expected:
            pair = self._name(unit_index), self._name(expected)
            raise RuntimeError(OTHER_ORDER.format(*pair, segment))
        if needs_backward and not has_backward:
            raise RuntimeError(_NEEDS_BACKWARD.format(self._name(unit_index)))
        return segment, has_backward

    def _name(self, unit: int) -> str:
        return self._units[unit].fqn if unit >= 0 else "(end of forward)"

    def end_forward(self) -> None:
        """Raise ``RuntimeError`` if a computing rank has left out visits."""
        if self.is_behind:
            self.pass_forward()
        segment = self.cursor - self._first
        if segment < len(self.schedule.segments):
            missing = self.schedule.segments[segment].unit
            raise RuntimeError(_ENDS_EARLY.format(self._name(missing)))

    def pass_forward(self) -> None:
        """Take the turns of forward on a rank without samples."""
        self._pass_until(self._first + len(self.schedule.segments))

    # Turns #

    def go_on(self) -> None:
        """Do what comes before the next turn, or the next meeting of all ranks."""
        while (op := self._ops[self._at]).kind not in BEGUN_BY_OTHERS:
            self._do(op)

    def _do(self, op: Op) -> None:
        if op.after:
            self._wait_before(op)
        if isinstance(op.kind, LaunchKind):
            self._launch(op.kind, self._units[op.unit])
        elif op.stage_transfer is not None:
            assert self.hand_over is not None
            self.hand_over(op)
        self._at += 1

    def begin_turn(self) -> None:
        """Do what comes before this turn, and wait for what it needs."""
        turn = self.schedule.turns[self.cursor]
        unit = self._units[turn.unit]
        progress.mark(f"{turn.phase.value} of unit {unit.fqn!r}")
        self.go_on()
        op = self._ops[self._at]
        assert (op.kind, op.unit) == (turn.phase, turn.unit), f"{op} is next, not {turn}"
        if op.after:
            self._wait_before(op)
        if turn.phase is Phase.BACKWARD:
            unit.begin_backward()
        self._at += 1

    def take_in(self, unit: FSDPUnit) -> None:
        """Unshard a unit that stays, and wait for its parameters."""
        self._launch(GATHER, unit)
        self._wait(GATHER, unit)

    def end_turn(self) -> None:
        """Reshard and launch what the turn says, and advance to the next one."""
        turn = self.schedule.turns[self.cursor]
        if turn.reshards:
            self._units[turn.unit].reshard()
        for _ in turn.after:
            self._do(self._ops[self._at])
        progress.mark(f"{turn.phase.value} outside of units")
        self.cursor += 1

    def _pass_until(self, cursor: int) -> None:
        """See [Note: Turns without compute]."""
        while self.cursor < cursor:
            self.begin_turn()
            self.end_turn()

    # Backward #

    def begin_backward(self) -> None:
        """Let the units that stay accumulate gradients from now on."""
        segments = self.schedule.segments
        self._end = self.cursor + sum(segment.needs_backward for segment in segments)
        if self._ops[self._at].kind is OpKind.AGREE:
            self._at += 1
        for unit in self.always_unsharded:
            unit.begin_backward()

    def reach(self, segment: int) -> None:
        """Begin the backward turn of a segment; take the turns that autograd skipped."""
        while self.schedule.turns[self.cursor].segment != segment:
            self._pass_until(self.cursor + 1)
        self.begin_turn()

    def end_backward(self) -> None:
        """Take the remaining turns of the round."""
        self._pass_until(self._end)

    def reduce_rest(self) -> None:
        """Launch the reductions that no turn is left for, the root's last, which is in flight
        then: who needs it calls ``finish``.
        """
        self.go_on()
        for unit in reversed(self.always_unsharded):
            if unit.is_trainable:
                self.finish()
                self._launch(REDUCE, unit)

    def when_finished(self, do: Callable[[], None]) -> None:
        """Call ``do`` at the end of the next ``finish()``, once."""
        self._then.append(do)

    def finish(self) -> None:
        """Finish what is in flight."""
        while self._launched:
            self._wait(*self._launched[0])
        then, self._then = self._then, []
        for do in then:
            do()

    def _launch(self, kind: LaunchKind, unit: FSDPUnit) -> None:
        RUNS[kind].launch(unit)
        self._launched.append((kind, unit))

    def _wait_before(self, op: Op) -> None:
        for i in op.after:
            each = self._ops[i]
            if isinstance(each.kind, LaunchKind):  # messages are waited for by who needs them
                self._wait(each.kind, self._units[each.unit])

    def _wait(self, kind: LaunchKind, unit: FSDPUnit) -> None:
        if (kind, unit) in self._launched:
            run = RUNS[kind]
            with self._observers.watch(unit.fqn, run.waiting):
                run.wait(unit)
            self._launched.remove((kind, unit))

    # Between steps #

    def end_step(self) -> None:
        """Reshard what stayed and wait until no peer reads this rank's shards any more."""
        for unit in self.always_unsharded:
            unit.reshard()
        del self.always_unsharded[1:]
        self._comm.wait_all_sent()

    def abandon(self) -> None:
        """End a step without its backward: nothing stays in flight, everything is sharded."""
        if self._then:  # of the step before, whose backward has ended
            self.finish()
        self._reshard((*self._units, self._root))
        for unit in (*self._units, self._root):
            unit.drop_grads()
        del self.always_unsharded[1:]
        self._launched.clear()
        self._comm.wait_all_sent()

    def gather_anew(self) -> None:
        """Let the round that comes next gather what earlier ones have left unsharded."""
        self.finish()
        self._reshard((*self._units, self._root))
        self.base = None

    def _reshard(self, units: Sequence[FSDPUnit]) -> None:
        for unit in units:
            if unit.state is not UnitState.SHARDED:
                unit.reshard()


OTHER_ORDER = (
    "model(...): unit {0!r} was called at place {2} of forward, where {1!r} was when the order "
    "was found. Call the units in the same order at every step, or let a flag (True or False) "
    "among the model's attributes or arguments choose the order."
)
_NEEDS_BACKWARD = (
    "model(...): unit {!r} needs a backward now, unlike when the order was found. Freeze and "
    "unfreeze parameters before HetFSDP."
)
_ENDS_EARLY = (
    "model(...): forward ended before unit {!r} was called, as it was when the order was "
    "found. Call the units in the same order at every step."
)
