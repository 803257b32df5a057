"""The ranks of a simulated step: what each does in which turn, and what it has done."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from shardhet.pricing.cost import CostModel
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import Phase, Schedule
from shardhet.simulator.timeline import Event, MemoryPoint, RankTimeline, Work, merged


class State(Enum):
    """What a rank is doing."""

    BEGIN = auto()  # of a turn: launch what it and the next turn need
    PREPARE = auto()  # until the runtime has done its own work for the turn
    WAIT_GATHER = auto()  # until what was launched for the turn is done
    COMPUTE = auto()  # until nothing remains
    WAIT_REDUCE = auto()  # until there is room for what is launched after the turn
    FLUSH = auto()  # until all transfers are done
    AGREE = auto()  # until all ranks have arrived
    OPTIMIZE = auto()  # the turns are over


WAITING_STATES = frozenset({State.WAIT_GATHER, State.WAIT_REDUCE, State.FLUSH, State.AGREE})


@dataclass(eq=False)
class Actor:
    """Ranks that do the same until the optimizer, whose time depends on what each stores."""

    index: int
    name: str  # of the device
    positions: list[int]
    overlap_excess: float
    seconds: list[float]  # of compute by turn, recomputation included
    unit_fqns: list[str]  # by turn
    # By turn: bytes that are held while it computes, and the change that it leaves behind.
    running_bytes: list[int]
    kept_bytes: list[int]
    computes: bool
    state: State = State.BEGIN
    is_computing: bool = False
    turn: int = 0
    last_launched: int = -1  # the latest turn for which it has launched
    since_s: float = 0.0  # when the state began
    held_bytes: int = 0  # besides what it holds throughout
    events: list[Event] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def begin_compute(self, now_s: float) -> None:
        """Hold what the running microbatches of the turn need."""
        if self.computes:
            self.hold(now_s, self.running_bytes[self.turn])

    def end_compute(self, now_s: float) -> None:
        """Free the running memory; keep or free what lives from forward to backward."""
        if self.computes:
            self.hold(now_s, self.kept_bytes[self.turn] - self.running_bytes[self.turn])

    def leave(self, now_s: float, work: Work) -> None:
        """Record what the time since the state began was spent on."""
        if now_s > self.since_s:
            is_in_turn = work is not Work.AGREE and self.turn < len(self.unit_fqns)
            unit = self.unit_fqns[self.turn] if is_in_turn else ""
            self.events.append(Event(unit=unit, work=work, start_s=self.since_s, end_s=now_s))

    def hold(self, now_s: float, change: int) -> None:
        """Hold ``change`` more bytes from now on."""
        self.held_bytes += change
        self.memory.append((now_s, self.held_bytes))

    def timeline(
        self, start_s: float, updated_s: float, end_s: float, *, resting_bytes: int
    ) -> RankTimeline:
        """What a rank has done whose optimizer ran from ``start_s`` to ``updated_s``.

        The next step begins when the slowest rank is done.  The rank holds ``resting_bytes``
        throughout: the state, and what the runtime reserves.
        """
        last = [
            Event(unit="", work=Work.OPTIMIZER, start_s=start_s, end_s=updated_s),
            Event(unit="", work=Work.AGREE, start_s=updated_s, end_s=end_s),
        ]
        return RankTimeline(
            name=self.name,
            events=(*merged(self.events), *merged(last)),
            memory=tuple(
                MemoryPoint(time_s=time_s, nbytes=resting_bytes + held)
                for time_s, held in self.memory
            ),
        )


def make_actors(
    model: CostModel,
    plan: Plan,
    schedule: Schedule,
) -> list[Actor]:
    """The actors of a plan, by the first of their positions."""
    actors: dict[tuple[object, ...], Actor] = {}
    paces = model.host_paces(plan)
    for position, rank in enumerate(plan.ranks):
        kind = model.cluster.devices[position].kind
        last = plan.last_microbatch_sizes(position)
        key: tuple[object, ...] = (kind, rank.microbatch_sizes, rank.recomputed_units, last)
        if rank.inputs_on_host:
            key = (*key, rank.inputs_on_host, paces[position])
        if key not in actors:
            here = replace(rank, device=model.cluster.devices[position])
            actors[key] = _actor(
                model,
                len(actors),
                here,
                last,
                schedule,
                pace=paces[position],
            )
        actors[key].positions.append(position)
    return list(actors.values())


def _actor(
    model: CostModel,
    index: int,
    rank: RankPlan,
    last: tuple[int, ...],  # its microbatches in the last round
    schedule: Schedule,
    *,
    pace: float,  # bytes per second of copies to the host and back
) -> Actor:
    units, device_kind = model.visited_units, rank.device.kind
    computes = bool(rank.rank_batch_size)
    is_again = [rank.recomputes(unit.fqn) for unit in units]
    by_kind = {
        (kind, sizes): model.unit_seconds(device_kind, kind, sizes)
        for kind in dict.fromkeys(unit.kind for unit in units)
        for sizes in (rank.microbatch_sizes, last)
    }
    seconds, running, kept = [], [], []
    for turn in schedule.turns:
        unit, is_backward = units[turn.unit], turn.phase is Phase.BACKWARD
        is_last = turn.round == schedule.form.num_rounds - 1
        sizes = last if is_last else rank.microbatch_sizes
        forward_s, backward_s = by_kind[unit.kind, sizes]
        if is_again[turn.unit]:
            backward_s += forward_s
        forward_s, backward_s = model.beside_copies_s(
            rank, unit.fqn, sizes, (forward_s, backward_s), pace
        )
        seconds.append(backward_s if is_backward else forward_s)
        if computes:
            running.append(model.turn_bytes(rank, device_kind, unit, is_backward=is_backward))
            change = model.kept_bytes(rank, unit)
            kept.append(-change if is_backward else change)
    return Actor(
        index=index,
        name=device_kind or "device",
        positions=[],
        overlap_excess=model.profile.device(device_kind).overlap_excess,
        seconds=seconds,
        unit_fqns=[units[turn.unit].fqn for turn in schedule.turns],
        running_bytes=running,
        kept_bytes=kept,
        computes=computes,
    )
