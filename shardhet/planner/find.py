"""``find_plan``: the plan to prefer of the fastest that fit, with a bound on any plan."""

from dataclasses import replace
from math import inf

from shardhet.planner.preference import TOLERANCE, preferred
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.planner.task import Task, search_table, solve_form, spared_s
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan

NO_GAIN = 1e-6  # of the step: not worth a search, but part of the bound
MAX_DEVICES, MAX_UNITS = 2**16, 2**14
NO_DEMANDS = Demands()


def find_plan(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
    tolerance: float = TOLERANCE,
) -> Plan:
    """The plan to prefer of those within ``tolerance`` of the fastest; ``solve`` proves it."""
    return solve(
        setting,
        global_batch_size=global_batch_size,
        demands=demands,
        effort=effort,
        tolerance=tolerance,
    ).plan


def solve(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
    tolerance: float | None = None,
    is_bounded: bool = True,
) -> PlanSolution:
    """The fastest plan that fits every budget, with a bound on what any plan can reach.

    With a ``tolerance``, the plan to prefer of those that are slower by at most this part
    (``shardhet.planner.preference``).  Unless ``is_bounded``, the bound holds only for plans
    that meet demanded shares to the element, which takes a search less.  Raises ``PlanError``
    with the nearest miss if nothing fits.
    """
    if global_batch_size < 1:
        raise ValueError(
            f"plan: global_batch_size is {global_batch_size} but must be at least 1."
        )
    _check_size(setting)
    demands.check(setting.cluster.world_size)
    demands.check_batches(setting.cluster.world_size, global_batch_size)
    tasks: list[Task] = []
    found: list[PlanSolution] = []
    bounds_s: list[float] = []
    missed: PlanError | None = None
    for reshards in (True, False):
        model = CostModel(setting, reshards)
        if found and spared_s(model) <= NO_GAIN * found[0].predicted.step_time_s:
            bounds_s.append(min(bounds_s) - spared_s(model))
            continue
        task = Task(model, global_batch_size, demands, effort, is_bounded)
        solutions, bound_s, error = solve_form(task)
        if solutions:
            tasks.append(task)
        found += solutions
        missed = missed or error
        bounds_s.append(bound_s)
    if not found:
        assert missed is not None
        missed.lower_bound_s = min(bounds_s)
        raise missed
    best = min(found, key=lambda each: each.predicted.step_time_s)
    best = replace(best, lower_bound_s=min(bounds_s))
    return best if tolerance is None else preferred(best, tasks, tolerance)


def _check_size(setting: Setting) -> None:
    """Refuse what would take minutes or more: ``PlanError``."""
    for number, most, what in (
        (setting.cluster.world_size, MAX_DEVICES, "devices"),
        (len(setting.workload.units), MAX_UNITS, "units of the model"),
    ):
        if number > most:
            raise PlanError(
                f"plan: {number:,} {what} but plans are searched for up to {most:,}. Plan for "
                "a part of them."
            )


def least_step_s(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
    at_most_s: float = inf,
) -> float:
    """The step time of the best plan before its shares are rounded to rows, without the plan.

    Communication is as with even shares.  Returns ``at_most_s`` if nothing is faster, which
    saves candidates that compute longer than that.
    """
    demands.check(setting.cluster.world_size)
    for reshards in (True, False):
        task = Task(CostModel(setting, reshards), global_batch_size, demands, effort)
        try:
            _, found, _ = search_table(task.builder(), effort, at_most_s)
        except PlanError:
            continue
        at_most_s = min(at_most_s, found.value.objective_s)
    return at_most_s
