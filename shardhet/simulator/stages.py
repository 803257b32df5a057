"""The price of a plan, stage by stage: what each costs alone, and what they hand each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from shardhet.pricing.cost import CostModel
from shardhet.pricing.hosts import part_of_hosts
from shardhet.pricing.part import part_of as measured_part_of
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.step_cost import RankCost, StepCost
from shardhet.records.cluster import Cluster
from shardhet.records.plan import Plan
from shardhet.records.stages import positions_by_stage, rounds_in_flight, stage_by_unit
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import (
    Hop,
    StageTimes,
    handed_on_bytes,
    hop_of,
    link_between,
    pipeline_s,
    seconds_of_hops,
)

# The scenario of the devices at some positions of a cluster.
PartOf = Callable[[tuple[int, ...]], Scenario]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStage:
    """A stage alone, with all rounds; or a plan without stages."""

    positions: range  # in the plan
    plan: Plan
    model: CostModel  # for the plan
    cost: StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrice:
    """The predicted cost of a plan."""

    parts: tuple[PricedStage, ...]  # by stage
    hops: tuple[Hop, ...] = ()  # between one stage and the next
    in_flight: tuple[int, ...] = ()  # rounds, by stage; () of a plan without stages

    def within(self, budgets: Sequence[int]) -> "PipelinePrice":
        """The same with these memory budgets, by position in the plan."""
        parts = [
            replace(each, cost=each.cost.within([budgets[i] for i in each.positions]))
            for each in self.parts
        ]
        return replace(self, parts=tuple(parts))

    @property
    def times(self) -> tuple[StageTimes, ...]:
        """Seconds of every stage, whose rounds are taken to be alike."""
        return tuple(StageTimes.of(part.cost, part.plan.num_rounds) for part in self.parts)

    @property
    def ranks(self) -> tuple[RankCost, ...]:
        """The cost of every device, in plan order."""
        return tuple(rank for part in self.parts for rank in part.cost.ranks)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, where each stage computes its rounds as its cost says."""
        return pipeline_s(
            self.times,
            seconds_of_hops(self.hops),
            in_flight=self.in_flight or (1,),
            num_rounds=self.parts[0].plan.num_rounds,
        )


def price_of(plan: Plan, scenario: Scenario, part_of: PartOf | None = None) -> PipelinePrice:
    """The price of a plan, with stages or without.

    Devices are in the order of the cluster; those of stages are in the order of the plan, and
    may be a part of the cluster's, whose scenarios ``part_of`` gives.  Raises ``ValueError`` if
    it is for other devices or another model, or if a link between stages is not stated.
    """
    if plan.stages is None:
        model = CostModel(scenario).for_plan(plan)
        everyone, cost = range(plan.world_size), model.predict(plan)
        return PipelinePrice(
            parts=(PricedStage(positions=everyone, plan=plan, model=model, cost=cost),)
        )
    part_of = part_of or partial(measured_part_of, scenario)
    workload, groups = scenario.workload, positions_by_stage(plan.stages)
    units = [unit for unit in workload.units if unit.fqn]
    stage_by_fqn = stage_by_unit(plan.stages, [unit.fqn for unit in units])
    in_flight = rounds_in_flight(plan.stages, plan.num_rounds)
    chosen = devices_of(plan, scenario.cluster)
    own_units = [[u for u in units if stage_by_fqn[u.fqn] == i] for i in range(len(groups))]
    next_units = (*(units[0] for units in own_units[1:]), None)
    parts: list[PricedStage] = []
    for group, own, after, held in zip(groups, own_units, next_units, in_flight, strict=True):
        positions = tuple(chosen[i] for i in group)
        whole = part_of(tuple(sorted(positions)))
        of_stage = with_units(part_of_hosts(whole, scenario.cluster, positions), own)
        alone = replace(
            plan,
            ranks=tuple(plan.ranks[i] for i in group),
            stages=None,
            units=of_stage.workload.planned_units if plan.units else (),
        )
        model = CostModel(
            of_stage,
            in_flight=held,
            receives=bool(parts),
            hands_on_bytes=handed_on_bytes(workload, after),
        ).for_plan(alone)
        cost = model.predict(alone)
        parts.append(PricedStage(positions=group, plan=alone, model=model, cost=cost))
    numbers = [tuple(chosen[i] for i in group) for group in groups]
    return PipelinePrice(
        parts=tuple(parts),
        hops=tuple(
            hop_of(link_between(scenario.cluster, *pair), workload, units[0], plan.round_size)
            for pair, units in zip(pairwise(numbers), own_units[1:], strict=True)
        ),
        in_flight=in_flight,
    )


def with_units(scenario: Scenario, units: Sequence[Unit]) -> Scenario:
    """The scenario for a part of the model's units; what no unit owns is in every part."""
    workload = scenario.workload
    own = (*units, *(unit for unit in workload.units if not unit.fqn))
    names = {unit.kind for unit in own}
    kinds = tuple(kind for kind in workload.kinds if kind.name in names)
    return replace(scenario, workload=replace(workload, units=own, kinds=kinds))


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
