"""The pure helpers of experiments/scale; its measurements are not repeated here."""

import time

import pytest
import torch

from experiments.scale import (
    accumulation,
    overhead,
    paced,
    simulated,
    slept_profile,
    worlds,
)
from shardhet import simulate
from shardhet.pricing.setting import Setting
from shardhet.records.profiles import Collectives, Profile, Source


def test_a_paced_model_has_gradients_of_every_element() -> None:
    model = paced.PacedModel(2, 2 * paced.ROW_NUMEL, lambda _seconds: None)
    loss_sum, num_tokens = model(torch.zeros(3, 1))
    loss_sum.backward()
    assert num_tokens == 3
    for param in model.parameters():
        assert param.grad is not None
        assert torch.equal(param.grad, torch.full_like(param, 3.0))


def test_a_paced_model_spends_what_it_is_told() -> None:
    spent_s: list[float] = []
    model = paced.PacedModel(2, paced.ROW_NUMEL, spent_s.append)
    model.set_pace(0.5)
    model(torch.zeros(3, 1))[0].backward()
    assert spent_s == [1.5, 1.5, 3.0, 3.0]
    assert sum(spent_s) == paced.step_seconds(2, 3, 0.5)


def test_a_sleeper_makes_up_for_sleeps_that_were_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s = 0.0

    def oversleep(seconds: float) -> None:
        nonlocal clock_s
        clock_s += seconds + 0.001

    monkeypatch.setattr(time, "sleep", oversleep)
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s)
    sleep = paced.Sleeper()
    for _ in range(10):
        sleep(0.01)
    assert clock_s == pytest.approx(0.101)


def test_plans_of_worlds_deal_the_same_batch_and_all_of_the_state() -> None:
    for world_size in worlds.FAR_WORLD_SIZES:
        plans = worlds.plans_of(world_size)
        batches = {plan.global_batch_size for plan in plans.values()}
        assert batches == {world_size * worlds.SAMPLES_PER_RANK}
        first = plans["by speed"].ranks[:4]
        assert [rank.rank_batch_size for rank in first] == [8, 4, 2, 2]


def test_without_communication_a_slept_step_lasts_as_long_as_its_sleeps() -> None:
    profile = Profile(
        devices=slept_profile.slept_devices(0.01),
        collectives=Collectives(source=Source.MEASURED, points=()),
    )
    cluster, workload = (
        slept_profile.cluster_of(8),
        slept_profile.workload_of(3, worlds.UNIT_NUMEL),
    )
    seconds = {
        name: simulate(plan, Setting(cluster, workload, profile)).step_time_s
        for name, plan in worlds.plans_of(8).items()
    }
    assert seconds["by speed"] == pytest.approx(paced.step_seconds(3, 8, 0.01))
    assert seconds["equal"] == pytest.approx(paced.step_seconds(3, 4, 0.01 / 0.25))


def test_the_fit_finds_what_the_figures_were_made_of() -> None:
    seconds = {
        (units, count): 1e-3 + 2e-4 * units + 5e-5 * units * count
        for units in (4, 16, 64)
        for count in (1, 4, 16)
    }
    assert overhead.fit(seconds) == pytest.approx((1e-3, 2e-4, 5e-5))


def test_growth_needs_something_that_grows() -> None:
    growth = accumulation.growth
    assert growth(0.02, 0.022) == pytest.approx(1.1)
    assert growth(-0.001, 0.01) == float("inf")
    assert growth(-0.001, -0.01) == 0


def test_simulator_and_cost_model_look_at_one_plan() -> None:
    samples = [s for n in simulated.SAMPLES_PER_DEVICE for s in simulated._measure_case(64, n)]
    report = simulated.report(samples)
    assert len(report.tables[0].rows) == 2
    assert report.bars[0].holds
