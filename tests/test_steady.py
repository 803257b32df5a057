"""What a plan loses where devices are not as fast as was thought."""

import pytest

from shardhet.apps.plan import main as plan_main
from shardhet.planner import Demands, solve
from shardhet.planner.advice.steady import OFF, disturbances, loss_of
from shardhet.planner.search.search import DEFAULT_EFFORT
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from tests.selection import one_in
from tests.test_fewer import setting_of
from tests.test_planner import WORKLOAD, random_case

NONE = Demands()


def test_every_kind_is_disturbed_both_ways() -> None:
    setting = setting_of("fss", s_per_byte=1e-9)
    found = disturbances(setting)
    assert list(found) == [
        ("f", 1 - OFF),
        ("f", 1 + OFF),
        ("s", 1 - OFF),
        ("s", 1 + OFF),
    ]
    before = setting.profile.unit("s", "block").forward_s.at(4)
    after = found["s", 1 - OFF].profile
    assert after.unit("s", "block").forward_s.at(4) == pytest.approx(before / 0.8)
    assert after.unit("f", "block") == setting.profile.unit("f", "block")
    assert disturbances(setting_of("ss", s_per_byte=1e-9)) == {}
    assert disturbances(setting_of("abcdefghi", s_per_byte=1e-9)) == {}


@pytest.mark.campaign  # that it is told stays
@pytest.mark.parametrize("seed", one_in(4, [1, 2, 5, 8]))
def test_the_loss_is_that_over_the_best_plan_at_each_speed(seed: int) -> None:
    cluster, profile, batch = random_case(seed)
    setting = Setting(cluster, WORKLOAD, profile)
    plan = solve(setting, global_batch_size=batch).plan
    found = disturbances(setting)
    loss = loss_of(plan, found, demands=NONE, effort=DEFAULT_EFFORT)
    least = []
    for disturbed in found.values():
        step_s = CostModel(disturbed).predict(plan).step_time_s
        best = solve(disturbed, global_batch_size=batch)
        least.append(step_s / best.predicted.step_time_s - 1)
    assert loss.relative == pytest.approx(max(0.0, *least), abs=1e-9)


def test_the_loss_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    plan_main(["cluster=rtx4090_2x3090", "model=gpt_125m", "explain=true", "leave_out=never"])
    text = " ".join(capsys.readouterr().out.split())
    assert "With each kind's speed 20% off, this plan" in text
