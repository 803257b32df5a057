"""The plan with the least memory on some devices, among those that are fast enough.

It is the smallest fraction u of the memory budgets at a demanded throughput: minimise u such
that bytes_i <= u budget_i for all (or the given) devices i, and samples per second >= the
demanded throughput.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardhet.planner.find import NO_DEMANDS, solve
from shardhet.planner.problem.demands import Demands, check_position
from shardhet.planner.problem.solution import NoRoomForRowsError, PlanError, PlanSolution
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.pricing.setting import Setting

MEMORY_PRECISION = 1e-3  # of the budget fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """A plan with a bound on how little memory any plan needs."""

    solution: PlanSolution
    budget_fraction: float  # u: no counted device uses more than this part of its budget
    lower_bound: float  # no plan with the demanded throughput has a smaller u


def least_memory(
    setting: Setting,
    *,
    global_batch_size: int,
    min_samples_per_s: float,
    devices: Sequence[int] = (),
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
) -> LeastMemory:
    """The plan whose fullest device is least full, among those that are fast enough.

    Only ``devices`` (positions) count, or all if it is empty; the others may fill their
    budgets.  Raises ``PlanError`` if even the fastest plan is too slow.
    """
    demands.check(setting.cluster.world_size)
    for i in devices:
        check_position("devices", i, setting.cluster.world_size)
    spared = devices or range(setting.cluster.world_size)
    budgets = [
        demands.budget_bytes(setting.cluster, i) for i in range(setting.cluster.world_size)
    ]

    def solved(fraction: float) -> PlanSolution:
        return solve(
            setting,
            global_batch_size=global_batch_size,
            demands=demands.with_budgets({i: int(fraction * budgets[i]) for i in spared}),
            effort=effort,
        )

    def fraction_of(solution: PlanSolution) -> float:
        ranks = solution.predicted.ranks
        return max(ranks[i].memory.total_bytes / max(1, budgets[i]) for i in spared)

    def attempt(fraction: float) -> tuple[PlanSolution | None, bool]:
        """A plan that is fast enough, if one was found, and whether none can exist."""
        try:
            found = solved(fraction)
        except PlanError as error:
            return None, not isinstance(error, NoRoomForRowsError)
        if found.samples_per_s >= min_samples_per_s:
            return found, False
        return None, found.lower_bound_s > global_batch_size / min_samples_per_s

    best = solved(1.0)
    if best.samples_per_s < min_samples_per_s:
        raise PlanError(
            f"plan: {min_samples_per_s:.6g} samples/s are demanded but the fastest plan "
            f"reaches {best.samples_per_s:.6g}. Lower the throughput that is demanded."
        )
    high, low, proven = fraction_of(best), 0.0, 0.0
    while high - low > MEMORY_PRECISION:
        middle = (low + high) / 2
        found, is_impossible = attempt(middle)
        if found is not None:
            best, high = found, fraction_of(found)
        else:
            low, proven = middle, middle if is_impossible else proven
    while low - proven > MEMORY_PRECISION:  # neither found nor impossible in between
        middle = (proven + low) / 2
        if attempt(middle)[1]:
            proven = middle
        else:
            low = middle
    solution = replace(best, predicted=best.predicted.within(budgets))
    return LeastMemory(solution=solution, budget_fraction=high, lower_bound=proven)
