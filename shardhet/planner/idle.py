"""Plans in which some devices take no part, which are planned for the others alone.

A device without samples and rows takes part in no collective, so a plan is priced as that of
the cluster without it.  The search prices all plans as if all devices took part.  Where the
best of these leaves devices idle, or demands do, the others are planned for once more, and the
plan is that of all devices.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.turns import taking_part
from shardhet.records.plan import RankPlan


def active_positions(solution: PlanSolution) -> tuple[int, ...]:
    """The positions that take part."""
    stored = [rank.stored_numel for rank in solution.predicted.ranks]
    return taking_part(solution.plan.ranks, stored)


def with_idle(
    solution: PlanSolution, positions: Sequence[int], prices: CostModel, demands: Demands
) -> PlanSolution | None:
    """A plan of the devices at some positions as a plan of all; None if it does not fit.

    ``prices`` and ``demands`` are those of all devices.
    """
    cluster = prices.cluster
    taken = dict(zip(positions, solution.plan.ranks, strict=True))
    idle = RankPlan(microbatch_sizes=(), state_share=0.0)
    ranks = tuple(
        taken[i] if i in taken else replace(idle, device=device)
        for i, device in enumerate(cluster.devices)
    )
    plan = replace(solution.plan, ranks=ranks)
    predicted = prices.predict(plan).within(demands.budgets(cluster))
    found = replace(solution, plan=plan, predicted=predicted)
    return found if found.fits else None
