"""What a plan loses if devices are not as fast as the profile says, and plans that lose less.

A disturbance is one kind of device that is faster or slower than the profile says, by ``OFF``.
Under a disturbance d a plan takes t_d(plan), and the best plan that knew of it b_d.  The plan
loses

    max over d of  t_d(plan) / b_d - 1.

Memory does not depend on speed, so a plan that fits fits under every disturbance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardhet.planner.demands import Demands
from shardhet.planner.explain import Situation, at_other_speed
from shardhet.planner.find import least_step_s, solve
from shardhet.planner.search import Effort
from shardhet.planner.solution import PlanError, PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan

OFF = 0.2
MAX_KINDS = 8  # every disturbance takes a search


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One kind of device at another speed."""

    device_kind: str
    speed: float  # relative to the profile's
    setting: Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a plan loses at most, and under which disturbance."""

    relative: float  # 0.05: the step is 5 % longer than that of the best plan
    device_kind: str
    speed: float


def disturbances(setting: Setting) -> list[Disturbance]:
    """Every kind of device slower and faster; none if the kinds are too many, or only one.

    One kind at another speed changes the step, but hardly the best plan.
    """
    kinds = dict.fromkeys(str(device.kind) for device in setting.cluster.devices)
    if not 1 < len(kinds) <= MAX_KINDS:
        return []
    here = Situation(setting=setting, demands=Demands())
    return [
        Disturbance(kind, speed, at_other_speed(here, frozenset({kind}), speed).setting)
        for kind in kinds
        for speed in (1 - OFF, 1 + OFF)
    ]


def loss_of(
    plan: Plan,
    disturbed: Sequence[Disturbance],
    *,
    demands: Demands,
    effort: Effort,
) -> Loss:
    """What the plan loses at most; ``disturbed`` must not be empty."""
    return max(
        _losses(plan, disturbed, demands=demands, effort=effort),
        key=lambda loss: loss.relative,
    )


def _losses(
    plan: Plan,
    disturbed: Sequence[Disturbance],
    *,
    demands: Demands,
    effort: Effort,
) -> Iterator[Loss]:
    for each in disturbed:
        step_s = CostModel(each.setting).predict(plan).step_time_s
        best_s = least_step_s(
            each.setting,
            global_batch_size=plan.global_batch_size,
            demands=demands,
            effort=effort,
            at_most_s=step_s,
        )
        yield Loss(relative=step_s / best_s - 1, device_kind=each.device_kind, speed=each.speed)


def steadier(
    solution: PlanSolution,
    setting: Setting,
    *,
    tolerance: float,
    demands: Demands,
    effort: Effort,
) -> PlanSolution:
    """The plan that loses least, of those that are slower by at most ``tolerance``.

    They are ``solution`` and the best plans under every disturbance, at the profile's speeds.
    The bound of the result is that of ``solution``.
    """
    disturbed = disturbances(setting)
    model, batch = CostModel(setting), solution.plan.global_batch_size
    budgets = [
        demands.budget_bytes(setting.cluster, i) for i in range(model.cluster.world_size)
    ]
    slowest_s = (1 + tolerance) * solution.predicted.step_time_s
    found, best_s = [solution], []
    for each in disturbed:
        try:
            other = solve(
                each.setting,
                global_batch_size=batch,
                demands=demands,
                effort=effort,
                num_rescored=1,
            )
        except PlanError:  # cannot be: the same plans fit
            continue
        here = model.predict(other.plan).within(budgets)
        best_s.append((each.setting, other.predicted.step_time_s))
        if here.step_time_s <= slowest_s:
            found.append(
                replace(
                    other,
                    predicted=here,
                    lower_bound_s=solution.lower_bound_s,
                    simulated_step_time_s=None,
                )
            )

    def loss(candidate: PlanSolution) -> float:
        return max(
            (
                CostModel(there).predict(candidate.plan).step_time_s / least_s
                for there, least_s in best_s
            ),
            default=1.0,
        )

    return min(found, key=loss)
