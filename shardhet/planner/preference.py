"""Of the plans that are nearly as fast as the fastest, the one that a person would choose.

Among the plans within a tolerance, in this order:

1. No budget is filled beyond ``FULL``, if that is not needed.
2. Alike devices do alike, if they do in any of these plans.
3. There is one round, as few units as possible are recomputed, there are few rounds.
4. The fullest device is as empty as possible: the state is spread to one level of all budgets.

The first two are searched for like any plan.  The others are settled by HiGHS, near the plan
that was found (``shardhet.planner.search.assignment``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from shardhet.planner.candidates.table import CandidateTable
from shardhet.planner.problem.constraints import NO_LIMITS, Constraints
from shardhet.planner.problem.problem import Limits, Problem, Value
from shardhet.planner.problem.solution import NoRoomForRowsError, PlanError, PlanSolution
from shardhet.planner.receivers import Computing, depends_on_shares
from shardhet.planner.search.assignment import Fullness, assign
from shardhet.planner.shares import plans_of_choices, priced
from shardhet.planner.task import FormTask, search_table, solve_form, unevenness_of
from shardhet.pricing.cost import CostModel
from shardhet.records.cluster import Cluster
from shardhet.records.plan import RankPlan

FULL = 0.97  # of a budget
ROUNDING = 1e-9


Bounded = Sequence[tuple[float, FormTask]]  # forms, with bounds on their plans


def preferred(best: PlanSolution, pools: Sequence[Bounded], limit_s: float) -> PlanSolution:
    """The plan to prefer to ``best``, the fastest of all forms, within ``limit_s``.

    Forms of a later pool are looked at if those before have nothing that is wished.
    """
    best_s, most_s = best.fastest_s or best.predicted.step_time_s, limit_s
    limit_s *= 1 + ROUNDING
    tasks = [[task for bound_s, task in each if bound_s <= limit_s] for each in pools]
    _, first = pools[0][0]
    model, constraints = first.model, first.constraints
    for wish, pool in product(_wishes(constraints, model), tasks):
        few_first = sorted(pool, key=lambda task: task.rounds.number)
        wished = [replace(wish.of(task), cutoff_s=limit_s) for task in few_first]
        found: list[PlanSolution] = []
        tight: list[FormTask] = []
        for task in wished:
            number = task.rounds.number
            if any(
                _complexity(each, model) <= (number > 1, 0.0, number, 0.0) for each in found
            ):
                break  # no plan of more rounds is preferred
            try:
                found += [each] if (each := _within(task)) else []
            except NoRoomForRowsError:
                tight.append(task)
        if not found:
            found = [each for task in tight if (each := _fast_enough(task))]
        if found:
            chosen = min(found, key=lambda each: _complexity(each, model))
            chosen = replace(
                chosen,
                predicted=chosen.predicted.within(constraints.budgets(model.cluster)),
                lower_bound_s=min(best.lower_bound_s, chosen.predicted.step_time_s),
                fastest_s=best_s,
            )
            if chosen.predicted.step_time_s < best_s * (1 - ROUNDING):
                # Last rounds that are smaller are not searched exactly.
                limit_s = most_s * chosen.predicted.step_time_s / best_s
                return preferred(replace(chosen, fastest_s=None), pools, limit_s)
            return chosen
    return replace(best, fastest_s=best_s)


def unmet_preferences(
    solution: PlanSolution, constraints: Constraints, cluster: Cluster
) -> tuple[bool, bool, int, float]:
    """Sort key: the unmet preferences (a full device, unlike work on alike devices), then
    fewer idle devices, then the step time.
    """
    ranks = solution.plan.ranks
    doing = {
        id(rank): (
            rank.microbatch_sizes,
            (rank.recomputed_units, rank.tiled_units),
            rank.state_share > 0,
        )
        for rank in ranks
    }
    sets = ({id(ranks[i]) for i in each} for each in _alike(constraints, cluster))
    are_unlike = any(len({doing[each] for each in of_set}) > 1 for of_set in sets)
    num_active = sum(bool(rank.microbatch_sizes or rank.state_share > 0) for rank in ranks)
    return _fullest(solution) > FULL, are_unlike, -num_active, solution.predicted.step_time_s


def _fullest(solution: PlanSolution) -> float:
    """The part of its budget that the fullest device fills."""
    return max(
        each.memory.total_bytes / max(1, each.memory_budget_bytes)
        for each in solution.predicted.distinct_ranks
    )


@dataclass(frozen=True, slots=True)
class _Preference:
    """What is wished besides the constraints."""

    equal: Sequence[Sequence[int]]
    part: float  # of every budget that may be filled

    def of(self, task: FormTask) -> FormTask:
        """The task with the wish."""
        scenario, constraints = task.model.scenario, replace(task.constraints, equal=self.equal)
        if self.part < 1:
            cluster, stated = scenario.cluster.with_part_of_budgets(self.part)
            for i, each in constraints.limits.items():
                if each.memory_budget_bytes is not None:
                    budget = int(self.part * each.memory_budget_bytes)
                    stated[i] = min(budget, stated.get(i, budget))
            constraints = constraints.with_budgets(stated)
            scenario = replace(scenario, cluster=cluster)
        return replace(
            task, model=replace(task.model, scenario=scenario), constraints=constraints
        )


def _wishes(constraints: Constraints, model: CostModel) -> Iterator[_Preference]:
    """The most first."""
    alike = _alike(constraints, model.cluster)
    for part in (FULL, 1.0):
        for equal in dict.fromkeys((alike, tuple(map(tuple, constraints.equal)))):
            yield _Preference(equal, part)


def _alike(constraints: Constraints, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Sets of equal devices: those demanded, and the rest by role."""
    held = {i for each in (*constraints.equal, *constraints.context_groups) for i in each}
    members: dict[int, list[int]] = {}
    for i, role in enumerate(constraints.roles(cluster)):
        if i not in held:
            members.setdefault(id(role), []).append(i)
    alike = [tuple(each) for each in members.values() if len(each) > 1]
    return (*map(tuple, constraints.equal), *alike)


def _complexity(solution: PlanSolution, model: CostModel) -> tuple[bool, float, int, float]:
    """Whether there are rounds, how many units are recomputed, how many rounds there are, and
    how full the fullest device is.
    """
    recomputed = sum(_num_treated(model, rank) for rank in solution.plan.ranks)
    number = solution.plan.num_rounds
    return number > 1, recomputed, number, _fullest(solution)


def _num_treated(model: CostModel, rank: RankPlan) -> float:
    """Units that are recomputed; one whose inputs are on the host counts as one and a half.

    An optimizer on the host counts as all units, and tiles as half of them.
    """
    number = model.num_recomputed(rank) * (1.5 if rank.inputs_on_host else 1.0)
    of_all = rank.optimizer_on_host + 0.5 * bool(rank.tiled_units)
    return number + len(model.visited_units) * of_all


def _within(task: FormTask) -> PlanSolution | None:
    """The plan to prefer of those that meet the constraints and are fast enough, if one does.

    Raises ``NoRoomForRowsError`` if perhaps some does that leaves less room for rows.
    """
    model, constraints = task.model, task.constraints
    computing, fast = Computing.every(constraints, model.cluster.world_size), None
    if depends_on_shares(model):
        fast = _fast_enough(task)
        if fast is None:
            return None
        computing = Computing.as_in(fast, constraints, unevenness_of(model, fast))
    builder = task.builder(computing)
    try:
        table, found, _ = search_table(builder, task.effort, task.cutoff_s)
    except NoRoomForRowsError:
        return _fast_or_tight(fast)
    except PlanError:
        return fast
    value = table.rounded.evaluate(found.choices)
    if value is None or value.objective_s > task.cutoff_s:
        return _fast_or_tight(fast)
    limits = _lengthened(value, table.problem, task.cutoff_s)
    wide = builder.table(task.cutoff_s, within_s=limits.phases_s)
    if wide.problem.counts.max() == 1:
        limits = replace(
            limits,
            totals_s=wide.rounded.totals_above(value.phases_s),
            total_s=sum(value.phases_s) + task.cutoff_s - value.objective_s,
        )
    assigned = assign(
        wide.rounded, limits, value.phases_s, _fullness(task, wide), task.cutoff_s
    )
    tried = [(table, found.choices)]
    if assigned is not None:
        tried.insert(0, (wide, assigned))
    for of_table, choices in tried:
        problem = of_table.rounded
        phases_s = sum(problem.phases_of(choices))
        optimizer_s = max(value.optimizer_s, task.cutoff_s - problem.fixed_s - phases_s)
        for plan in plans_of_choices(
            model, constraints, of_table, choices, optimizer_s, to_one_level=True
        ):
            solution = priced(plan, model, constraints)
            if solution.fits and solution.predicted.step_time_s <= task.cutoff_s:
                return solution
    return _fast_or_tight(fast)


def _fast_or_tight(fast: PlanSolution | None) -> PlanSolution:
    if fast is None:
        raise NoRoomForRowsError("plan: no share fits once it is rounded to rows.")
    return fast


def _fast_enough(task: FormTask) -> PlanSolution | None:
    """The fastest plan of the task, where room for rows is tight or links depend on shares."""
    # A bound on other plans is of use only where it says which shares to look at next.
    solutions, _, _ = solve_form(replace(task, is_bounded=depends_on_shares(task.model)))
    fast = [each for each in solutions if each.predicted.step_time_s <= task.cutoff_s]
    return fast[0] if fast else None


def _lengthened(value: Value, problem: Problem, cutoff_s: float) -> Limits:
    """Limits on candidates of a step of at most ``cutoff_s``.

    Where devices of a group may differ, the sum of the limits is within it.  Else any phase
    may take all the time that is left, while the others take as long as those of ``value``.
    """
    left_s = max(0.0, cutoff_s - value.objective_s)
    if problem.counts.max() > 1:
        left_s /= 2 * problem.num_phases  # half is for the optimizer
    return Limits(tuple(each + left_s for each in value.phases_s))


def _fullness(task: FormTask, table: CandidateTable) -> Fullness:
    model, constraints, problem = task.model, task.constraints, table.problem
    exact = constraints.state_shares(model.cluster.world_size)
    numbers = np.array([_num_treated(model, each) for each in table.policies])
    recomputed = np.zeros_like(problem.batch)
    budget = np.zeros(len(problem.groups))
    is_known = np.zeros(len(problem.groups), dtype=bool)
    for g, group in enumerate(problem.groups):
        positions = table.equal_groups[g][0]
        of_members = [constraints.budget_bytes(model.cluster, i) for i in positions]
        budget[g] = len(positions) * max(1, min(of_members)) / model.bytes_per_stored_numel
        is_known[g] = max(of_members) == min(of_members) and not any(
            constraints.has_even_state
            or i in exact
            or constraints.member(i)
            or constraints.limits.get(i, NO_LIMITS).max_state_share is not None
            for i in positions
        )
        counts = numbers[table.choices[g]] * (group.batch > 0) * len(positions)
        recomputed[g, : len(counts)] = counts
    return Fullness(recomputed, budget, is_known)
