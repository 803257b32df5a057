"""The position of a rank in the turns of a step, and what it does at each turn.

[Note: Turns without compute]
Every rank takes every turn of the schedule and launches the same collectives.  A rank without
samples does nothing else in a turn.  A computing rank does nothing else in the backward turn
of a unit that autograd skipped because none of the unit's outputs were used.
"""

from collections import deque
from collections.abc import Sequence

from shardhet.comm.failure import Lifeline
from shardhet.fsdp.comm import CommContext
from shardhet.fsdp.observer import Activity, Observers
from shardhet.fsdp.order import VisitOrder
from shardhet.fsdp.unit import FSDPUnit, UnitState
from shardhet.records.schedule import MAX_REDUCTIONS_IN_FLIGHT, Phase, Schedule, Turn


class TurnWalk:
    """Takes a rank through the turns of the step in progress."""

    def __init__(
        self,
        units: Sequence[FSDPUnit],
        root: FSDPUnit,
        *,
        comm: CommContext,
        lifeline: Lifeline,
        observers: Observers,
    ) -> None:
        self._units = tuple(units)
        self._root = root
        self._comm = comm
        self._lifeline = lifeline
        self._observers = observers
        self._order = VisitOrder([unit.fqn for unit in units])
        self._cursor = 0  # the turn in progress, or the next one
        self._reductions: deque[FSDPUnit] = deque()

    # Forward #

    def begin(self, schedule: Schedule) -> None:
        """Begin a forward with this schedule and launch its first gathers."""
        self._order.begin(schedule)
        self._cursor = 0
        self.launch_ahead()

    def expect(self, unit_index: int, needs_backward: bool) -> tuple[int, bool]:
        """The segment of a visit of the unit now, and whether the visit needs a backward.

        Raises ``RuntimeError`` if the schedule has a different visit at this place.
        """
        return self._cursor, self._order.expect(self._cursor, unit_index, needs_backward)

    def end_forward(self) -> None:
        """Raise ``RuntimeError`` if a computing rank has left out visits."""
        self._order.end_visits(self._cursor)

    def pass_forward(self) -> None:
        """Take the turns of forward on a rank without samples."""
        self._pass_until(self._order.schedule.num_forward)

    # Turns #

    @property
    def _turn(self) -> Turn:
        return self._order.schedule.turns[self._cursor]

    def begin_turn(self) -> None:
        """Launch the next unit's gather and unshard the unit of this turn."""
        turn = self._turn
        unit = self._units[turn.unit]
        self._lifeline.doing = f"{turn.phase.value} of unit {unit.fqn!r}"
        self.launch_ahead()
        self.take_in(unit)
        if turn.phase is Phase.BACKWARD:
            unit.begin_backward()

    def launch_ahead(self) -> None:
        """Launch the gathers of this turn and the next, if they are not launched yet."""
        for launch in self._order.schedule.gathers_by(self._cursor):
            self._units[launch.unit].unshard()

    def take_in(self, unit: FSDPUnit) -> None:
        """Unshard ``unit``, which may be the root, and wait for its parameters."""
        unit.unshard()  # does nothing if the gather was launched ahead
        with self._observers.watch(unit.fqn, Activity.WAIT_GATHER):
            unit.wait_for_unshard()

    def end_turn(self) -> None:
        """Reshard and reduce if the turn says so, and advance to the next one."""
        turn = self._turn
        unit = self._units[turn.unit]
        if turn.reshards:
            unit.reshard()
        if turn.reduces:
            self._reduce(unit)
        self._lifeline.doing = f"{turn.phase.value} outside of units"
        self._cursor += 1

    def _pass_until(self, cursor: int) -> None:
        """See [Note: Turns without compute]."""
        while self._cursor < cursor:
            self.begin_turn()
            self.end_turn()

    # Backward #

    def reach(self, segment: int) -> None:
        """Begin the backward turn of a segment; take the turns that autograd skipped."""
        while self._turn.segment != segment:
            self._pass_until(self._cursor + 1)
        self.begin_turn()

    def end_backward(self) -> None:
        """Take the remaining turns and finish all reductions, the root's last."""
        self._pass_until(len(self._order.schedule.turns))
        if self._root.is_trainable:
            self._reduce(self._root)
        while self._reductions:
            self._finish_oldest_reduction()

    def _reduce(self, unit: FSDPUnit) -> None:
        # Finishing the oldest one first limits the live gradient buffers to those of two units.
        while len(self._reductions) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._finish_oldest_reduction()
        unit.reduce()
        self._reductions.append(unit)

    def _finish_oldest_reduction(self) -> None:
        unit = self._reductions.popleft()
        with self._observers.watch(unit.fqn, Activity.WAIT_REDUCE):
            unit.finish_reduce()

    # Between steps #

    def end_step(self) -> None:
        """Reshard the root and wait until no peer reads this rank's shards any more."""
        self._root.reshard()
        self._comm.wait_all_sent()

    def abandon(self) -> None:
        """End a step without its backward: nothing stays in flight, everything is sharded."""
        for unit in (*self._units, self._root):
            if unit.state is not UnitState.SHARDED:
                unit.reshard()
            unit.drop_grads()
        self._comm.wait_all_sent()
