"""The ranks of a simulated step: what each does in which turn, and what it has done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardhet.pricing.cost import CostModel
from shardhet.pricing.turns import taking_part
from shardhet.records.ops import MAX_ROUNDS, Op, OpKind
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import LaunchKind, Phase, Schedule
from shardhet.simulator.timeline import Event, MemoryPoint, RankTimeline, Work, merged

WORK_OF: dict[Phase | LaunchKind | OpKind, Work] = {
    OpKind.BEGIN: Work.OVERHEAD,
    OpKind.ROOM: Work.OVERHEAD,  # it takes no time
    Phase.FORWARD: Work.FORWARD,
    Phase.BACKWARD: Work.BACKWARD,
    OpKind.STEP: Work.OPTIMIZER,
}


@dataclass(frozen=True, kw_only=True)
class StageOps:
    """What all ranks of a stage do."""

    stage: int
    schedule: Schedule
    ops: Sequence[Op]
    unit_fqns: Sequence[str]
    seconds_of: Mapping[LaunchKind, Sequence[float]]  # by unit


@dataclass(eq=False)
class Actor:
    """Ranks that do the same until the optimizer, whose time depends on what each stores."""

    name: str  # of the device
    positions: list[int]  # in the plan
    of_stage: StageOps
    overlap_slowdown: float
    unit_overhead_s: float
    seconds: list[float]  # of compute by turn, recomputation included
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
    index: int = 0  # among all
    is_computing: bool = False
    at: int = 0  # the next op, or the one that it computes
    turn: int = 0
    since_s: float = 0.0  # when the latest event ended
    events: list[Event] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)  # computing, by turn
    # From when on it holds so many bytes, and so many per stored element.
    memory: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def op(self) -> Op:
        """The next one, or the one that it computes."""
        return self.of_stage.ops[self.at]

    @property
    def is_done(self) -> bool:
        """Whether it is at the end of its list."""
        return self.at == len(self.of_stage.ops)

    def begin(self, now_s: float) -> float:
        """Begin an op that is no transfer, and hold what it needs; returns its seconds."""
        self.is_computing = True
        if isinstance(self.op.kind, Phase):
            self.began_s.append(now_s)
            self.hold(now_s, self.running_bytes[self.turn], self.numel_bytes[self.turn])
            return self.seconds[self.turn]
        return self.unit_overhead_s if self.op.kind is OpKind.BEGIN else 0.0

    def end(self, now_s: float) -> None:
        """End it, and hold what lives from forward to backward."""
        self._record(WORK_OF[self.op.kind], now_s)
        if isinstance(self.op.kind, Phase):
            self.hold(now_s, self.kept_bytes[self.turn], self.numel_bytes[self.turn])
            self.turn += 1
        self.is_computing = False
        self.at += 1

    def wait(self, of: Work | LaunchKind, until_s: float) -> None:
        """Have waited for a transfer before the next op."""
        if isinstance(of, LaunchKind):
            of = Work.WAIT_GATHER if isinstance(self.op.kind, Phase) else Work.WAIT_REDUCE
        self._record(Work.WAIT_STAGE if of is Work.HAND_OVER else of, until_s)

    def _record(self, work: Work, until_s: float) -> None:
        if until_s > self.since_s:
            number = -1 if work in (Work.AGREE, Work.WAIT_STAGE) else self.op.unit
            unit = self.of_stage.unit_fqns[number] if number >= 0 else ""
            self.events.append(Event(unit=unit, work=work, start_s=self.since_s, end_s=until_s))
            self.since_s = until_s

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
            stage=self.of_stage.stage,
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
            of = self.of_stage.schedule.turns[turn]
            inputs, rows = Work.TO_HOST, Work.TO_DEVICE
            if of.phase is Phase.BACKWARD:
                inputs, rows = rows, inputs
            for work, seconds in (
                (rows, stored_numel * self.row_copy_s[turn]),
                (inputs, self.input_copy_s[turn]),
            ):
                start_s = max(began_s, free_s[work])
                free_s[work] = end_s = start_s + seconds
                unit = self.of_stage.unit_fqns[of.unit]
                found.append(Event(unit=unit, work=work, start_s=start_s, end_s=end_s))
        return merged(found)


def make_actors(
    model: CostModel, plan: Plan, of_stage: StageOps, positions: Sequence[int]
) -> list[Actor]:
    """The actors of a stage, whose plan alone is ``plan``, by the first of their positions.

    Ranks without samples and rows have none: nobody waits for them.
    """
    actors: dict[tuple[object, ...], Actor] = {}
    schedule, paces = of_stage.schedule, model.host_paces(plan)
    active = taking_part(plan.ranks, model.stored_by(plan).numels)
    among = model.among(active)
    for i in active:
        rank, device = plan.ranks[i], model.cluster.devices[i]
        last = plan.last_microbatch_sizes(i)
        node = model.cluster.node_of[i] if rank.optimizer_on_host else None
        member = model.member_at(plan, i)
        places = (rank.recomputed_units, rank.tiled_units, rank.tokens_per_tile, node, member)
        key: tuple[object, ...] = (device.kind, rank.microbatch_sizes, last, *places)
        if rank.inputs_on_host:
            key = (*key, rank.inputs_on_host, paces[i])
        if key not in actors:
            here = replace(rank, device=device)
            own, own_among = model.of_member(member), among.of_member(member)
            seconds, input_copy_s = _seconds(own, own_among, here, last, schedule, paces[i])
            running, kept, numel_bytes = _memory(own, here, schedule)
            actors[key] = Actor(
                name=device.kind or "device",
                positions=[],
                of_stage=of_stage,
                overlap_slowdown=model.profile.device(device.kind).overlap_slowdown,
                unit_overhead_s=model.profile.unit_overhead_s,
                seconds=seconds,
                input_copy_s=input_copy_s,
                row_copy_s=[0.0] * len(schedule.turns)
                if node is None
                else model.row_copies_s(schedule, node),
                resting_bytes=_resting_bytes(model, here),
                running_bytes=running,
                kept_bytes=kept,
                numel_bytes=numel_bytes,
            )
        actors[key].positions.append(positions[i])
    return list(actors.values())


def _seconds(
    model: CostModel,
    among: CostModel,  # of the devices that take part
    rank: RankPlan,
    last: tuple[int, ...],  # its microbatches in the last round
    schedule: Schedule,
    pace: float,  # bytes per second of copies to the host and back
) -> tuple[list[float], list[float]]:
    """By turn: seconds of compute, and of copies of inputs beside it."""
    units, seconds, input_copy_s = model.visited_units, list[float](), list[float]()
    by_kind = {
        (kind, sizes): among.unit_seconds(rank.device.kind, kind, sizes)
        for kind in dict.fromkeys(unit.kind for unit in units)
        for sizes in (rank.microbatch_sizes, last)
    }
    again = [among.again_part(rank, unit.fqn, model.workload.kind_of(unit)) for unit in units]
    for turn in schedule.turns:
        unit, is_last = units[turn.unit], turn.round == schedule.form.num_rounds - 1
        sizes = last if is_last else rank.microbatch_sizes
        forward_s, backward_s = by_kind[unit.kind, sizes]
        backward_s += forward_s * again[turn.unit]
        of_phases = model.beside_copies_s(rank, unit.fqn, sizes, (forward_s, backward_s), pace)
        seconds.append(of_phases[turn.phase is Phase.BACKWARD])
        input_copy_s.append(model.copy_s(rank, unit.fqn, sizes, pace))
    return seconds, input_copy_s


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
    num_rounds, num_units = schedule.form.num_rounds, len(model.visited_units)
    known, at, signs = min(num_rounds, MAX_ROUNDS), list[int](), list[int]()
    for turn in turns:
        is_backward = turn.phase is Phase.BACKWARD
        number = known - 1 if turn.round == num_rounds - 1 else min(turn.round, 1)
        place = 2 * num_units - 1 - turn.unit if is_backward else turn.unit
        at.append(2 * num_units * number + place)
        signs.append(-1 if is_backward else 1)
    own = batch * model.kept_bytes_per_sample(rank)[[turn.unit for turn in turns]]
    kept = _resting_bytes(model, rank) + np.cumsum(own * signs)
    at.append(-1)  # after all turns
    return (
        nbytes[at].astype(int).tolist(),
        kept.astype(int).tolist(),
        moments.numel_bytes[at].tolist(),
    )
