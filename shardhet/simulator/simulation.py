"""Simulate one step of a plan, event by event: compute, waits, collectives and memory.

Ranks go through the turns of ``shardhet.records.schedule``, as in the runtime:

    begin turn   launch what it and the next turn need; wait for its own
    compute      all microbatches; slowed by ``overlap_excess`` during a transfer
    end turn     if something is launched after it, such as the reduction of complete
                 gradients: wait until the earlier ones leave room for one more in flight
    between      all ranks agree between phases, and after the last transfer

A transfer starts when all ranks have launched it, its resource is free, and the transfers of
its kind that were launched before it are done.  Gathers and reductions share the links.

Ranks that compute the same are simulated once (``simulator.actors``).  The loop finds the next
thing to end and moves the clock there.  Only ranks whose computation has ended, or who wait for
what has ended, are then looked at; each goes on as far as it can, one state after the other.
"""

import numpy as np

from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan
from shardhet.records.schedule import Phase, straight_schedule
from shardhet.simulator.actors import WAITING_STATES, Actor, State, make_actors
from shardhet.simulator.links import Links
from shardhet.simulator.timeline import (
    Event,
    MemoryPoint,
    RankTimeline,
    Timeline,
    Work,
    merged,
)

NEGLIGIBLE = 1e-12  # of the clock: what remains of a computation is then rounding


def simulate(plan: Plan, setting: Setting) -> Timeline:
    """The predicted timeline of one optimizer step."""
    model = CostModel(setting).for_plan(plan)
    return _Simulation(model, plan).run()


class _Simulation:
    """The state of the simulation: the clock, the links and all actors."""

    def __init__(self, model: CostModel, plan: Plan) -> None:
        self.model = model
        self.plan = plan
        self.clock_s = 0.0
        units = model.visited_units
        self.schedule = straight_schedule(len(units), plan.form)
        self.ahead = [self.schedule.launched_by(i) for i in range(len(self.schedule.turns))]
        self.predicted = model.predict(plan)
        self.actors = make_actors(model, plan, self.schedule)
        self.links = Links(
            self.schedule,
            model.launch_seconds(plan),
            unit_fqns=[unit.fqn for unit in units],
            num_actors=len(self.actors),
        )
        # By actor: seconds of computation that remain at full speed; inf if it does not
        # compute.  A speed is negative if moving the data costs the processor more time than
        # the collective lasts: compute then has more left to do when the collective ends.
        self.remaining_s = np.full(len(self.actors), np.inf)
        excess = np.array([actor.overlap_excess for actor in self.actors])
        self.speeds = {False: np.ones(len(self.actors)), True: 1.0 - excess}
        self.is_slowed = {False: False, True: bool((excess >= 1).any())}
        # By turn before which all ranks agree: between phases, between rounds, at the end.
        places = range(len(self.schedule.turns) + 1)
        self.num_arrived = {i: 0 for i in places if self.schedule.is_border(i)}
        self.has_news = False  # those who wait have to look again

    def run(self) -> Timeline:
        """Run until every rank is done; returns the timeline."""
        for actor in self.actors:
            actor.hold(0.0, actor.resting_bytes, actor.numel_bytes[0])
        start_s = self.run_turns()
        self.clock_s += max(rank.optimizer_s for rank in self.predicted.ranks)
        for actor in self.actors:
            actor.hold(start_s, actor.resting_bytes, actor.numel_bytes[-1])
            actor.hold(self.clock_s, actor.resting_bytes, actor.numel_bytes[0])
        ranks: dict[tuple[int, float], RankTimeline] = {}
        by_position: list[RankTimeline | None] = [None] * self.plan.world_size
        for i, actor in enumerate(self.actors):
            for position in actor.positions:
                optimizer_s = self.predicted.ranks[position].optimizer_s
                stored_numel = self.predicted.ranks[position].stored_numel
                if (i, optimizer_s) not in ranks:
                    ranks[i, optimizer_s] = actor.timeline(
                        start_s,
                        start_s + optimizer_s,
                        self.clock_s,
                        stored_numel=stored_numel,
                    )
                by_position[position] = ranks[i, optimizer_s]
        return Timeline(
            ranks=tuple(each or self.of_idle(i) for i, each in enumerate(by_position)),
            collectives=merged(self.links.sent),
            step_time_s=self.clock_s,
        )

    def of_idle(self, position: int) -> RankTimeline:
        """What a rank without samples and rows does: it waits for the end of the step."""
        kind = self.model.cluster.devices[position].kind
        end = Event(unit="", work=Work.AGREE, start_s=0.0, end_s=self.clock_s)
        held_bytes = self.model.profile.device(kind).reserved_bytes
        return RankTimeline(
            name=kind or "device",
            events=merged([end]),
            memory=(MemoryPoint(time_s=0.0, nbytes=held_bytes),),
        )

    # The loop #

    def run_turns(self) -> float:
        """Run until all ranks have agreed after the last reduction; returns the time."""
        going: list[Actor] = list(self.actors)
        while True:
            self.settle(going)
            if all(actor.state is State.OPTIMIZE for actor in self.actors):
                return self.clock_s
            going = self.pass_time()

    def settle(self, going: list[Actor]) -> None:
        """Do everything that can happen without time passing; ``going`` may go on.

        All actors leave at most one state before the links are looked at again.
        """
        while True:
            has_started = self.links.start(self.clock_s)
            if self.has_news or self.links.has_ended:
                self.has_news = self.links.has_ended = False
                going = self.with_waiting(going)
            going = [actor for actor in going if self.advance(actor)]
            if not (has_started or going or self.has_news or self.links.has_ended):
                return

    def with_waiting(self, going: list[Actor]) -> list[Actor]:
        """Those that go on and those that wait for others, in order."""
        goes = {actor.index for actor in going}
        return [a for a in self.actors if a.index in goes or a.state in WAITING_STATES]

    def pass_time(self) -> list[Actor]:
        """Move the clock to the next end of a computation or of a collective.

        Returns the actors whose computation has ended.
        """
        is_sending = bool(self.links.running)
        speeds = self.speeds[is_sending]
        if not is_sending:
            ends_s = self.remaining_s
        elif self.is_slowed[is_sending]:
            ends_s = np.full(len(speeds), np.inf)
            np.divide(self.remaining_s, speeds, out=ends_s, where=speeds > 0)
        else:
            ends_s = self.remaining_s / speeds
        step_s = float(ends_s.min())
        if is_sending:
            step_s = min(step_s, self.links.remaining_s)
        if step_s == np.inf:
            states = [actor.state.name for actor in self.actors]
            raise RuntimeError(f"simulate: ranks wait for each other forever: {states}.")
        self.clock_s += step_s
        self.remaining_s -= step_s * speeds
        np.maximum(self.remaining_s, 0.0, out=self.remaining_s)
        ended = np.flatnonzero(self.remaining_s <= NEGLIGIBLE * self.clock_s)
        self.links.pass_time(step_s, self.clock_s)
        self.remaining_s[ended] = np.inf
        actors = [self.actors[i] for i in ended.tolist()]
        for actor in actors:
            actor.is_computing = False
        return actors

    # One rank #

    def advance(self, actor: Actor) -> bool:
        """Leave the rank's state if it can; returns whether it could."""
        state = actor.state
        if actor.is_computing:
            return False
        if state is State.BEGIN:
            self.launch_ahead(actor)
            overhead_s = self.model.profile.turn_overhead_s
            if overhead_s > 0:
                self.enter(actor, State.PREPARE, overhead_s)
            else:
                self.enter(actor, State.WAIT_GATHER)
                self.begin_compute(actor)
        elif state is State.PREPARE:
            actor.leave(self.clock_s, Work.OVERHEAD)
            self.enter(actor, State.WAIT_GATHER)
            self.begin_compute(actor)
        elif state is State.WAIT_GATHER:
            return self.begin_compute(actor)
        elif state is State.COMPUTE:
            turn = self.schedule.turns[actor.turn]
            is_forward = turn.phase is Phase.FORWARD
            actor.leave(self.clock_s, Work.FORWARD if is_forward else Work.BACKWARD)
            actor.end_compute(self.clock_s)
            if turn.after:
                self.enter(actor, State.WAIT_REDUCE)
            else:
                self.end_turn(actor)
        elif state is State.WAIT_REDUCE:
            launches = self.schedule.launched_after(actor.turn)
            if not all(map(self.links.has_room, launches)):
                return False
            actor.leave(self.clock_s, Work.WAIT_REDUCE)
            for launch in launches:
                self.links.transfers[launch].num_launched += 1
            self.end_turn(actor)
        elif state is State.FLUSH:
            if not self.links.are_done:
                return False
            actor.leave(self.clock_s, Work.WAIT_REDUCE)
            self.enter(actor, State.AGREE)
        else:
            return state is State.AGREE and self.agree(actor)
        return True

    def begin_compute(self, actor: Actor) -> bool:
        """Compute the turn if what was launched for it is there; returns whether it is."""
        launches = self.ahead[actor.turn]
        if not all(self.links.transfers[x].is_done for x in launches if x.turn == actor.turn):
            return False
        actor.leave(self.clock_s, Work.WAIT_GATHER)
        actor.begin_compute(self.clock_s)
        self.enter(actor, State.COMPUTE, actor.seconds[actor.turn])
        return True

    def end_turn(self, actor: Actor) -> None:
        """Go on to the next turn, or to what comes between phases."""
        actor.turn += 1
        if actor.turn in self.num_arrived:
            self.num_arrived[actor.turn] += 1
            self.has_news |= self.num_arrived[actor.turn] == len(self.actors)
        if actor.turn == len(self.schedule.turns):
            self.enter(actor, State.FLUSH)
        elif actor.turn in self.num_arrived:
            if self.schedule.turns[actor.turn].phase is Phase.BACKWARD:
                self.launch_ahead(actor)  # overlaps the exchange of the loss
            self.enter(actor, State.AGREE)
        else:
            self.enter(actor, State.BEGIN)

    def agree(self, actor: Actor) -> bool:
        """Go on if every rank has come this far; returns whether it has."""
        if self.num_arrived[actor.turn] < len(self.actors):
            return False
        actor.leave(self.clock_s, Work.AGREE)
        is_last = actor.turn == len(self.schedule.turns)
        self.enter(actor, State.OPTIMIZE if is_last else State.BEGIN)
        return True

    def launch_ahead(self, actor: Actor) -> None:
        """Launch what this turn and the next need, unless already launched."""
        launches = [x for x in self.ahead[actor.turn] if x.turn > actor.last_launched]
        for launch in launches:
            self.links.transfers[launch].num_launched += 1
            actor.last_launched = launch.turn

    def enter(self, actor: Actor, state: State, seconds: float = 0.0) -> None:
        """Enter a state now, which ends when a computation of ``seconds`` does."""
        actor.state = state
        actor.since_s = self.clock_s
        if seconds > 0:
            actor.is_computing = True
            self.remaining_s[actor.index] = seconds
