"""The bound holds for plans whose demanded shares are met to within rows."""

import numpy as np
import pytest

from shardhet.planner import Constraints, DeviceLimits, PlanError, PlanSolution, solve
from shardhet.planner.idle import active_positions
from shardhet.planner.stages import bound
from shardhet.planner.stages.bound import together_on_kinds_s, together_s
from shardhet.pricing.scenario import Scenario
from tests.selection import one_in
from tests.test_planner import WORKLOAD, random_case


def demanded(seed: int, world_size: int) -> Constraints:
    """Even state, one exact share, or exact shares of all devices."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        return Constraints(has_even_state=True)
    if seed % 3 == 1:
        share = float(rng.uniform(0, 0.5))
        return Constraints(limits={0: DeviceLimits(state_share=share)})
    shares = rng.dirichlet(np.ones(world_size)).tolist()
    return Constraints(
        limits={i: DeviceLimits(state_share=each) for i, each in enumerate(shares)}
    )


@pytest.mark.parametrize("seed", one_in(24, range(24)))
def test_no_bound_is_above_a_plan_that_fits(seed: int) -> None:
    """Budgets that a plan fills to the last byte leave no room for rows more."""
    cluster, profile, batch = random_case(seed)
    scenario = Scenario(cluster, WORKLOAD, profile)
    demands = demanded(seed, cluster.world_size)
    try:
        plan = solve(scenario, global_batch_size=batch, constraints=demands)
    except PlanError:
        return
    if plan.plan.last_round_size is not None:
        return  # bounds are on plans with equal rounds
    used = {i: rank.memory.total_bytes for i, rank in enumerate(plan.predicted.ranks)}
    for each in (demands, demands.with_budgets(used)):
        bound_s = bound_of(scenario, batch, each, plan)
        assert bound_s <= plan.predicted.step_time_s * (1 + 1e-12)
    assert plan.lower_bound_s >= 0.9 * plan.predicted.step_time_s
    # What is seen before candidates are listed rules out no step that is as long as the best.
    best_s = plan.predicted.step_time_s * (1 + 1e-9)
    again = solve(scenario, global_batch_size=batch, constraints=demands, cutoff_s=best_s)
    assert again.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def bound_of(
    scenario: Scenario, batch: int, demands: Constraints, other: PlanSolution
) -> float:
    """The bound on plans as the ``other``, whether one is found or not; no plan found is below.

    0 if in the plan that was found some devices are idle, and not those of the other.
    """
    try:
        plan = solve(scenario, global_batch_size=batch, constraints=demands)
    except PlanError as error:
        return error.lower_bound_s
    active = active_positions(plan)
    if len(active) < scenario.cluster.world_size and active != active_positions(other):
        return 0.0
    assert plan.lower_bound_s <= plan.predicted.step_time_s * (1 + 1e-12)
    return plan.lower_bound_s


@pytest.mark.parametrize("seed", one_in(3, range(9)))
def test_very_many_samples_are_bounded_without_a_table_of_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, profile, _ = random_case(seed)
    scenario = Scenario(cluster, WORKLOAD, profile)
    table_s = together_s(scenario, 500)
    monkeypatch.setattr(bound, "is_divided", lambda *_: True)
    assert 0.9 * table_s < together_s(scenario, 500) <= table_s * (1 + 1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-9])
@pytest.mark.parametrize("devices", [(1, 3), (16_000, 384)])
def test_the_bound_of_divided_samples_is_exact_at_every_scale(
    scale: float, devices: tuple[int, int]
) -> None:
    """HiGHS' tolerances are absolute: 1e-7 of a row, 1e-9 of a coefficient."""
    times = scale * np.array([[1.0, 2.0], [3.0, 4.0]])
    units, samples = (1, 5), 7
    n, m = devices
    first, second = (each * samples for each in units)
    # Either the first kind, or the second, helps with the unit that suits the other better.
    expected = scale * max(
        (first + 2 * second) / (n + m / 2), (3 * first + 4 * second) / (3 * n + m)
    )
    found = together_on_kinds_s(times, devices, units, samples)
    assert found == pytest.approx(expected, rel=1e-9)
