"""Predict whether a cluster is faster without some of its devices.

One kind of device without bfloat16 forces all to float32, whatever the plan gives them to do,
and libraries take more memory on devices that only wait.  So the sets of devices that a plan
may leave idle (``shardhet.planner.idle``) are left out of the cluster here.
"""

from collections.abc import Callable
from math import inf

from shardhet.planner.find import solve
from shardhet.planner.idle import PartPlan, PartSearch, Positions
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.search.search import Effort
from shardhet.pricing.setting import Setting

LEAST_GAIN = 1.02  # smaller gains are within the error of any prediction


def faster_on_fewer(
    setting: Setting,
    whole: PlanSolution,
    *,
    demands: Demands,
    smaller: Callable[[Positions], Setting | None],
    effort: Effort,
    tolerance: float | None = None,
) -> PartPlan | None:
    """The fastest part of the cluster that was found; None if no part beats the whole.

    ``whole`` is the plan for all devices, and ``smaller`` creates the setting of the devices
    at some positions, or None if these are not asked about.
    """

    def solved(positions: Positions, there: Setting, at_most_s: float) -> PlanSolution:
        return solve(
            there,
            global_batch_size=whole.plan.global_batch_size,
            demands=demands.only(positions),
            effort=effort,
            tolerance=tolerance,
            is_bounded=False,
            near=whole.plan.form,
            at_most_s=at_most_s,
        )

    return PartSearch(
        setting=setting,
        global_batch_size=whole.plan.global_batch_size,
        demands=demands,
        whole=whole,
        at_most_s=inf,
        least_gain=LEAST_GAIN,
        slack=LEAST_GAIN,
        smaller=smaller,
        solved=solved,
        keeps_times=False,
    ).run()
