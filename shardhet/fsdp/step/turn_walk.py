"""The position of a rank in the turns of a step, and what it does at each turn.

[Note: Turns without compute]
Every rank takes every turn of the schedule and launches the same collectives.  A rank without
samples does nothing else in a turn.  A computing rank does nothing else in the backward turn
of a unit that autograd skipped because none of the unit's outputs were used, and in turns of
units for ragged arguments of which it has no rows.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from shardhet.comm.progress import progress
from shardhet.fsdp.probing.order import VisitOrder
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitState
from shardhet.fsdp.step.launches import RUNS
from shardhet.fsdp.step.observer import Observers
from shardhet.records.schedule import (
    GATHER,
    REDUCE,
    LaunchKind,
    Phase,
    Schedule,
    Turn,
    rest_of_step,
)


class TurnWalk:
    """Takes a rank through the turns of the step in progress."""

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
        self.staying = [root]
        self._comm = comm
        self._observers = observers
        self._order = VisitOrder([unit.fqn for unit in units])
        self._base: Schedule | None = None  # that the round in progress follows
        self._first = 0  # the first turn of the round
        self.is_behind = False  # it passes over turns of forward in which it calls nothing
        self._end = 0  # where the backward in progress ends
        self._cursor = 0  # the turn in progress, or the next one
        self._last_launched = -1  # the latest turn for which it has launched
        # Launched after turns and not finished, in order.
        self._in_flight: defaultdict[LaunchKind, deque[FSDPUnit]] = defaultdict(deque)

    # Forward #

    def begin(
        self, schedule: Schedule, round_index: int = 0, staying: Iterable[int] = ()
    ) -> None:
        """Begin the forward of a round with this schedule and launch its first gathers.

        If the rounds before followed another one, the rest of the step is laid out anew.
        """
        rest, staying = schedule, frozenset(staying) | self._staying_units
        if round_index and schedule is not self._base:
            owed = self._order.schedule.owed_at(self._cursor) - staying
            rest = rest_of_step(schedule, round_index, owed, staying)
            self._reshard(self._units)
        for index in sorted(staying):
            self.take_in(self._units[index])
            if self._units[index] not in self.staying:
                self.staying.append(self._units[index])
        if not round_index or schedule is not self._base:
            self._order.schedule, self._base = rest, schedule
            self._cursor, self._last_launched = 0, -1
        self._first = self._cursor
        self.launch_ahead()

    @property
    def _staying_units(self) -> frozenset[int]:
        return frozenset(i for i, unit in enumerate(self._units) if unit in self.staying)

    def expect(self, unit_index: int, needs_backward: bool) -> tuple[int, bool]:
        """The segment of a visit of the unit now, and whether the visit needs a backward.

        Raises ``RuntimeError`` if the schedule has a different visit at this place.
        """
        segments = self._order.schedule.segments
        stop = self._first + len(segments)
        while self.is_behind and self._cursor < stop and self._turn.unit != unit_index:
            self._pass_until(self._cursor + 1)
        segment = self._cursor - self._first
        return segment, self._order.expect(segment, unit_index, needs_backward)

    def end_forward(self) -> None:
        """Raise ``RuntimeError`` if a computing rank has left out visits."""
        if self.is_behind:
            self.pass_forward()
        self._order.end_visits(self._cursor - self._first)

    def pass_forward(self) -> None:
        """Take the turns of forward on a rank without samples."""
        self._pass_until(self._first + len(self._order.schedule.segments))

    # Turns #

    @property
    def _turn(self) -> Turn:
        return self._order.schedule.turns[self._cursor]

    def begin_turn(self) -> None:
        """Launch what this turn and the next need, and wait for what this one needs."""
        turn = self._turn
        unit = self._units[turn.unit]
        progress.mark(f"{turn.phase.value} of unit {unit.fqn!r}")
        self.launch_ahead()
        for kind in turn.ahead:
            self._wait(kind, unit)
        if turn.phase is Phase.BACKWARD:
            self._begin_backward(unit)

    def launch_ahead(self) -> None:
        """Launch what this turn and the next need, unless it is launched already."""
        before = self._last_launched
        for launch in self._order.schedule.launched_by(self._cursor):
            if launch.turn > before:
                RUNS[launch.kind].launch(self._units[launch.unit])
                self._last_launched = launch.turn

    def take_in(self, unit: FSDPUnit) -> None:
        """Unshard a unit that stays, and wait for its parameters."""
        RUNS[GATHER].launch(unit)
        self._wait(GATHER, unit)

    def end_turn(self) -> None:
        """Reshard and launch what the turn says, and advance to the next one."""
        turn = self._turn
        unit = self._units[turn.unit]
        if turn.reshards:
            unit.reshard()
        for kind in turn.after:
            self._launch_after(kind, unit)
        progress.mark(f"{turn.phase.value} outside of units")
        self._cursor += 1

    def _pass_until(self, cursor: int) -> None:
        """See [Note: Turns without compute]."""
        while self._cursor < cursor:
            self.begin_turn()
            self.end_turn()

    # Backward #

    def begin_backward(self) -> None:
        """Let the units that stay accumulate gradients from now on."""
        segments = self._order.schedule.segments
        self._end = self._cursor + sum(segment.needs_backward for segment in segments)
        for unit in self.staying:
            self._begin_backward(unit)

    def _begin_backward(self, unit: FSDPUnit) -> None:
        for kind, units in self._in_flight.items():
            while unit in units:  # its gradients of the round before
                self._wait(kind, units.popleft())
        unit.begin_backward()

    def reach(self, segment: int) -> None:
        """Begin the backward turn of a segment; take the turns that autograd skipped."""
        while self._turn.segment != segment:
            self._pass_until(self._cursor + 1)
        self.begin_turn()

    def end_backward(self) -> None:
        """Take the remaining turns of the round."""
        self._pass_until(self._end)

    def reduce_rest(self) -> None:
        """Launch the reductions that no turn is left for, the root's last, and finish all."""
        for launch in self._order.schedule.launched_last():
            self._launch_after(launch.kind, self._units[launch.unit])
        for unit in reversed(self.staying):
            if unit.is_trainable:
                self._launch_after(REDUCE, unit)
        self.finish()

    def finish(self) -> None:
        """Finish what is in flight."""
        for kind, units in self._in_flight.items():
            while units:
                self._wait(kind, units.popleft())

    def _launch_after(self, kind: LaunchKind, unit: FSDPUnit) -> None:
        units = self._in_flight[kind]
        while kind.max_in_flight is not None and len(units) >= kind.max_in_flight:
            self._wait(kind, units.popleft())
        RUNS[kind].launch(unit)
        units.append(unit)

    def _wait(self, kind: LaunchKind, unit: FSDPUnit) -> None:
        run = RUNS[kind]
        with self._observers.watch(unit.fqn, run.waiting):
            run.wait(unit)

    # Between steps #

    def end_step(self) -> None:
        """Reshard what stayed and wait until no peer reads this rank's shards any more."""
        for unit in self.staying:
            unit.reshard()
        del self.staying[1:]
        self._comm.wait_all_sent()

    def abandon(self) -> None:
        """End a step without its backward: nothing stays in flight, everything is sharded."""
        self._reshard((*self._units, self._root))
        for unit in (*self._units, self._root):
            unit.drop_grads()
        del self.staying[1:]
        self._in_flight.clear()
        self._comm.wait_all_sent()

    def _reshard(self, units: Sequence[FSDPUnit]) -> None:
        for unit in units:
            if unit.state is not UnitState.SHARDED:
                unit.reshard()
