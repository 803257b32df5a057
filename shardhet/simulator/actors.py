"""The ranks of a simulated step: what each does in which turn, and what it has done."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from shardhet.pricing.cost import CostModel
from shardhet.pricing.turns import taking_part
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import Phase, Schedule
from shardhet.records.schedule.held import MAX_ROUNDS
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
    is_forward: list[bool]  # by turn
    # By turn: seconds of copies to or from the host beside it, of inputs, and of rows and
    # gradients per stored element.
    input_copy_s: list[float]
    row_copy_s: list[float]
    resting_bytes: int  # between steps, besides what it stores
    # By turn: bytes while it computes, and after it; bytes per stored element at both times,
    # and once more after all turns.
    running_bytes: list[int]
    kept_bytes: list[int]
    numel_bytes: list[float]
    state: State = State.BEGIN
    is_computing: bool = False
    turn: int = 0
    last_launched: int = -1  # the latest turn for which it has launched
    since_s: float = 0.0  # when the state began
    events: list[Event] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)  # computing, by turn
    # From when on it holds so many bytes, and so many per stored element.
    memory: list[tuple[float, int, float]] = field(default_factory=list)

    def begin_compute(self, now_s: float) -> None:
        """Hold what the turn needs."""
        self.began_s.append(now_s)
        self.hold(now_s, self.running_bytes[self.turn], self.numel_bytes[self.turn])

    def end_compute(self, now_s: float) -> None:
        """Hold what lives from forward to backward."""
        self.hold(now_s, self.kept_bytes[self.turn], self.numel_bytes[self.turn])

    def leave(self, now_s: float, work: Work) -> None:
        """Record what the time since the state began was spent on."""
        if now_s > self.since_s:
            is_in_turn = work is not Work.AGREE and self.turn < len(self.unit_fqns)
            unit = self.unit_fqns[self.turn] if is_in_turn else ""
            self.events.append(Event(unit=unit, work=work, start_s=self.since_s, end_s=now_s))

    def hold(self, now_s: float, nbytes: int, numel_bytes: float) -> None:
        """Hold so much from now on."""
        self.memory.append((now_s, nbytes, numel_bytes))

    def timeline(
        self, start_s: float, updated_s: float, end_s: float, *, stored_numel: int
    ) -> RankTimeline:
        """What a rank has done that stores so many elements, and whose optimizer ran from
        ``start_s`` to ``updated_s``.

        The next step begins when the slowest rank is done.
        """
        last = [
            Event(unit="", work=Work.OPTIMIZER, start_s=start_s, end_s=updated_s),
            Event(unit="", work=Work.AGREE, start_s=updated_s, end_s=end_s),
        ]
        return RankTimeline(
            name=self.name,
            events=(*merged(self.events), *merged(last)),
            copies=self._copies(stored_numel),
            memory=tuple(
                MemoryPoint(time_s=time_s, nbytes=nbytes + int(stored_numel * numel_bytes))
                for time_s, nbytes, numel_bytes in self.memory
            ),
        )

    def _copies(self, stored_numel: int) -> tuple[Event, ...]:
        """Each as soon as its turn computes and those in its direction before it are done."""
        free_s = {Work.TO_HOST: 0.0, Work.TO_DEVICE: 0.0}
        found = []
        for turn, began_s in enumerate(self.began_s):
            inputs, rows = Work.TO_HOST, Work.TO_DEVICE
            if not self.is_forward[turn]:
                inputs, rows = rows, inputs
            for work, seconds in (
                (rows, stored_numel * self.row_copy_s[turn]),
                (inputs, self.input_copy_s[turn]),
            ):
                start_s = max(began_s, free_s[work])
                free_s[work] = end_s = start_s + seconds
                unit = self.unit_fqns[turn]
                found.append(Event(unit=unit, work=work, start_s=start_s, end_s=end_s))
        return merged(found)


def make_actors(
    model: CostModel,
    plan: Plan,
    schedule: Schedule,
) -> list[Actor]:
    """The actors of a plan, by the first of their positions.

    Ranks without samples and rows have none: nobody waits for them.
    """
    actors: dict[tuple[object, ...], Actor] = {}
    no_copies = [0.0] * len(schedule.turns)
    paces = model.host_paces(plan)
    active = taking_part(plan.ranks, model.stored_numels(plan.state_shares))
    among = model.among(active)
    for position in active:
        rank = plan.ranks[position]
        kind = model.cluster.devices[position].kind
        last = plan.last_microbatch_sizes(position)
        node = model.cluster.node_of[position] if rank.optimizer_on_host else None
        places = (rank.recomputed_units, node)
        key: tuple[object, ...] = (kind, rank.microbatch_sizes, last, *places)
        if rank.inputs_on_host:
            key = (*key, rank.inputs_on_host, paces[position])
        if key not in actors:
            here = replace(rank, device=model.cluster.devices[position])
            actors[key] = _actor(
                model,
                among,
                len(actors),
                here,
                last,
                schedule,
                pace=paces[position],
                row_copy_s=no_copies if node is None else model.row_copies_s(schedule, node),
            )
        actors[key].positions.append(position)
    return list(actors.values())


def _actor(
    model: CostModel,
    among: CostModel,  # of the devices that take part
    index: int,
    rank: RankPlan,
    last: tuple[int, ...],  # its microbatches in the last round
    schedule: Schedule,
    *,
    pace: float,  # bytes per second of copies to the host and back
    row_copy_s: list[float],
) -> Actor:
    units, device_kind = model.visited_units, rank.device.kind
    is_again = [rank.recomputes(unit.fqn) for unit in units]
    by_kind = {
        (kind, sizes): among.unit_seconds(device_kind, kind, sizes)
        for kind in dict.fromkeys(unit.kind for unit in units)
        for sizes in (rank.microbatch_sizes, last)
    }
    seconds, input_copy_s = [], []
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
        input_copy_s.append(model.copy_s(rank, unit.fqn, sizes, pace))
    running, kept, numel_bytes = _memory(model, rank, schedule)
    return Actor(
        index=index,
        name=device_kind or "device",
        positions=[],
        overlap_excess=model.profile.device(device_kind).overlap_excess,
        seconds=seconds,
        unit_fqns=[units[turn.unit].fqn for turn in schedule.turns],
        is_forward=[turn.phase is Phase.FORWARD for turn in schedule.turns],
        input_copy_s=input_copy_s,
        row_copy_s=row_copy_s,
        resting_bytes=_resting_bytes(model, rank),
        running_bytes=running,
        kept_bytes=kept,
        numel_bytes=numel_bytes,
    )


def _resting_bytes(model: CostModel, rank: RankPlan) -> int:
    """What a rank holds between turns besides its rows and activations."""
    reserved = model.profile.device(rank.device.kind).reserved_bytes
    # The rows of a lone device whose optimizer is on the host are what it computes with.
    are_rows = model.is_alone and rank.optimizer_on_host
    return reserved + model.resident_bytes * bool(rank.rank_batch_size and not are_rows)


def _memory(
    model: CostModel, rank: RankPlan, schedule: Schedule
) -> tuple[list[int], list[int], list[float]]:
    """By turn: bytes while a rank computes it, after it, and per stored element.

    The last bytes per stored element are after all turns.
    """
    turns, reserved = schedule.turns, model.profile.device(rank.device.kind).reserved_bytes
    if not rank.rank_batch_size:
        per_numel = [model.bytes_per_numel_of(rank)] * (len(turns) + 1)
        return [reserved] * (len(turns) + 1), [reserved] * len(turns), per_numel
    moments = model.moments_by_turn(rank)
    size, batch = max(rank.microbatch_sizes), rank.rank_batch_size
    running = model.running_by_size(rank, rank.device.kind, size)[list(moments.runs), size]
    nbytes = reserved + moments.fixed_bytes + running + batch * moments.sample_bytes
    # All rounds between the first and the last are alike.
    num_rounds, known = schedule.form.num_rounds, min(schedule.form.num_rounds, MAX_ROUNDS)
    per_round = len(turns) // num_rounds
    alike = [
        i % per_round
        + per_round * (known - 1 if turn.round == num_rounds - 1 else min(turn.round, 1))
        for i, turn in enumerate(turns)
    ]
    own = batch * model.kept_bytes_per_sample(rank)
    so_far, resting = np.cumsum(own), _resting_bytes(model, rank)
    kept = [
        resting + so_far[turn.unit] - (own[turn.unit] if turn.phase is Phase.BACKWARD else 0.0)
        for turn in turns
    ]
    at = [*alike, -1]
    return nbytes[at].astype(int).tolist(), [*map(int, kept)], moments.numel_bytes[at].tolist()
