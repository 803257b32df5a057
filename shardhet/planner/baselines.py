"""Simpler planners, for comparison with the best plan.

``even``          every device computes and stores the same (stock FSDP, well tuned)
``compute_only``  batches follow compute speed, state is even
``memory_only``   batches are even, state follows free memory
``one_round``     anything, in a single round
Each runs the search of ``solve`` over fewer candidates, so it finds the best plan of its form.
"""

from dataclasses import replace
from functools import partial

from shardhet.planner.find import NO_CONSTRAINTS, solve
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.pricing.scenario import Scenario
from shardhet.records.schedule import StepForm


def _solve_as(
    scenario: Scenario,
    *,
    global_batch_size: int,
    form: Constraints,
    constraints: Constraints = NO_CONSTRAINTS,
    effort: Effort = DEFAULT_EFFORT,
    near: StepForm | None = None,
) -> PlanSolution:
    """The best plan of one form that also meets ``constraints``; ``near`` as in ``solve``."""
    if form.has_even_state:
        limits = {
            i: replace(each, state_share=None, max_state_share=None)
            for i, each in constraints.limits.items()
        }
        constraints = replace(constraints, limits=limits)
    return solve(
        scenario,
        global_batch_size=global_batch_size,
        constraints=replace(
            constraints,
            has_even_batches=form.has_even_batches,
            has_even_state=form.has_even_state,
            max_rounds=form.max_rounds or constraints.max_rounds,
        ),
        effort=effort,
        is_bounded=False,
        near=near,
    )


even = partial(_solve_as, form=Constraints(has_even_batches=True, has_even_state=True))
compute_only = partial(_solve_as, form=Constraints(has_even_state=True))
memory_only = partial(_solve_as, form=Constraints(has_even_batches=True))
one_round = partial(_solve_as, form=Constraints(max_rounds=1))
