"""What a plan loses if devices are not as fast as the profile says, and plans that lose less.

A disturbance is one kind of device that is faster or slower than the profile says, by ``OFF``.
Under a disturbance d a plan takes t_d(plan), and the best plan that knew of it b_d.  The plan
loses

    max over d of  t_d(plan) / b_d - 1.

Memory does not depend on speed, so a plan that fits fits under every disturbance.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from shardhet.planner.advice.explain import Situation, at_other_speed
from shardhet.planner.find import solve
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.search.search import Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan

OFF = 0.2
MAX_KINDS = 8  # every disturbance takes a search


Disturbed = Mapping[tuple[str, float], Setting]  # by the kind at another speed, and its speed


@dataclass(frozen=True, slots=True)
class Loss:
    """What a plan loses at most, and under which disturbance."""

    relative: float  # 0.05: the step is 5 % longer than that of the best plan
    device_kind: str
    speed: float


def disturbances(setting: Setting, *, off: float = OFF) -> Disturbed:
    """Every kind of device slower and faster; none if the kinds are too many, or only one.

    One kind at another speed changes the step, but hardly the best plan.
    """
    kinds = dict.fromkeys(str(device.kind) for device in setting.cluster.devices)
    if not 1 < len(kinds) <= MAX_KINDS:
        return {}
    here = Situation(setting=setting, demands=Demands())
    return {
        (kind, speed): at_other_speed(here, frozenset({kind}), speed).setting
        for kind in kinds
        for speed in (1 - off, 1 + off)
    }


def loss_of(plan: Plan, disturbed: Disturbed, *, demands: Demands, effort: Effort) -> Loss:
    """What the plan loses at most; ``disturbed`` must not be empty."""
    worst = Loss(0.0, *next(iter(disturbed)))
    for (kind, speed), setting in disturbed.items():
        step_s = CostModel(setting).predict(plan).step_time_s
        # Only a larger loss than the worst so far matters.
        at_most_s = step_s / (1 + worst.relative)
        with suppress(PlanError):  # if it is no larger
            best = solve(
                setting,
                global_batch_size=plan.global_batch_size,
                demands=demands,
                effort=effort,
                is_bounded=False,
                near=plan.form,
                at_most_s=at_most_s,
            )
            worst = Loss(step_s / best.predicted.step_time_s - 1, kind, speed)
    return worst
