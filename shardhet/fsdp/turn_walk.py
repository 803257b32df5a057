"""Where a rank is in the turns of a step, and what it does at each of them.

[Note: Turns without compute]
Every rank takes every turn of the schedule and launches the same collectives.  On a rank
without samples the turn is only that.  On a computing rank the same happens in backward to
a unit that autograd passed by, because nothing that it returned was used.
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
    """The walk of a rank over the turns of the step in progress."""

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
        """A forward with this schedule begins; its first gathers are launched."""
        self._order.begin(schedule)
        self._cursor = 0
        self.launch_ahead()

    def expect(self, unit_index: int, needs_backward: bool) -> tuple[int, bool]:
        """The segment that a visit of the unit now is, and whether it needs a backward.

        Raises ``RuntimeError`` where the schedule has another visit here.
        """
        return self._cursor, self._order.expect(self._cursor, unit_index, needs_backward)

    def end_forward(self) -> None:
        """Raise ``RuntimeError`` where a computing rank has left out visits."""
        self._order.end_visits(self._cursor)

    def pass_forward(self) -> None:
        """The forward of a rank without samples."""
        self._pass_until(self._order.schedule.num_forward)

    # Turns #

    @property
    def _turn(self) -> Turn:
        return self._order.schedule.turns[self._cursor]

    def begin_turn(self) -> None:
        """Have the turn's unit unsharded and the next one's gather on its way."""
        turn = self._turn
        unit = self._units[turn.unit]
        self._lifeline.doing = f"{turn.phase.value} of unit {unit.fqn!r}"
        self.launch_ahead()
        self.take_in(unit)
        if turn.phase is Phase.BACKWARD:
            unit.begin_backward()

    def launch_ahead(self) -> None:
        """Launch the gathers of this turn and the next, unless that has happened already."""
        for launch in self._order.schedule.gathers_by(self._cursor):
            self._units[launch.unit].unshard()

    def take_in(self, unit: FSDPUnit) -> None:
        """Have the unit's parameters, or the root's, unsharded."""
        unit.unshard()  # nothing if it was launched ahead
        with self._observers.watch(unit.fqn, Activity.WAIT_GATHER):
            unit.wait_for_unshard()

    def end_turn(self) -> None:
        """Reshard and reduce as the turn says, and go on to the next one."""
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
        """Autograd has come to a visit; turns before it have been passed by."""
        while self._turn.segment != segment:
            self._pass_until(self._cursor + 1)
        self.begin_turn()

    def end_backward(self) -> None:
        """Take the turns that are left, and have all gradients reduced, the root's last."""
        self._pass_until(len(self._order.schedule.turns))
        if self._root.is_trainable:
            self._reduce(self._root)
        while self._reductions:
            self._finish_oldest_reduction()

    def _reduce(self, unit: FSDPUnit) -> None:
        # Finishing the previous one first bounds the gradient buffers alive to two units'.
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
        """The root is sharded again and no peer reads this rank's shards any more."""
        self._root.reshard()
        self._comm.wait_all_sent()

    def abandon(self) -> None:
        """Leave a step whose backward never came: nothing in flight, everything sharded."""
        for unit in (*self._units, self._root):
            if unit.state is not UnitState.SHARDED:
                unit.reshard()
            unit.drop_grads()
        self._comm.wait_all_sent()
