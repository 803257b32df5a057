"""A pipeline at other speeds: stages keep devices and units, and are planned anew inside."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.search.search import DEFAULT_EFFORT
from shardhet.planner.stages.plans import StagePlans
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm
from shardhet.records.stages import rounds_in_flight, stage_by_unit


def planned_again(
    plan: Plan,
    scenario: Scenario,
    places: Sequence[int],
    *,
    stages: Collection[int],
    constraints: Constraints,
    tolerance: float | None = None,
) -> Plan:
    """The plan with the batches and the state of some ``stages`` as they are best.

    ``places`` are the devices' positions in the cluster, by position in the plan, and
    ``constraints`` are of positions in the cluster.  Raises ``PlanError`` where nothing fits.
    """
    assert plan.stages is not None
    units = [unit for unit in scenario.workload.units if unit.fqn]
    stage_by_fqn = stage_by_unit(plan.stages, [unit.fqn for unit in units])
    units.sort(key=lambda unit: stage_by_fqn[unit.fqn])
    solver = StagePlans(
        scenario.cluster,
        partial(part_of, scenario),
        tuple(units),
        plan.global_batch_size,
        constraints,
    )
    held = rounds_in_flight(plan.stages, plan.num_rounds)
    ranks, stop = list(plan.ranks), 0
    for stage, group in enumerate(plan.groups):
        first = stop
        stop += sum(stage_by_fqn[unit.fqn] == stage for unit in units)
        if stage not in stages:
            continue
        there = tuple(sorted(places[i] for i in group))
        found = solver.solved(
            there,
            first,
            stop,
            StepForm.of(plan),
            held[stage],
            effort=DEFAULT_EFFORT,
            tolerance=tolerance,
        )
        if found is None:
            raise PlanError(f"stage {stage}: its units do not fit on its devices")
        anew = found.solution.plan
        if (anew.round_size, anew.last_round_size) != (plan.round_size, plan.last_round_size):
            raise PlanError(
                f"stage {stage}: rounds would have {anew.round_size} samples, and those of the "
                f"other stages have {plan.round_size}"
            )
        for i in group:
            old, new = ranks[i], anew.ranks[there.index(places[i])]
            ranks[i] = replace(new, device=old.device, optimizer_on_host=old.optimizer_on_host)
    return replace(plan, ranks=tuple(ranks))
