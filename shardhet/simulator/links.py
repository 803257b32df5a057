"""The links of a simulated cluster: one collective at a time, in the order of launches."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardhet.records.schedule import MAX_REDUCTIONS_IN_FLIGHT, Schedule
from shardhet.simulator.timeline import Event, Work


@dataclass
class Collective:
    """One gather or reduction, from its first launch to its end."""

    work: Work
    unit: int
    seconds: float
    num_launched: int = 0  # by so many actors
    is_done: bool = False


class Links:
    """All collectives of a step; each starts when all ranks have launched it.

    A collective also waits for those that were launched before it on its stream, and for the
    links, which gathers and reductions share.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        gather_s: Sequence[float],  # by unit
        reduce_s: Sequence[float],  # by unit
        unit_fqns: Sequence[str],
        num_actors: int,
    ) -> None:
        launches = schedule.launches()
        self.gathers = {
            each.turn: Collective(Work.GATHER, each.unit, gather_s[each.unit])
            for each in launches
            if each.kind == "gather"
        }
        self.reductions = {
            each.turn: Collective(Work.REDUCE, each.unit, reduce_s[each.unit])
            for each in launches
            if each.kind == "reduce"
        }
        self.sent: list[Event] = []
        self.running: Collective | None = None
        self.remaining_s = 0.0  # of the running one
        self.has_ended = False  # one has, since this was last set to False
        self._since_s = 0.0
        self._queues = (deque(self.gathers.values()), deque(self.reductions.values()))
        # Reductions end in the order in which they are launched.
        self._place = {turn: i for i, turn in enumerate(self.reductions)}
        self._num_reduced = 0
        self._unit_fqns = unit_fqns
        self._num_actors = num_actors

    def start(self, now_s: float) -> bool:
        """Run the next collective that all have launched; returns whether there is one."""
        if self.running:
            return False
        for queue in self._queues:
            if queue and queue[0].num_launched == self._num_actors:
                self.running = queue.popleft()
                self.remaining_s = self.running.seconds
                self._since_s = now_s
                if self.remaining_s == 0:
                    self._finish(now_s)
                return True
        return False

    def pass_time(self, seconds: float, now_s: float) -> None:
        """Move the running collective on by ``seconds``, which end ``now_s``."""
        if self.running:
            self.remaining_s -= seconds
            if self.remaining_s <= 1e-12 * now_s:
                self._finish(now_s)

    def has_room_for_reduction(self, turn: int) -> bool:
        """Whether few enough reductions of turns before this one are in flight."""
        return self._place[turn] - self._num_reduced < MAX_REDUCTIONS_IN_FLIGHT

    @property
    def has_reduced(self) -> bool:
        """Whether all reductions are done."""
        return self._num_reduced == len(self.reductions)

    def _finish(self, now_s: float) -> None:
        assert self.running is not None
        self.running.is_done = self.has_ended = True
        self._num_reduced += self.running.work is Work.REDUCE
        unit = self._unit_fqns[self.running.unit]
        self.sent.append(
            Event(unit=unit, work=self.running.work, start_s=self._since_s, end_s=now_s)
        )
        self.running = None
