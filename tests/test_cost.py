"""What a step is predicted to take and to hold, against arithmetic done by hand."""

import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from shardhet.pricing.cost import CostModel
from shardhet.pricing.hosts import HostPart
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.plan import Plan, PlannedUnit
from shardhet.records.profiles import Profile
from shardhet.records.workload import Unit, UnitKind, Workload
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Work
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


def test_recomputation_adds_a_forward_to_backward() -> None:
    model = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    assert model.predict(plan(recompute=True)).backward_s == 8 * 10 + 4 * 10


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


def test_compute_slows_beside_communication() -> None:
    step = CostModel(Setting(CLUSTER, WORKLOAD, profile(gather_s=1.0, excess=0.2))).predict(
        plan()
    )
    assert step.forward_s == pytest.approx(40 + 0.2 * 3)


def test_each_kind_of_device_slows_as_much_as_it_does() -> None:
    unlike = profile(gather_s=20.0, excess=0.9, slow_excess=0.0)
    step = CostModel(Setting(CLUSTER, WORKLOAD, unlike)).predict(plan())
    forward = step.turns[0]
    # The fast device computes for 24 s and loses 0.9 of the 60 s of gathers; the slow one 40 s.
    assert (forward.compute_s, forward.seconds) == (24, pytest.approx(24 + 0.9 * 60))


def test_the_runtime_takes_its_own_time_in_every_turn() -> None:
    free = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    model = replace(
        free, setting=replace(free.setting, profile=replace(profile(), turn_overhead_s=0.25))
    )
    step = model.predict(plan())
    assert step.overhead_s == 2 * 4 * 0.25  # four units, forward and backward
    assert step.step_time_s == pytest.approx(free.predict(plan()).step_time_s + 2.0)
    timeline = simulate(plan(), Setting(CLUSTER, WORKLOAD, model.profile))
    assert timeline.step_time_s == pytest.approx(step.step_time_s)
    own_s = [rank.seconds(frozenset({Work.OVERHEAD})) for rank in timeline.ranks]
    assert own_s == pytest.approx([2.0, 2.0])


def test_direct_messages_make_uneven_shares_slow_and_rings_do_not() -> None:
    even, uneven = plan(state_shares=(0.5, 0.5)), plan(state_shares=(0.1, 0.9))
    ring = CostModel(Setting(CLUSTER, WORKLOAD, profile(gather_s=100.0)))
    assert ring.predict(even).forward_s == pytest.approx(ring.predict(uneven).forward_s)
    direct = CostModel(Setting(CLUSTER, WORKLOAD, profile(gather_s=100.0, weight=1.0)))
    assert direct.predict(even).forward_s == pytest.approx(300)
    # The owner of 0.9 sends 0.9 of each unit where even shares send half of it.
    assert direct.predict(uneven).forward_s == pytest.approx(300 * 1.8, rel=0.05)


def test_nobody_sends_to_a_rank_that_computes_nothing() -> None:
    model = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    assert model.unevenness([0.5, 0.5], [True, True]) == pytest.approx(1.0)
    assert model.unevenness([1.0, 0.0], [True, False]) == 0.0
    assert model.unevenness([0.0, 1.0], [True, False]) == pytest.approx(2.0)


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


def test_recomputing_ranks_hold_one_microbatch_of_one_unit() -> None:
    fast, _ = (
        CostModel(Setting(CLUSTER, WORKLOAD, profile())).predict(plan(recompute=True)).ranks
    )
    assert fast.memory.activation_bytes == 3 * 100 + 100 * 4


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


def test_ranks_that_only_store_hold_state_and_nothing_else() -> None:
    stores = Plan.by_hand(
        microbatch_sizes=[1, 0], num_microbatches=[1, 0], state_shares=[0.0, 1.0]
    )
    memory = CostModel(Setting(CLUSTER, WORKLOAD, profile())).predict(stores).ranks[1].memory
    assert memory.total_bytes == 400 * 16 + 50


# Inputs on the host


def on_host(*patterns: str, second: int = 1) -> Plan:
    return Plan.by_hand(
        microbatch_sizes=[3, second],
        num_microbatches=[2, second],
        state_shares=[0.25, 0.75],
        recompute=True,
        inputs_on_host=[patterns, False],
    )


def test_of_inputs_on_the_host_two_are_on_the_device() -> None:
    model = CostModel(Setting(CLUSTER, WORKLOAD, profile()))
    # Inputs and their gradients by turn, forward and backward.  The first unit's need no
    # gradient, and stay; of another there is what it returns, or the gradient of that, and in
    # backward the input that comes and its own gradient.
    for patterns, forward, backward, num_on_host in (
        (("*",), [2, 3, 3, 2], [4, 5, 4, 2], 3),
        (("blocks.3",), [2, 3, 4, 4], [5, 5, 4, 2], 1),
        (("blocks.[1-2]",), [2, 3, 3, 2], [4, 5, 4, 2], 2),
    ):
        fast = model.predict(on_host(*patterns)).ranks[0].memory
        rank = replace(on_host(*patterns).ranks[0], device=CLUSTER.devices[0])
        moments = model.moments_by_turn(rank)
        assert (moments.input_bytes / 7).tolist() == [*forward, *backward, 0]
        assert model.host_bytes_per_sample(rank) == num_on_host * 7
        assert fast.host_bytes == 6 * num_on_host * 7
        used = model.working_bytes("fast", rank, np.array([6]), np.array([3]))
        assert used.tolist() == [model.memory(rank, 0).total_bytes]


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


def test_copies_have_lanes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardhet.pricing.hosts.DEVICE_LINK_BYTES_PER_S", 7.0)
    setting = Setting(with_host(None), WORKLOAD, profile())
    timeline = simulate(on_host("*", second=0), setting)
    _, *units = [unit.fqn for unit in WORKLOAD.units]
    copies = timeline.ranks[0].copies
    assert [(each.unit, each.work) for each in copies] == [
        *((unit, Work.TO_HOST) for unit in units),
        *((unit, Work.TO_DEVICE) for unit in reversed(units)),
    ]
    assert [each.seconds for each in copies] == pytest.approx([6.0] * len(copies))
    begun = {(e.unit, e.work): e.start_s for e in timeline.ranks[0].events}
    assert [each.start_s for each in copies[: len(units)]] == pytest.approx(
        [begun[unit, Work.FORWARD] for unit in units]
    )
    assert not timeline.ranks[1].copies
    found = json.loads(timeline.to_chrome_trace())["traceEvents"]
    named = {(e["pid"], e["args"]["name"]) for e in found if e["name"] == "thread_name"}
    assert {(0, "to_host"), (0, "to_device")} <= named
    assert not {(1, "to_host"), (1, "to_device")} & named
    assert sum(e.get("cat") == "to_host" for e in found) == len(units)


def test_rows_and_gradients_are_copied_unit_by_unit() -> None:
    setting = Setting(CLUSTER, WORKLOAD, profile())
    plan = Plan.by_hand(
        microbatch_sizes=[3, 1], state_shares=[0.25, 0.75], optimizer_on_host=[True, False]
    )
    timeline, cost = simulate(plan, setting), CostModel(setting).predict(plan)
    copies = timeline.ranks[0].copies
    part = HostPart.of(CLUSTER.nodes[0], 1)
    seconds = 4 * cost.ranks[0].stored_numel / part.copied_bytes_per_s
    for work in (Work.TO_DEVICE, Work.TO_HOST):
        of_work = [each for each in copies if each.work is work]
        assert {each.unit for each in of_work} == {unit.fqn for unit in WORKLOAD.units}
        assert sum(each.seconds for each in of_work) == pytest.approx(seconds)
        ends = [each.end_s for each in of_work]
        assert all(a <= b.start_s for a, b in zip(ends, of_work[1:], strict=False))
    assert not timeline.ranks[1].copies


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


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "copies"),
    [
        ("float32", "float32", 0),
        ("bfloat16", "float32", 2 * 2),
        ("bfloat16", "bfloat16", 2 * 2 + 2),
        ("float64", "float64", 2 * 8 + 8),
    ],
)
def test_a_stored_element_carries_its_part_of_the_copies_of_the_largest_shard(
    param_dtype: str, reduce_dtype: str, copies: int
) -> None:
    workload = replace(WORKLOAD, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = CostModel(Setting(CLUSTER, workload, profile()))
    assert model.bytes_per_stored_numel == 16 + copies / 4  # one of four equal units


def test_units_that_stay_gathered_are_priced_on_every_rank_that_computes() -> None:
    setting = Setting(CLUSTER, WORKLOAD, profile())
    plans = [
        Plan.by_hand(
            microbatch_sizes=[2, 0], state_shares=[0.5, 0.5], reshard_after_forward=reshards
        )
        for reshards in (True, False)
    ]
    resharded, gathered = (CostModel(setting).predict(plan).ranks for plan in plans)
    assert resharded[0].memory.unsharded_bytes == 2 * 100 * 4  # the unit and the next one
    assert gathered[0].memory.unsharded_bytes == 4 * 100 * 4
    assert gathered[1].memory.unsharded_bytes == 0
    assert (
        simulate(plans[1], setting).ranks[0].memory
        != simulate(plans[0], setting).ranks[0].memory
    )


def test_a_rank_that_computes_nothing_is_not_slowed_down_by_collectives() -> None:
    """Predicted equals simulated where one rank computes and the other only stores."""
    setting = Setting(CLUSTER, WORKLOAD, profile(gather_s=0.5, excess=0.2, slow_excess=10.0))
    plan = Plan.by_hand(microbatch_sizes=[2, 0], state_shares=[0.5, 0.5])
    predicted = CostModel(setting).predict(plan)
    for turn in predicted.turns:
        assert turn.seconds == max(turn.comm_s, turn.compute_s + 0.2 * turn.comm_s)
    simulated_s = simulate(plan, setting).step_time_s
    assert simulated_s == pytest.approx(predicted.step_time_s, rel=0.02)
