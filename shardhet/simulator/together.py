"""The time of a simulated step and how long each rank is busy, without a record of either.

The steps are those of ``simulation``, for many unlike ranks.  Ranks affect each other through
the links and barriers alone, so between two moments at which a collective starts or ends, each
goes on by itself at a constant speed.  All ranks go from one of these moments to the next
together, as arrays.  Where the links are idle, the next moment is when the last rank launches a
collective: copies of the ranks go on without an end to find it.
"""

from copy import copy
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan
from shardhet.records.schedule import MAX_REDUCTIONS_IN_FLIGHT, Schedule, straight_schedule
from shardhet.simulator.actors import Actor, State, make_actors

NEGLIGIBLE = 1e-12  # of the clock: what remains of a computation is then rounding
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a step takes, and for how much of it each rank computes."""

    step_time_s: float
    busy_s: tuple[float, ...]  # by position


def step_times(plan: Plan, setting: Setting) -> StepTimes:
    """The times of one optimizer step, as ``simulation.simulate`` has them."""
    model = CostModel(setting, plan.reshard_after_forward)
    schedule = straight_schedule(
        len(model.visited_units), reshard_after_forward=plan.reshard_after_forward
    )
    actors = make_actors(model, plan, schedule, keeps_records=False)
    gather_s, reduce_s = model.unit_collectives(plan)
    ranks = _Ranks(actors, schedule, overhead_s=model.profile.turn_overhead_s)
    _Links(schedule, gather_s, reduce_s).run(ranks)
    busy_s = [rank.optimizer_s for rank in model.predict(plan).ranks]
    step_s = float(ranks.now_s.max()) + max(busy_s)
    for actor, computing_s in zip(actors, ranks.busy_s.tolist(), strict=True):
        for position in actor.positions:
            busy_s[position] += computing_s
    return StepTimes(step_s, tuple(busy_s))


class _Ranks:
    """Where every rank is, by its own clock, and what it has launched so far."""

    def __init__(self, actors: list[Actor], schedule: Schedule, *, overhead_s: float) -> None:
        number, turns = len(actors), schedule.turns
        self.num_turns, self.num_forward = len(turns), schedule.num_forward
        self.overhead_s = overhead_s
        self.seconds = np.array([actor.seconds for actor in actors])  # [ranks, turns]
        self.slowed = 1.0 - np.array([actor.overlap_excess for actor in actors])
        # Turn T is the end of the step.
        self.gathers = np.array([*(turn.gathers for turn in turns), False])
        self.ahead = [
            [each.turn for each in schedule.gathers_by(i)] for i in range(self.num_turns)
        ]
        reduces = np.array([*(turn.reduces for turn in turns), False])
        # The number of the reduction after each turn; -1 if there is none.
        self.place = np.where(reduces, np.cumsum(reduces) - 1, -1)
        # What is shared: when collectives ended, gathers by turn, reductions in order.
        self.gathered_s = np.full(self.num_turns + 1, inf)
        self.reduced_s: list[float] = []
        # [ranks] the state of each.
        self.state = np.full(number, State.BEGIN.value)
        self.turn = np.zeros(number, dtype=np.int64)
        self.now_s = np.zeros(number)
        self.remaining_s = np.zeros(number)  # of what it computes, at full speed
        self.busy_s = np.zeros(number)
        # When each was launched, inf if it was not: gathers by turn, reductions in order.
        self.gather_s = np.full((self.num_turns + 1, number), inf)
        self.reduce_s = np.full((int(reduces.sum()), number), inf)

    def tried(self) -> "_Ranks":
        """A copy that may go on without effect on these ranks."""
        other = copy(self)
        for name in ("state", "turn", "now_s", "remaining_s", "busy_s", "gather_s", "reduce_s"):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def is_done(self) -> bool:
        """Whether the turns of all ranks are over."""
        return bool((self.state == State.OPTIMIZE.value).all())

    def go_on(self, until_s: float, *, is_slowed: bool) -> None:
        """Let every rank do what it can until a moment; no collective starts or ends before."""
        moves = (
            (State.BEGIN, self._begin),
            (State.WAIT_GATHER, self._wait_gather),
            (State.WAIT_REDUCE, self._wait_reduce),
            (State.FLUSH, self._flush),
        )
        stopped = np.zeros(len(self.now_s), dtype=bool)
        speed = self.slowed if is_slowed else np.ones(len(self.slowed))
        while True:
            before = self.state.copy(), self.turn.copy()
            for state, move in moves:
                at = np.flatnonzero(self.state == state.value)
                if len(at):
                    move(at)
            for state in (State.PREPARE, State.COMPUTE):
                at = np.flatnonzero((self.state == state.value) & ~stopped)
                if len(at):
                    self._compute(at, state, until_s, speed, stopped)
            self._agree()
            is_same = (before[0] == self.state).all() and (before[1] == self.turn).all()
            if is_same:
                return

    def _begin(self, at: Ints) -> None:
        self._launch_ahead(at)
        if self.overhead_s > 0:
            self.state[at], self.remaining_s[at] = State.PREPARE.value, self.overhead_s
        else:
            self.state[at] = State.WAIT_GATHER.value

    def _launch_ahead(self, at: Ints) -> None:
        for cursor in np.unique(self.turn[at]).tolist():
            here = at[self.turn[at] == cursor]
            for turn in self.ahead[cursor]:
                self.gather_s[turn, here] = np.minimum(
                    self.gather_s[turn, here], self.now_s[here]
                )

    def _wait_gather(self, at: Ints) -> None:
        turn = self.turn[at]
        ready_s = np.where(self.gathers[turn], self.gathered_s[turn], 0.0)
        is_ready = ready_s < inf
        at, turn = at[is_ready], turn[is_ready]
        self.now_s[at] = np.maximum(self.now_s[at], ready_s[is_ready])
        self.state[at], self.remaining_s[at] = State.COMPUTE.value, self.seconds[at, turn]

    def _compute(
        self, at: Ints, state: State, until_s: float, speed: Floats, stopped: NDArray[np.bool_]
    ) -> None:
        now_s, remaining_s = self.now_s[at], self.remaining_s[at]
        # A speed is negative if moving the data takes more of the processor than there is.
        ends_s = np.full(len(at), inf)
        np.divide(remaining_s, speed[at], out=ends_s, where=speed[at] > 0)
        ends_s = np.where(remaining_s > 0, now_s + ends_s, now_s)
        has_ended = ends_s <= until_s * (1 + NEGLIGIBLE)
        reached_s = np.where(has_ended, ends_s, until_s)
        if state is State.COMPUTE:
            self.busy_s[at] += reached_s - now_s
        going = at[~has_ended]
        self.remaining_s[going] -= (speed[at] * (reached_s - now_s))[~has_ended]
        self.now_s[at] = reached_s
        stopped[going] = True
        at = at[has_ended]
        if state is State.PREPARE:
            self.state[at] = State.WAIT_GATHER.value
            return
        reduces = self.place[self.turn[at]] >= 0
        self.state[at[reduces]] = State.WAIT_REDUCE.value
        self._end_turn(at[~reduces])

    def _wait_reduce(self, at: Ints) -> None:
        place = self.place[self.turn[at]]
        is_ready = place - len(self.reduced_s) < MAX_REDUCTIONS_IN_FLIGHT
        at, place = at[is_ready], place[is_ready]
        if not len(at):
            return
        # The reductions that must be done before it are the first of these.
        ends_s = np.array([0.0, *self.reduced_s])
        needed = np.maximum(0, place - MAX_REDUCTIONS_IN_FLIGHT + 1)
        self.now_s[at] = np.maximum(self.now_s[at], ends_s[needed])
        self.reduce_s[place, at] = self.now_s[at]
        self._end_turn(at)

    def _end_turn(self, at: Ints) -> None:
        self.turn[at] += 1
        turn = self.turn[at]
        self.state[at] = State.BEGIN.value
        self.state[at[turn == self.num_turns]] = State.FLUSH.value
        between = at[turn == self.num_forward]
        if len(between) and self.num_forward < self.num_turns:
            self._launch_ahead(between)
            self.state[between] = State.AGREE.value

    def _flush(self, at: Ints) -> None:
        if len(self.reduced_s) == len(self.reduce_s):
            self.now_s[at] = np.maximum(self.now_s[at], max(self.reduced_s, default=0.0))
            self.state[at] = State.AGREE.value

    def _agree(self) -> None:
        if (self.state == State.AGREE.value).all():
            self.now_s[:] = self.now_s.max()
            is_last = self.turn[0] == self.num_turns
            self.state[:] = State.OPTIMIZE.value if is_last else State.BEGIN.value


class _Links:
    """One collective at a time, gathers before reductions, each in the order of launches."""

    def __init__(
        self, schedule: Schedule, gather_s: list[float], reduce_s: list[float]
    ) -> None:
        launches = schedule.launches()
        self.gathers = [
            (each.turn, gather_s[each.unit]) for each in launches if each.kind == "gather"
        ]
        self.reductions = [reduce_s[each.unit] for each in launches if each.kind == "reduce"]

    def run(self, ranks: _Ranks) -> None:
        """Run all collectives; the ranks are then done with their turns."""
        clock_s, gathered, reduced = 0.0, 0, 0
        while True:
            tried = ranks.tried()
            tried.go_on(inf, is_slowed=False)
            if tried.is_done:
                ranks.go_on(inf, is_slowed=False)
                return
            launched_s = [inf, inf]
            if gathered < len(self.gathers):
                launched_s[0] = float(tried.gather_s[self.gathers[gathered][0]].max())
            if reduced < len(self.reductions):
                launched_s[1] = float(tried.reduce_s[reduced].max())
            start_s = max(clock_s, min(launched_s))
            if start_s == inf:
                raise RuntimeError("simulate: ranks wait for each other for ever.")
            ranks.go_on(start_s, is_slowed=False)
            # A rank launches the reduction of a turn just before it begins the next one.
            is_gather = launched_s[0] <= start_s and not (
                launched_s[1] <= launched_s[0] == start_s
            )
            seconds = self.gathers[gathered][1] if is_gather else self.reductions[reduced]
            clock_s = start_s + seconds
            if seconds > 0:
                ranks.go_on(clock_s, is_slowed=True)
            if is_gather:
                ranks.gathered_s[self.gathers[gathered][0]] = clock_s
                gathered += 1
            else:
                ranks.reduced_s.append(clock_s)
                reduced += 1
