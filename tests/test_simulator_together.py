"""Ranks that go on together take as long and are as busy as those that go on one by one."""

import numpy as np
import pytest

from experiments.planner.campaign import instance
from shardhet.planner import PlanError, solve
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan
from shardhet.simulator import simulation
from shardhet.simulator.simulation import simulate, simulated_step_s, simulated_times
from shardhet.simulator.together import step_times
from tests.test_planner import WORKLOAD, random_case


def check(plan: Plan, setting: Setting) -> None:
    timeline, times = simulate(plan, setting), step_times(plan, setting)
    assert times.step_time_s == pytest.approx(timeline.step_time_s, rel=1e-9)
    assert times.busy_s == pytest.approx([each.busy_s for each in timeline.ranks], rel=1e-9)


@pytest.mark.parametrize("block", range(3))
def test_times_are_those_of_the_simulation(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        cluster, profile, batch = random_case(seed)
        made_up, other_batch, demands, _, _ = instance(seed)  # excess above 1, idle ranks
        try:
            plan = solve(
                Setting(cluster, WORKLOAD, profile), global_batch_size=batch, num_rescored=1
            )
            check(plan.plan, Setting(cluster, WORKLOAD, profile))
            other = solve(
                made_up, global_batch_size=other_batch, demands=demands, num_rescored=1
            )
            check(other.plan, made_up)
        except PlanError:
            continue


def test_many_unlike_ranks_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, profile, batch = random_case(1)
    setting = Setting(cluster, WORKLOAD, profile)
    plan = solve(setting, global_batch_size=batch, num_rescored=1).plan
    one_by_one = simulated_times(plan, setting)
    monkeypatch.setattr(simulation, "FEW_UNLIKE", 0)
    monkeypatch.setattr(simulation, "simulate", None)
    together = simulated_times(plan, setting)
    assert np.allclose(together.busy_s, one_by_one.busy_s, rtol=1e-9)
    assert simulated_step_s(plan, setting) == pytest.approx(one_by_one.step_time_s, rel=1e-9)
