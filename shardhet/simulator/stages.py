"""Simulate one step of a plan with stages: each by its price, and the queues between them.

A phase of a round takes a stage as long as its cost says, collectives included; within it a
device computes as long as its own samples take, and waits for the others of its stage.  What
stages hand over waits in one queue per boundary and direction (``simulator.pipeline``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from shardhet.pricing.cost import CostModel
from shardhet.pricing.hosts import part_of_hosts
from shardhet.pricing.setting import Setting
from shardhet.pricing.step_cost import RankCost, StepCost
from shardhet.records.cluster import Cluster
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import Phase
from shardhet.records.stages import positions_by_stage, rounds_in_flight, stage_by_unit
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import (
    Hop,
    Passage,
    StageTimes,
    handed_on_bytes,
    hop_between,
    pipeline_s,
)
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Event, MemoryPoint, RankTimeline, Timeline, Work, merged

# The setting of the devices at some positions of a cluster.
PartOf = Callable[[tuple[int, ...]], Setting]


class UnitSeconds(NamedTuple):
    """What a device computes of a unit in a round."""

    fqn: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrice:
    """The predicted cost of a plan with stages."""

    positions: tuple[range, ...]  # in the plan, by stage
    costs: tuple[StepCost, ...]  # of each stage alone, with all rounds
    hops: tuple[Hop, ...]
    in_flight: tuple[int, ...]
    num_rounds: int
    names: tuple[str, ...]  # of the devices
    units: tuple[tuple[UnitSeconds, ...], ...]  # of a round, by device, in order of forward

    @property
    def ranks(self) -> tuple[RankCost, ...]:
        """The cost of every device, in plan order."""
        return tuple(rank for cost in self.costs for rank in cost.ranks)

    def timeline(self) -> Timeline:
        """What every device and every link between stages does."""
        passages: list[Passage] = []
        step_s = pipeline_s(
            [StageTimes.of(cost, self.num_rounds) for cost in self.costs],
            [hop.seconds for hop in self.hops],
            in_flight=self.in_flight,
            num_rounds=self.num_rounds,
            passages=passages,
        )
        ranks = []
        for stage, (positions, cost) in enumerate(zip(self.positions, self.costs, strict=True)):
            own = [each for each in passages if each.stage == stage and each.to is None]
            for i, rank in zip(positions, cost.ranks, strict=True):
                held = MemoryPoint(time_s=0.0, nbytes=rank.memory.total_bytes)
                ranks.append(
                    RankTimeline(
                        name=self.names[i],
                        events=merged(self._events(own, cost, rank, self.units[i], step_s)),
                        memory=(held,),
                    )
                )
        sent = [
            Event(
                unit=f"round {each.of.round} from stage {each.stage} to {each.to}",
                work=Work.HAND_OVER,
                start_s=each.start_s,
                end_s=each.end_s,
            )
            for each in passages
            if each.to is not None
        ]
        return Timeline(ranks=tuple(ranks), collectives=merged(sent), step_time_s=step_s)

    def _events(
        self,
        passages: Sequence[Passage],
        cost: StepCost,
        rank: RankCost,
        units: Sequence[UnitSeconds],
        step_s: float,
    ) -> list[Event]:
        """What one device of a stage does."""
        events: list[Event] = []

        def add(unit: str, work: Work, start_s: float, end_s: float) -> None:
            events.append(Event(unit=unit, work=work, start_s=start_s, end_s=end_s))

        free_s = 0.0
        for each in passages:
            add("", Work.WAIT_STAGE, free_s, each.start_s)
            if each.of.phase is Phase.FORWARD:
                work, waits, own_s = Work.FORWARD, Work.WAIT_GATHER, rank.forward_s
                parts = [(unit.fqn, unit.forward_s) for unit in units]
            else:
                work, waits, own_s = Work.BACKWARD, Work.WAIT_REDUCE, rank.backward_s
                parts = [(unit.fqn, unit.backward_s) for unit in reversed(units)]
            own_s = min(own_s / self.num_rounds, each.end_s - each.start_s)
            whole_s = sum(seconds for _, seconds in parts)
            at_s = each.start_s
            for fqn, seconds in parts if whole_s else ():
                add(fqn, work, at_s, at_s + own_s * seconds / whole_s)
                at_s += own_s * seconds / whole_s
            add("", waits, at_s, each.end_s)
            free_s = each.end_s
        reduced_s = free_s + cost.exposed_comm_s
        add("", Work.WAIT_REDUCE, free_s, reduced_s)
        add("", Work.OPTIMIZER, reduced_s, reduced_s + rank.optimizer_s)
        add("", Work.AGREE, reduced_s + rank.optimizer_s, step_s)
        return events


def price_and_timeline(
    plan: Plan, setting: Setting, part_of: PartOf
) -> tuple[StepCost | PipelinePrice, Timeline]:
    """What a plan costs, with stages or without, and the timeline of its step."""
    if plan.stages is None:
        return CostModel(setting).predict(plan), simulate(plan, setting)
    price = price_of(plan, setting, part_of)
    return price, price.timeline()


def price_of(plan: Plan, setting: Setting, part_of: PartOf) -> PipelinePrice:
    """The price of a plan with stages.

    Its devices are in the order of the plan, and may be a part of the cluster's.  Raises
    ``ValueError`` if it is for other devices or another model, or if a link between stages is
    not stated.
    """
    assert plan.stages is not None
    workload, groups = setting.workload, positions_by_stage(plan.stages)
    units = [unit for unit in workload.units if unit.fqn]
    stage_by_fqn = stage_by_unit(plan.stages, [unit.fqn for unit in units])
    in_flight = rounds_in_flight(plan.stages, plan.num_rounds)
    chosen = devices_of(plan, setting.cluster)
    own_units = [[u for u in units if stage_by_fqn[u.fqn] == i] for i in range(len(groups))]
    costs: list[StepCost] = []
    seconds = []
    next_units = (*(units[0] for units in own_units[1:]), None)
    for group, own, after, held in zip(groups, own_units, next_units, in_flight, strict=True):
        positions = tuple(chosen[i] for i in group)
        whole = part_of(tuple(sorted(positions)))
        of_stage = with_units(part_of_hosts(whole, setting.cluster, positions), own)
        alone = replace(
            plan,
            ranks=tuple(plan.ranks[i] for i in group),
            stages=None,
            units=of_stage.workload.planned_units if plan.units else (),
        )
        model = CostModel(
            of_stage,
            in_flight=held,
            receives=bool(costs),
            hands_on_bytes=handed_on_bytes(workload, after),
        )
        costs.append(model.predict(alone))
        for rank, device in zip(alone.ranks, of_stage.cluster.devices, strict=True):
            here = replace(rank, device=device)
            seconds.append(tuple(_unit_seconds(model, here, unit) for unit in own))
    numbers = [tuple(chosen[i] for i in group) for group in groups]
    return PipelinePrice(
        positions=groups,
        costs=tuple(costs),
        hops=tuple(
            hop_between(setting, one, other, units[0], plan.round_size)
            for (one, other), (_, units) in zip(
                pairwise(numbers), pairwise(own_units), strict=True
            )
        ),
        in_flight=in_flight,
        num_rounds=plan.num_rounds,
        names=tuple(rank.device.kind or "device" for rank in plan.ranks),
        units=tuple(seconds),
    )


def _unit_seconds(model: CostModel, rank: RankPlan, unit: Unit) -> UnitSeconds:
    sizes = rank.microbatch_sizes
    forward_s, backward_s = model.unit_seconds(rank.device.kind, unit.kind, sizes)
    again_s = forward_s if rank.recomputes(unit.fqn) else 0.0
    return UnitSeconds(unit.fqn, forward_s, backward_s + again_s)


def with_units(setting: Setting, units: Sequence[Unit]) -> Setting:
    """The setting for a part of the model's units; what no unit owns is in every part."""
    workload = setting.workload
    own = (*units, *(unit for unit in workload.units if not unit.fqn))
    names = {unit.kind for unit in own}
    kinds = tuple(kind for kind in workload.kinds if kind.name in names)
    return replace(setting, workload=replace(workload, units=own, kinds=kinds))


def devices_of(plan: Plan, cluster: Cluster) -> list[int]:
    """For each device of the plan, its position in the cluster: the first that is free."""
    free = dict(enumerate(cluster.devices))
    chosen = []
    for i, rank in enumerate(plan.ranks):
        found = next((at for at, each in free.items() if rank.device.accepts(each)), None)
        if found is None:
            raise ValueError(
                f"plan: ranks[{i}] is for {rank.device}, of which the cluster has no more. "
                "Give the cluster that the plan was made for."
            )
        del free[found]
        chosen.append(found)
    return chosen
