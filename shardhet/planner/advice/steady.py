"""What a plan loses if devices are not as fast as the profile says, and plans that lose less.

A disturbance is one kind of device that is faster or slower than the profile says, by ``OFF``.
Under a disturbance d a plan takes t_d(plan), and the best plan that knew of it b_d.  The plan
loses

    max over d of  t_d(plan) / b_d - 1.

Memory does not depend on speed, so a plan that fits fits under every disturbance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardhet.planner.advice.explain import Situation, at_other_speed
from shardhet.planner.find import least_step_s, solve
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.search.search import Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan

OFF = 0.2
NOISE = 0.1  # of speeds, between two launches of the same measurement
LEAST_GAIN = 1e-3  # of the mean loss, for which a plan may be slower
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiest:
    """Of the plans that a search has met, the one that loses least on average."""

    solution: PlanSolution
    num_met: int
    slower: float  # than the fastest at the profile's speeds, relative
    mean_loss: float  # if one kind of device is slower or faster by ``NOISE``
    mean_loss_of_fastest: float


def steadiest_met(
    best: PlanSolution, setting: Setting, *, demands: Demands
) -> Steadiest | None:
    """The plan that loses least of ``best`` and the plans near it; None if none is to choose.

    A loss is relative to the best of these plans under the same disturbance, so that no search
    is needed.  The fastest stays unless another loses less by ``LEAST_GAIN``.
    """
    model, met = CostModel(setting), [best, *best.near]
    disturbed = disturbances(setting, off=NOISE)
    if len(met) == 1 or not disturbed:
        return None
    losses = [0.0] * len(met)
    for each in disturbed:
        there = CostModel(each.setting)
        seconds = [there.predict(solution.plan).step_time_s for solution in met]
        for i, step_s in enumerate(seconds):
            losses[i] += (step_s / min(seconds) - 1) / len(disturbed)
    at = min(range(len(met)), key=losses.__getitem__)
    if losses[at] > losses[0] - LEAST_GAIN:
        at = 0
    budgets = [
        demands.budget_bytes(setting.cluster, i) for i in range(model.cluster.world_size)
    ]
    chosen = replace(
        met[at],
        predicted=model.predict(met[at].plan).within(budgets),
        lower_bound_s=best.lower_bound_s,
        near=best.near,
    )
    return Steadiest(
        solution=chosen if at else best,
        num_met=len(met),
        slower=chosen.predicted.step_time_s / best.predicted.step_time_s - 1,
        mean_loss=losses[at],
        mean_loss_of_fastest=losses[0],
    )


def disturbances(setting: Setting, *, off: float = OFF) -> list[Disturbance]:
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
        for speed in (1 - off, 1 + off)
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
