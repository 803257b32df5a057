"""Plans where the time of collectives depends on who computes and on who stores how much."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.planner.campaign import instance, row_of
from shardhet.planner import Demands, PlanError, solve
from shardhet.planner.receivers import least_uneven_shares
from shardhet.pricing.cost import CostModel
from tests.selection import one_in


@pytest.mark.sampled(2)
# Exact shares of all; a device better left idle; even state to the row; room for the shares of
# fewer microbatches; equal devices whose rows differ; a budget that is full to the row.
@pytest.mark.parametrize("seed", one_in(3, [25, 34, 91, 116, 128, 143, 388]))
def test_no_exhaustive_plan_is_faster_and_the_bound_is_close(seed: int) -> None:
    """Three ways to share the state were tried for each plan, so some may be slower."""
    row = row_of(seed)
    assert row.planned_s <= row.best_s * 1.001
    assert not row.is_wrong
    assert row.bound_s >= 0.96 * row.planned_s


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_least_unevenness_are_no_busier_than_any_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = CostModel(instance(0)[0])
    number = int(rng.integers(2, 5))
    computes = rng.uniform(size=number) < 0.6
    computes[int(rng.integers(number))] = True
    room = rng.uniform(0.3, 1.2, size=number)
    if room.sum() < 1:
        assert least_uneven_shares(computes, room, {}) is None
        return
    shares = least_uneven_shares(computes, room, {})
    assert shares is not None
    assert shares.sum() == pytest.approx(1)
    assert (shares <= room + 1e-9).all()
    least = model.unevenness(shares.tolist(), computes.tolist())
    for _ in range(2000):
        other = rng.dirichlet(np.ones(number))
        if (other <= room).all():
            assert model.unevenness(other.tolist(), computes.tolist()) >= least - 1e-9


def test_demanded_shares_are_kept() -> None:
    shares = least_uneven_shares(
        np.array([True, True, False]), np.array([0.5, 0.9, 0.4]), {0: 0.25}
    )
    assert shares is not None
    assert shares[0] == pytest.approx(0.25)
    assert shares[1] > shares[2]


def test_optimizers_on_hosts_leave_room_for_shares() -> None:
    """Without that room, the best would be as two devices of which one computes: 36.2 s."""
    setting, batch, *_ = instance(7)
    fraction = 0.8 * setting.cluster.usable_memory_fraction
    cluster = replace(setting.cluster, usable_memory_fraction=fraction)
    found = solve(
        replace(setting, cluster=cluster),
        global_batch_size=batch,
        demands=Demands(may_keep_optimizer_on_host=True),
    )
    assert found.predicted.step_time_s == pytest.approx(19.517, rel=1e-3)


def test_where_memory_ends_within_a_row_rows_are_moved_until_all_fit() -> None:
    row = row_of(2723)  # 0.3 % of the state is all the room that is left
    assert row.planned_s <= row.best_s * (1 + 1e-9)
    assert row.bound_s >= 0.99 * row.planned_s


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", one_in(3, range(12)))
def test_a_plan_to_prefer_is_found_where_links_depend_on_shares(seed: int) -> None:
    setting, batch, demands, _, _ = instance(seed)
    try:
        fastest = solve(setting, global_batch_size=batch, demands=demands)
    except PlanError:
        return
    chosen = solve(setting, global_batch_size=batch, demands=demands, tolerance=5e-3)
    assert chosen.predicted.step_time_s <= 1.006 * fastest.predicted.step_time_s
