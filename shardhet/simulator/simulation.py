"""Simulate one step of a plan, event by event: compute, waits, transfers and memory.

Ranks go through the ops of ``shardhet.records.schedule``, as in the runtime.  Compute is slowed
by ``overlap_slowdown`` while a collective of its stage is running.  Ranks that compute the same
are simulated once (``simulator.actors``).
"""

from shardhet.pricing.scenario import Scenario
from shardhet.records.ops import ops_of
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm, straight_schedule
from shardhet.simulator.actors import StageOps, make_actors
from shardhet.simulator.loop import Loop
from shardhet.simulator.stages import PartOf, PipelinePrice, PricedStage, price_of
from shardhet.simulator.timeline import (
    Event,
    MemoryPoint,
    RankTimeline,
    Timeline,
    Work,
    merged,
)


def simulate(plan: Plan, scenario: Scenario, part_of: PartOf | None = None) -> Timeline:
    """The predicted timeline of one optimizer step.

    ``part_of`` gives the scenarios of stages, see ``price_of``.
    """
    return timeline_of(price_of(plan, scenario, part_of))


def timeline_of(price: PipelinePrice) -> Timeline:
    """The predicted timeline of one step of a plan with this price."""
    stages = [_ops_of(i, part, price.in_flight) for i, part in enumerate(price.parts)]
    actors = [
        actor
        for part, of_stage in zip(price.parts, stages, strict=True)
        for actor in make_actors(part.model, part.plan, of_stage, part.positions)
    ]
    for i, actor in enumerate(actors):
        actor.index = i
        actor.hold(0.0, actor.resting_bytes, actor.numel_bytes[0])
    loop = Loop(stages, actors, [(hop.seconds, hop.back_s) for hop in price.hops])
    loop.run()
    start_s, costs = loop.clock_s, price.ranks
    end_s = start_s + max(cost.optimizer_s for cost in costs)
    ranks: dict[tuple[int, float], RankTimeline] = {}
    by_position: dict[int, RankTimeline] = {}
    for i, actor in enumerate(actors):
        actor.hold(start_s, actor.resting_bytes, actor.numel_bytes[-1])
        actor.hold(end_s, actor.resting_bytes, actor.numel_bytes[0])
        for position in actor.positions:
            cost = costs[position]
            key = (i, cost.optimizer_s)
            if key not in ranks:
                ranks[key] = actor.timeline(
                    start_s, start_s + cost.optimizer_s, end_s, stored_numel=cost.stored_numel
                )
            by_position[position] = ranks[key]
    return Timeline(
        ranks=tuple(
            by_position.get(position) or _of_idle(stage, part, i, end_s)
            for stage, part in enumerate(price.parts)
            for i, position in enumerate(part.positions)
        ),
        collectives=merged(loop.sent),
        step_time_s=end_s,
    )


def _ops_of(stage: int, part: PricedStage, in_flight: tuple[int, ...]) -> StageOps:
    model, units = part.model, part.model.visited_units
    schedule = straight_schedule(len(units), StepForm.of(part.plan), (in_flight or (1,))[stage])
    return StageOps(
        stage=stage,
        schedule=schedule,
        # Of a device whose host runs ahead there is no overhead (``profiler.turns``).
        ops=ops_of(schedule, stage, in_flight, in_one_order=not model.profile.unit_overhead_s),
        unit_fqns=[unit.fqn for unit in units],
        seconds_of=model.launch_seconds(part.plan),
    )


def _of_idle(stage: int, part: PricedStage, index: int, end_s: float) -> RankTimeline:
    """What a rank without samples and rows does: it waits for the end of the step."""
    kind = part.model.cluster.devices[index].kind
    end = Event(unit="", work=Work.AGREE, start_s=0.0, end_s=end_s)
    held_bytes = part.model.profile.device(kind).reserved_bytes
    return RankTimeline(
        name=kind or "device",
        stage=stage,
        events=merged([end]),
        memory=(MemoryPoint(time_s=0.0, nbytes=held_bytes),),
    )
