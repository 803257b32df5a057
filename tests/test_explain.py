"""What limits a plan is what a little more of would help, found by planning again."""

import pytest

from shardhet.planner import Demands, DeviceLimits, PlanSolution, solve
from shardhet.planner.advice.explain import (
    Explanation,
    Resource,
    Situation,
    explain,
    larger_situations,
    with_another,
)
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.profiles import Profile
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile

WORKLOAD = Workload.transformer(
    num_layers=4, width=64, num_heads=2, seq_len=32, vocab_size=128, hidden_width=128
)
STATE_BYTES = 16 * WORKLOAD.numel
BATCH = 24


def situation(
    *, capacity: float = 50.0, bytes_per_s: float = 1e12, demands: Demands | None = None
) -> Situation:
    """Two fast devices and a slow one, each with ``capacity`` times the state."""
    devices = tuple(
        DeviceSpec(kind=kind, memory_capacity_bytes=int(capacity * STATE_BYTES))
        for kind in ("fast", "fast", "slow")
    )
    setting = Setting(
        Cluster(nodes=(Node(host="a", devices=devices),)),
        WORKLOAD,
        Profile(
            devices=tuple(
                device_profile(kind, lambda m, s=s: (s * m, 2 * s * m), sizes=(1, 2, 4))
                for kind, s in (("fast", 1e-3), ("slow", 2e-3))
            ),
            collectives=collectives(
                (10**4, 10**6),
                gather_s_per_byte=1 / bytes_per_s,
                reduce_s_per_byte=1 / bytes_per_s,
            ),
        ),
    )
    return Situation(setting=setting, demands=demands or Demands())


def solved(of: Situation) -> PlanSolution:
    return solve(of.setting, global_batch_size=BATCH, demands=of.demands)


def explained(of: Situation) -> Explanation:
    solution = solved(of)
    return explain(
        solution,
        of,
        value=solution.samples_per_s,
        objective=lambda each: solved(each).samples_per_s,
    )


def test_where_devices_compute_all_the_time_compute_limits() -> None:
    explanation = explained(situation())
    assert explanation.limit is not None
    assert explanation.limit.resource is Resource.COMPUTE
    assert explanation.limit.relative == pytest.approx(0.1, rel=0.05)
    assert explanation.compute_s > 100 * explanation.links_s
    assert explanation.endless_memory.relative < 1e-3
    memory = [g for g in explanation.gains if g.resource is Resource.MEMORY]
    assert all(gain.relative < 1e-3 for gain in memory)


def test_where_links_are_slow_links_limit() -> None:
    explanation = explained(situation(bytes_per_s=1e5))
    assert explanation.limit is not None
    assert explanation.limit.resource is Resource.LINKS
    assert explanation.limit.relative == pytest.approx(0.1, rel=0.1)
    assert explanation.links_s > 10 * explanation.compute_s


def test_where_the_fast_devices_are_full_their_memory_limits() -> None:
    capped = Demands(
        limits={i: DeviceLimits(memory_budget_bytes=int(1.9 * STATE_BYTES)) for i in (0, 1)},
        max_rounds=1,
    )
    whole, tight = situation(), situation(demands=capped)
    assert solved(tight).samples_per_s < 0.99 * solved(whole).samples_per_s
    explanation = explained(tight)
    assert explanation.endless_memory.relative > 0.1
    gain = {(g.resource, g.device_kind): g.relative for g in explanation.gains}
    assert gain[Resource.MEMORY, "fast"] > 10 * gain[Resource.MEMORY, "slow"]


def test_more_memory_is_for_devices_of_the_kind_alone() -> None:
    of = situation()
    for resource, kind, _, larger in larger_situations(of):
        devices = zip(of.cluster.devices, larger.cluster.devices, strict=True)
        if resource is Resource.MEMORY:
            assert [
                (after.memory_capacity_bytes or 0) > (before.memory_capacity_bytes or 0)
                for before, after in devices
            ] == [kind in (None, each.kind) for each in of.cluster.devices]


def test_another_device_helps_by_what_it_can_do() -> None:
    gain = {
        g.device_kind: g.relative
        for g in explained(situation()).gains
        if g.resource is Resource.DEVICES
    }
    # The three devices are as fast as two and a half.
    assert gain["fast"] == pytest.approx(1 / 2.5, abs=0.1)
    assert gain["slow"] == pytest.approx(0.5 / 2.5, abs=0.1)


def test_demands_move_with_their_devices_when_one_is_added() -> None:
    demands = Demands(limits={0: DeviceLimits(), 2: DeviceLimits()}, equal=((1, 2),))
    larger = with_another(situation(demands=demands), "fast")
    assert [device.kind for device in larger.cluster.devices] == [*["fast"] * 3, "slow"]
    assert sorted(larger.demands.limits) == [0, 3]
    assert larger.demands.equal == ((1, 3),)


def test_one_device_has_no_links_to_be_faster() -> None:
    of = situation()
    alone = of.with_cluster(
        Cluster(nodes=(Node(host="a", devices=of.cluster.devices[:1]),)), Demands()
    )
    resources = [resource for resource, _, _, _ in larger_situations(alone)]
    assert Resource.LINKS not in resources
    assert resources.count(Resource.COMPUTE) == 1
