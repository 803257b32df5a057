"""Of the plans that are nearly as fast as the fastest, the one that a person would choose.

Among the plans within a tolerance, in this order:

1. Alike devices do alike, if they do in any of these plans.
2. No budget is filled beyond ``FULL``, if that is not needed.
3. As few units as possible are recomputed.
4. The fullest device is as empty as possible: the state is spread to one level of all budgets.

The first two are searched for like any plan.  The others are settled by HiGHS, near the plan
that was found (``shardhet.planner.search.assignment``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardhet.planner.candidates.table import CandidateTable
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.problem import Limits, Problem, Value
from shardhet.planner.problem.solution import NoRoomForRowsError, PlanError, PlanSolution
from shardhet.planner.receivers import Computing, depends_on_shares
from shardhet.planner.search.assignment import Fullness, assign
from shardhet.planner.shares import plans_of_choices, priced
from shardhet.planner.task import Task, search_table, solve_form, unevenness_of
from shardhet.pricing.cost import CostModel
from shardhet.records.plan import RankPlan

TOLERANCE = 5e-3  # of the step: less than any prediction is wrong by
FULL = 0.97  # of a budget
ROUNDING = 1e-9


def preferred(best: PlanSolution, tasks: Sequence[Task], tolerance: float) -> PlanSolution:
    """The plan to prefer to ``best``, the fastest; each of ``tasks`` is one form of plans."""
    limit_s = (1 + tolerance) * best.predicted.step_time_s * (1 + ROUNDING)
    for demands in _wishes(tasks[0]):
        found = [
            each
            for task in tasks
            if (each := _within(replace(task, demands=demands, at_most_s=limit_s)))
        ]
        if found:
            chosen = min(found, key=lambda each: _burden(each, tasks[0].model))
            budgets = tasks[0].demands.budgets(tasks[0].model.cluster)
            return replace(
                chosen,
                predicted=chosen.predicted.within(budgets),
                lower_bound_s=best.lower_bound_s,
                fastest_s=best.predicted.step_time_s,
            )
    return replace(best, fastest_s=best.predicted.step_time_s)


def _wishes(task: Task) -> Iterator[Demands]:
    """The demands with what is wished besides, the most first."""
    cluster, demands = task.model.cluster, task.demands
    budgets = demands.budgets(cluster)
    fuller = demands.with_budgets({i: int(FULL * each) for i, each in enumerate(budgets)})
    alike = _alike(task)
    if alike != demands.equal:
        yield replace(fuller, equal=alike)
        yield replace(demands, equal=alike)
    yield fuller
    yield demands


def _alike(task: Task) -> Sequence[Sequence[int]]:
    """Sets of equal devices: those demanded, and the rest by role."""
    demands = task.demands
    held = {i for each in demands.equal for i in each}
    members: dict[int, list[int]] = {}
    for i, role in enumerate(demands.roles(task.model.cluster)):
        if i not in held:
            members.setdefault(id(role), []).append(i)
    alike = [tuple(each) for each in members.values() if len(each) > 1]
    return (*demands.equal, *alike) if alike else demands.equal


def _burden(solution: PlanSolution, model: CostModel) -> tuple[int, float]:
    """Units that devices recompute, and how full the fullest device is."""
    recomputed = sum(map(model.num_recomputed, solution.plan.ranks))
    return recomputed, max(
        each.memory.total_bytes / max(1, each.memory_budget_bytes)
        for each in solution.predicted.ranks
    )


def _within(task: Task) -> PlanSolution | None:
    """The plan to prefer of those that meet the demands and are fast enough, if any does."""
    model, demands = task.model, task.demands
    computing, met = Computing.every(demands, model.cluster.world_size), None
    if depends_on_shares(model):
        met = _fast_enough(task)
        if met is None:
            return None
        computing = Computing.as_in(met, demands, unevenness_of(model, met))
    builder = task.builder(computing)
    try:
        table, found, _ = search_table(builder, task.effort, task.at_most_s)
    except NoRoomForRowsError:
        return met or _fast_enough(task)
    except PlanError:
        return met
    value = table.rounded.evaluate(found.choices)
    if value is None or value.objective_s > task.at_most_s:
        return met or _fast_enough(task)
    limits = _lengthened(value, table.problem, task.at_most_s)
    wide = builder.table(task.at_most_s, within_s=limits.phases_s)
    if wide.problem.counts.max() == 1:
        limits = replace(
            limits,
            totals_s=wide.rounded.totals_above(value.phases_s),
            total_s=sum(value.phases_s) + task.at_most_s - value.objective_s,
        )
    assigned = assign(
        wide.rounded, limits, value.phases_s, _fullness(task, wide), task.at_most_s
    )
    tried = [(table, found.choices)]
    if assigned is not None:
        tried.insert(0, (wide, assigned))
    for of_table, choices in tried:
        problem = of_table.rounded
        phases_s = sum(problem.phases_of(choices))
        optimizer_s = max(value.optimizer_s, task.at_most_s - problem.fixed_s - phases_s)
        plans = plans_of_choices(model, demands, of_table, choices, optimizer_s)
        spread = [priced(plan, model, demands) for plan in dict.fromkeys(plans)]
        fast = [
            each
            for each in spread
            if each.fits and each.predicted.step_time_s <= task.at_most_s
        ]
        if fast:
            return min(fast, key=lambda each: _burden(each, model))
    return met or _fast_enough(task)


def _fast_enough(task: Task) -> PlanSolution | None:
    """The fastest plan of the task, where room for rows is tight or links depend on shares."""
    solutions, _, _ = solve_form(task)
    fast = [each for each in solutions if each.predicted.step_time_s <= task.at_most_s]
    return fast[0] if fast else None


def _lengthened(value: Value, problem: Problem, at_most_s: float) -> Limits:
    """Limits on candidates of a step of at most ``at_most_s``.

    Where devices of a group may differ, the sum of the limits is within it.  Else any phase
    may take all the time that is left, while the others take as long as those of ``value``.
    """
    left_s = max(0.0, at_most_s - value.objective_s)
    if problem.counts.max() > 1:
        left_s /= 2 * problem.num_phases  # half is for the optimizer
    return Limits(tuple(each + left_s for each in value.phases_s))


def _fullness(task: Task, table: CandidateTable) -> Fullness:
    model, demands, problem = task.model, task.demands, table.problem
    numbers = np.array(
        [
            model.num_recomputed(
                RankPlan(microbatch_sizes=(), state_share=0.0, recomputed_units=patterns)
            )
            for patterns in table.recompute_choices
        ]
    )
    recomputed = np.zeros_like(problem.batch)
    budget = np.zeros(len(problem.groups))
    is_known = np.zeros(len(problem.groups), dtype=bool)
    for g, group in enumerate(problem.groups):
        positions = table.bundles[g][0]
        of_members = [demands.budget_bytes(model.cluster, i) for i in positions]
        budget[g] = len(positions) * max(1, min(of_members)) / model.bytes_per_stored_numel
        is_known[g] = max(of_members) == min(of_members) and not any(
            demands.caps_state(i) for i in positions
        )
        counts = numbers[table.choices[g]] * (group.batch > 0) * len(positions)
        recomputed[g, : len(counts)] = counts
    return Fullness(recomputed, budget, is_known)
