"""Simpler planners, for comparison with the best plan.

``even``          every device computes and stores the same (stock FSDP, well tuned)
``compute_only``  batches follow compute speed, state is even
``memory_only``   batches are even, state follows free memory
Each runs the search of ``solve`` over fewer candidates, so it finds the best plan of its form.
Cephalo's own programme is in ``experiments/planner``.
"""

from dataclasses import replace
from functools import partial

from shardhet.planner.find import NO_DEMANDS, solve
from shardhet.planner.problem.demands import NO_LIMITS, Demands
from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.pricing.setting import Setting


def _solve_as(
    setting: Setting,
    *,
    global_batch_size: int,
    has_even_batches: bool,
    has_even_state: bool,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
) -> PlanSolution:
    """The best plan of one form that also meets ``demands``."""
    if has_even_batches:
        demands = _with_even_batches(demands, setting.cluster.world_size, global_batch_size)
    if has_even_state:
        limits = {i: replace(each, state_share=None) for i, each in demands.limits.items()}
        demands = replace(demands, limits=limits)
    return solve(
        setting,
        global_batch_size=global_batch_size,
        demands=replace(demands, has_even_state=has_even_state),
        effort=effort,
        is_bounded=False,
    )


even = partial(_solve_as, has_even_batches=True, has_even_state=True)
compute_only = partial(_solve_as, has_even_batches=False, has_even_state=True)
memory_only = partial(_solve_as, has_even_batches=True, has_even_state=False)


def _with_even_batches(demands: Demands, world_size: int, global_batch_size: int) -> Demands:
    """Demand the same batch of every device; the remainder goes to the first devices."""
    each, rest = divmod(global_batch_size, world_size)
    limits = {
        position: replace(
            demands.limits.get(position, NO_LIMITS), rank_batch_size=each + (position < rest)
        )
        for position in range(world_size)
    }
    # The remainder may separate devices that must be equal.
    return replace(demands, limits=limits, equal=() if rest else demands.equal)
