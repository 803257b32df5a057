"""What a step is predicted to take and to hold, against arithmetic done by hand."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.plan import Plan, PlannedUnit
from shardhet.records.profiles import Profile
from shardhet.records.workload import Unit, UnitKind, Workload
from shardhet.simulator.simulation import simulate
from tests.made_up import collectives, device_profile

BLOCK = UnitKind(
    name="block",
    param_shapes=((10, 10),),
    forward_flops=1,
    backward_flops=2,
    input_bytes=7,
    activation_bytes=100,
    transient_bytes=3,
)
WORKLOAD = Workload(
    kinds=(BLOCK,), units=tuple(Unit(fqn=f"blocks.{i}", kind="block") for i in range(4))
)
CLUSTER = Cluster(
    nodes=(
        Node(
            host="a",
            devices=(
                DeviceSpec(kind="fast", memory_capacity_bytes=10_000),
                DeviceSpec(kind="slow", memory_capacity_bytes=30_000),
            ),
        ),
    ),
    usable_memory_fraction=1.0,
)


def profile(
    *,
    gather_s: float = 0.0,
    weight: float = 0.0,
    excess: float = 0.0,
    slow_excess: float | None = None,  # of the slow device, where it is another
) -> Profile:
    devices = tuple(
        device_profile(
            kind,
            lambda m, speed=speed: (speed * m, 2 * speed * m),
            sizes=(1, 2, 3),
            unit_kinds=("block",),
            optimizer_seconds_per_element=0.01,
            overlap_excess=excess if kind == "fast" or slow_excess is None else slow_excess,
            reserved_bytes=50,
        )
        for kind, speed in (("fast", 1.0), ("slow", 10.0))
    )
    links = collectives(
        (200, 400, 800),
        gather_s_per_byte=gather_s / 400,
        reduce_s_per_byte=2 * gather_s / 400,
        gather_unevenness_weight=weight,
        reduce_unevenness_weight=weight,
    )
    return Profile(devices=devices, collectives=links)


def plan(*, recompute: bool = False, state_shares: tuple[float, float] = (0.25, 0.75)) -> Plan:
    return Plan.by_hand(
        microbatch_sizes=[3, 1],
        num_microbatches=[2, 1],
        state_shares=list(state_shares),
        recompute=recompute,
    )


def test_without_communication_the_slowest_rank_sets_each_phase() -> None:
    step = CostModel(Setting(CLUSTER, WORKLOAD, profile())).predict(plan())
    assert step.forward_s == 4 * max(2 * 3, 10)
    assert step.backward_s == 8 * max(2 * 3, 10)
    assert step.optimizer_s == pytest.approx(0.01 * 280)  # shares are rounded to 4 rows
    assert step.step_time_s == pytest.approx(40 + 80 + 2.8)
    assert [rank.forward_s for rank in step.ranks] == [24, 40]


def test_ranks_that_recompute_different_units_meet_at_every_unit() -> None:
    model = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    fast_s, slow_s = 2 * 3, 10  # forward of a unit; backward takes twice as long
    for fast, slow, number in (([], ["*"], 4), (["*"], ["blocks.[0-1]"], 2)):
        step = model.predict(
            Plan.by_hand(
                microbatch_sizes=[3, 1],
                num_microbatches=[2, 1],
                state_shares=[0.5, 0.5],
                recompute=[fast, slow],
            )
        )
        again_s = fast_s if fast else 0
        others_s = max(2 * fast_s + again_s, 2 * slow_s)
        expected_s = number * max(2 * fast_s + again_s, 3 * slow_s) + (4 - number) * others_s
        assert step.backward_s == expected_s


def test_a_step_takes_as_long_however_units_that_are_alike_are_put_into_classes() -> None:
    for gather_s in (0.0, 2.0, 7.0, 30.0):
        model = CostModel(Setting(CLUSTER, WORKLOAD, profile(gather_s=gather_s, excess=0.23)))
        steps = [
            model.predict(
                Plan.by_hand(
                    microbatch_sizes=[0, 1],
                    state_shares=[0.5, 0.5],
                    recompute=[idle, ["*"]],  # of a rank that computes nothing
                )
            ).step_time_s
            for idle in (["*"], ["blocks.0"], ["blocks.[0-2]"])
        ]
        assert steps == pytest.approx(steps[:1] * 3, rel=1e-12)


def test_communication_hides_behind_compute_or_sets_the_pace() -> None:
    hidden = CostModel(Setting(CLUSTER, WORKLOAD, profile(gather_s=1.0))).predict(plan())
    assert hidden.forward_s == 40  # three gathers of 1 s beside 40 s of compute
    assert hidden.exposed_comm_s == pytest.approx(1 + 2)
    # Forward: three gathers; backward: three gathers and three reductions of 2 s each.
    paced = CostModel(Setting(CLUSTER, WORKLOAD, profile(gather_s=100.0))).predict(plan())
    assert paced.forward_s == pytest.approx(300)
    assert paced.backward_s == pytest.approx(300 + 600)


def test_memory_is_the_sum_of_its_parts() -> None:
    fast, slow = CostModel(Setting(CLUSTER, WORKLOAD, profile())).predict(plan()).ranks
    memory = fast.memory
    assert memory.state_bytes == 120 * 16  # of 100 elements, rounded to 4 rows
    assert memory.shard_buffer_bytes == 0
    # The last unit is in backward, and no gradient is reduced yet.
    assert memory.pending_bytes == 120 * 4
    assert (memory.unsharded_bytes, memory.grad_bytes) == (2 * 100 * 4, 100 * 4)
    assert memory.boundary_bytes == 6 * (4 + 1) * 7  # and the gradient of its input
    # All graphs, and the gradient of a parameter, which is more than what one unit needs.
    assert memory.activation_bytes == 6 * 4 * 100 + 100 * 4 > 6 * 4 * 100 + 3 * 3
    assert memory.reserved_bytes == 50
    parts = {name: getattr(memory, name) for name in memory.__slots__}
    assert memory.total_bytes == sum(parts.values()) - 2 * memory.pending_bytes
    assert fast.fits
    assert slow.memory_budget_bytes == 30_000


@pytest.mark.parametrize("recompute", [True, False])
def test_the_room_that_is_planned_with_is_what_the_parts_of_memory_leave(
    recompute: bool,
) -> None:
    model = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    for planned, device in zip(plan(recompute=recompute).ranks, CLUSTER.devices, strict=True):
        rank = replace(planned, device=device)
        parts = model.memory(rank, 0)
        batch, size = rank.rank_batch_size, max(rank.microbatch_sizes, default=1)
        used = model.working_bytes(rank.device.kind, rank, np.array([batch]), np.array([size]))
        assert used.tolist() == [parts.total_bytes]
        [[room]] = model.room_for_state(
            [rank],
            rank.device.kind,
            model.memory(rank, 700).total_bytes,
            batches=np.array([batch]),
            sizes=np.array([size]),
            host_bytes=inf,
        )
        assert room == pytest.approx(700, abs=1)


# Inputs on the host


def on_host(*patterns: str, second: int = 1) -> Plan:
    return Plan.by_hand(
        microbatch_sizes=[3, second],
        num_microbatches=[2, second],
        state_shares=[0.25, 0.75],
        recompute=True,
        inputs_on_host=[patterns, False],
    )


def with_host(bytes_per_s: float | None) -> Cluster:
    [node] = CLUSTER.nodes
    return replace(CLUSTER, nodes=(replace(node, host_bytes_per_s=bytes_per_s),))


@pytest.mark.parametrize("link, forward_s, backward_s", [(7.0, 24, 72), (0.5, 258, 270)])
def test_copies_hide_behind_compute_or_set_the_pace(
    link: float, forward_s: float, backward_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardhet.pricing.hosts.DEVICE_LINK_BYTES_PER_S", link)
    setting = Setting(with_host(None), WORKLOAD, profile())
    plan = on_host("*", second=0)
    step = CostModel(setting).predict(plan)
    # Of the first of four units nothing is copied: 6 s, and 18 s in backward.
    assert (step.forward_s, step.backward_s) == pytest.approx((forward_s, backward_s))
    timeline = simulate(plan, setting)
    assert timeline.step_time_s == pytest.approx(step.step_time_s, rel=0.02)
    peak, predicted = timeline.ranks[0].peak_bytes, step.ranks[0].memory.total_bytes
    assert 0.9 * predicted <= peak <= predicted


def test_ranks_share_what_their_host_moves() -> None:
    model = CostModel(Setting(with_host(1e9), WORKLOAD, profile()))
    both = Plan.by_hand(microbatch_sizes=[3, 1], recompute=True, inputs_on_host=True)
    assert model.host_paces(both) == [5e8, 5e8]
    assert model.host_paces(on_host("*")) == [1e9, 1e9]
    with pytest.raises(ValueError, match="host_bytes_per_s"):
        Cluster.from_document(
            {"version": 1, "nodes": [{"host": "a", "devices": [{}], "host_bytes_per_s": -1.0}]},
            source="x",
        )


def test_like_cards_have_the_budgets_of_their_own_hosts() -> None:
    card = DeviceSpec(kind="fast", memory_capacity_bytes=10_000)
    nodes = (
        Node(host=host, devices=(card,), library_bytes=nbytes)
        for host, nbytes in (("a", 1_000), ("b", 2_000))
    )
    cluster = replace(CLUSTER, nodes=tuple(nodes))
    even = Plan.even(2, microbatch_size=1)
    found = CostModel(Setting(cluster, WORKLOAD, profile())).predict(even)
    assert [rank.memory_budget_bytes for rank in found.ranks] == [8_500, 7_500]


def test_a_plan_for_other_devices_is_refused() -> None:
    other = Plan.by_hand(
        microbatch_sizes=[1, 1],
        state_shares=[0.5, 0.5],
        devices=[DeviceSpec(kind="slow"), DeviceSpec(kind="fast")],
    )
    model = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    with pytest.raises(ValueError, match=r"ranks\[0\] is for slow"):
        model.predict(other)
    with pytest.raises(ValueError, match="it has 1 devices"):
        model.predict(Plan.even(1, microbatch_size=1))


def test_the_plan_that_a_run_leaves_is_priced_though_its_root_has_no_elements() -> None:
    plan = Plan.by_hand(microbatch_sizes=[1, 1])
    model = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    of_run = replace(plan, units=(*WORKLOAD.planned_units, PlannedUnit(fqn="", numel=0)))
    assert model.predict(of_run).step_time_s == model.predict(plan).step_time_s
    other = replace(of_run, units=(*WORKLOAD.planned_units, PlannedUnit(fqn="", numel=3)))
    with pytest.raises(ValueError, match=r"403 parameters, .* has 400; units root differ"):
        model.predict(other)
