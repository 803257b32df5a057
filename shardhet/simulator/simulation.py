"""Simulate one step of a plan, event by event: compute, waits, collectives and memory.

Ranks go through the turns of ``shardhet.records.schedule``, as in the runtime:

    begin turn   launch its gather and the next turn's; wait for its own
    compute      all microbatches; slowed by ``overlap_excess`` during a collective
    end turn     if the gradients are complete: wait until the earlier reductions leave room
                 for one more in flight, then launch this one
    between      all ranks agree between forward and backward, and after the last reduction

A collective starts when all ranks have launched it, the links are free, and the collectives
launched before it on its stream are done.  Gathers and reductions share the links in turn.

Ranks that do the same are simulated once.  The loop finds the next thing to end, moves the
clock there, and lets every rank go on as far as it can.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import Phase, Turn, straight_schedule
from shardhet.simulator.links import Links
from shardhet.simulator.timeline import Event, MemoryPoint, RankTimeline, Timeline, Work, merged


def simulate(plan: Plan, setting: Setting) -> Timeline:
    """The predicted timeline of one optimizer step."""
    model = CostModel(setting, plan.reshard_after_forward)
    return _Simulation(model, plan).run()


class _State(Enum):
    """What a rank is doing; it leaves each state in ``_Simulation.advance``."""

    BEGIN = auto()  # of a turn: launch gathers
    PREPARE = auto()  # until the runtime has done its own work for the turn
    WAIT_GATHER = auto()  # until the turn's gather is done
    COMPUTE = auto()  # until nothing remains
    END = auto()  # of a turn: launch the reduction
    WAIT_REDUCE = auto()  # until the previous reduction is done
    FLUSH = auto()  # until the last reduction is done
    AGREE = auto()  # until all ranks have arrived
    OPTIMIZE = auto()  # until nothing remains
    DONE = auto()


TIMED = frozenset({_State.PREPARE, _State.COMPUTE, _State.OPTIMIZE})


@dataclass
class _Actor:
    """A set of ranks that do the same."""

    rank: RankPlan
    positions: list[int]
    seconds: dict[tuple[str, Phase], float]  # compute by kind of unit, recomputation included
    optimizer_s: float
    overlap_excess: float
    state: _State = _State.BEGIN
    turn: int = 0
    last_launched: int = -1  # the latest turn whose gather it has launched
    remaining_s: float = 0.0  # of compute, at full speed
    since_s: float = 0.0  # when the state began
    held_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)


class _Simulation:
    """The state of the simulation: the clock, the links and all actors."""

    def __init__(self, model: CostModel, plan: Plan) -> None:
        self.model = model
        self.plan = plan
        self.units = model.visited_units
        self.clock_s = 0.0
        self.schedule = straight_schedule(
            len(self.units), reshard_after_forward=plan.reshard_after_forward
        )
        predicted = model.predict(plan)
        self.predicted = predicted
        self.actors = self._make_actors()
        gather_s, reduce_s = model.unit_collectives(plan)
        self.links = Links(
            self.schedule,
            gather_s=gather_s,
            reduce_s=reduce_s,
            unit_fqns=[unit.fqn for unit in self.units],
            num_actors=len(self.actors),
        )

    def run(self) -> Timeline:
        """Run until every rank is done; returns the timeline."""
        for actor in self.actors:
            self.hold(actor, self._resting_bytes(actor))
        self.settle()
        while not all(actor.state is _State.DONE for actor in self.actors):
            self.pass_time()
            self.settle()
        for actor in self.actors:
            self.leave(actor, Work.AGREE)  # the next step begins when the slowest rank is done
        actors = {i: actor for actor in self.actors for i in actor.positions}
        ranks = tuple(
            RankTimeline(
                name=self.model.cluster.devices[i].kind or "device",
                events=merged(actors[i].events),
                memory=tuple(actors[i].memory),
            )
            for i in range(self.plan.world_size)
        )
        return Timeline(
            ranks=ranks, collectives=merged(self.links.sent), step_time_s=self.clock_s
        )

    # The loop #

    def settle(self) -> None:
        """Do everything that can happen without time passing."""
        goes_on = True
        while goes_on:
            goes_on = self.links.start(self.clock_s)
            for actor in self.actors:
                goes_on |= self.advance(actor)

    def pass_time(self) -> None:
        """Move the clock to the next end of a computation or of a collective."""
        computing = [actor for actor in self.actors if actor.state in TIMED]
        # A speed is negative if moving the data costs the processor more time than the
        # collective lasts: compute then has more left to do when the collective ends.
        speeds = [1.0 - actor.overlap_excess * bool(self.links.running) for actor in computing]
        ends_s = [
            actor.remaining_s / speed
            for actor, speed in zip(computing, speeds, strict=True)
            if speed > 0
        ]
        if self.links.running:
            ends_s.append(self.links.remaining_s)
        if not ends_s:
            states = [actor.state.name for actor in self.actors]
            raise RuntimeError(f"simulate: ranks wait for each other for ever: {states}.")
        step_s = min(ends_s)
        self.clock_s += step_s
        for actor, speed in zip(computing, speeds, strict=True):
            actor.remaining_s = max(0.0, actor.remaining_s - step_s * speed)
            if actor.remaining_s <= 1e-12 * self.clock_s:
                actor.remaining_s = 0.0
        self.links.pass_time(step_s, self.clock_s)

    # One rank #

    def advance(self, actor: _Actor) -> bool:
        """Leave the rank's state if it can; returns whether it could."""
        state, turn = actor.state, self._turn(actor)
        if state is _State.BEGIN:
            assert turn is not None
            self.launch_ahead(actor)
            actor.remaining_s = self.model.profile.turn_overhead_s
            self.enter(actor, _State.PREPARE)
        elif state is _State.PREPARE:
            if actor.remaining_s > 0:
                return False
            if self.model.profile.turn_overhead_s:
                self.leave(actor, Work.OVERHEAD)
            self.enter(actor, _State.WAIT_GATHER)
        elif state is _State.WAIT_GATHER:
            assert turn is not None
            if turn.gathers and not self.links.gathers[actor.turn].is_done:
                return False
            self.leave(actor, Work.WAIT_GATHER)
            self.begin_compute(actor, turn)
        elif state is _State.COMPUTE:
            assert turn is not None
            if actor.remaining_s > 0:
                return False
            is_forward = turn.phase is Phase.FORWARD
            self.leave(actor, Work.FORWARD if is_forward else Work.BACKWARD)
            self.end_compute(actor, turn)
            self.enter(actor, _State.WAIT_REDUCE if turn.reduces else _State.END)
        elif state is _State.WAIT_REDUCE:
            if not self.links.has_room_for_reduction(actor.turn):
                return False
            self.leave(actor, Work.WAIT_REDUCE)
            self.links.reductions[actor.turn].num_launched += 1
            self.enter(actor, _State.END)
        elif state is _State.END:
            self.end_turn(actor)
        else:
            return self.advance_between(actor)
        return True

    def end_turn(self, actor: _Actor) -> None:
        """Go on to the next turn, or to what comes between phases."""
        actor.turn += 1
        if actor.turn == len(self.schedule.turns):
            self.enter(actor, _State.FLUSH)
        elif actor.turn == self.schedule.num_forward:
            self.launch_ahead(actor)  # overlaps the exchange of the loss
            self.enter(actor, _State.AGREE)
        else:
            self.enter(actor, _State.BEGIN)

    def advance_between(self, actor: _Actor) -> bool:
        """The part of ``advance`` for states outside of turns."""
        if actor.state is _State.FLUSH and self.links.has_reduced:
            self.leave(actor, Work.WAIT_REDUCE)
            self.enter(actor, _State.AGREE)
            return True
        if actor.state is _State.AGREE:
            return self.agree(actor)
        if actor.state is _State.OPTIMIZE and actor.remaining_s == 0:
            self.leave(actor, Work.OPTIMIZER)
            self.enter(actor, _State.DONE)
            return True
        return False

    def agree(self, actor: _Actor) -> bool:
        """Go on if every rank has come this far; returns whether it has."""
        is_last = actor.turn == len(self.schedule.turns)
        if any(other.turn < actor.turn for other in self.actors):
            return False
        self.leave(actor, Work.AGREE)
        if is_last:
            actor.remaining_s = actor.optimizer_s
        self.enter(actor, _State.OPTIMIZE if is_last else _State.BEGIN)
        return True

    def launch_ahead(self, actor: _Actor) -> None:
        """Launch the gathers of this turn and the next, unless already launched."""
        for launch in self.schedule.gathers_by(actor.turn):
            if launch.turn > actor.last_launched:
                self.links.gathers[launch.turn].num_launched += 1
                actor.last_launched = launch.turn

    def begin_compute(self, actor: _Actor, turn: Turn) -> None:
        """Start computing all microbatches of the turn."""
        unit = self.units[turn.unit]
        is_backward = turn.phase is Phase.BACKWARD
        seconds = actor.seconds[unit.kind, turn.phase]
        if is_backward and actor.rank.recomputes(unit.fqn):
            seconds += actor.seconds[unit.kind, Phase.FORWARD]
        actor.remaining_s = seconds
        if actor.rank.rank_batch_size:
            self.hold(actor, self._running_bytes(actor, turn))
        self.enter(actor, _State.COMPUTE)

    def end_compute(self, actor: _Actor, turn: Turn) -> None:
        """Free the running memory; keep or free what lives from forward to backward."""
        if not actor.rank.rank_batch_size:
            return
        kept = self.model.kept_bytes(actor.rank, self.units[turn.unit])
        change = kept if turn.phase is Phase.FORWARD else -kept
        self.hold(actor, change - self._running_bytes(actor, turn))

    def enter(self, actor: _Actor, state: _State) -> None:
        """Enter a state now."""
        actor.state = state
        actor.since_s = self.clock_s

    def leave(self, actor: _Actor, work: Work) -> None:
        """Record what the time since the state began was spent on."""
        turn = self._turn(actor)
        unit = self.units[turn.unit].fqn if turn and work is not Work.AGREE else ""
        actor.events.append(
            Event(unit=unit, work=work, start_s=actor.since_s, end_s=self.clock_s)
        )

    def hold(self, actor: _Actor, change: int) -> None:
        """Hold ``change`` more bytes from now on."""
        actor.held_bytes += change
        actor.memory.append(MemoryPoint(time_s=self.clock_s, nbytes=actor.held_bytes))

    # Fixed before the run #

    def _turn(self, actor: _Actor) -> Turn | None:
        turns = self.schedule.turns
        return turns[actor.turn] if actor.turn < len(turns) else None

    def _make_actors(self) -> list[_Actor]:
        actors: dict[tuple[object, ...], _Actor] = {}
        for position, rank in enumerate(self.plan.ranks):
            device = self.model.cluster.devices[position]
            optimizer_s = self.predicted.ranks[position].optimizer_s
            key = (device.kind, rank.microbatch_sizes, rank.recomputed_units, optimizer_s)
            if key not in actors:
                seconds = {}
                for kind in self.model.workload.num_units_by_kind:
                    if any(unit.kind == kind for unit in self.units):
                        forward_s, backward_s = self.model.unit_seconds(
                            device.kind, kind, rank.microbatch_sizes
                        )
                        seconds[kind, Phase.FORWARD] = forward_s
                        seconds[kind, Phase.BACKWARD] = backward_s
                excess = self.model.profile.device(device.kind).overlap_excess
                actors[key] = _Actor(rank, [], seconds, optimizer_s, excess)
            actors[key].positions.append(position)
        return list(actors.values())

    def _resting_bytes(self, actor: _Actor) -> int:
        """Bytes held throughout: the state, and what the runtime reserves."""
        memory = self.predicted.ranks[actor.positions[0]].memory
        return memory.state_bytes + memory.shard_buffer_bytes + memory.reserved_bytes

    def _running_bytes(self, actor: _Actor, turn: Turn) -> int:
        device_kind = self.model.cluster.devices[actor.positions[0]].kind
        unit, is_backward = self.units[turn.unit], turn.phase is Phase.BACKWARD
        return self.model.turn_bytes(actor.rank, device_kind, unit, is_backward=is_backward)
