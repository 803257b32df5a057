"""Simulated steps against schedules drawn by hand, and against the closed form of the cost."""

import json
from itertools import pairwise

import pytest

from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.plan import Plan
from shardhet.records.schedule import GATHER
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Timeline, Work
from tests.test_cost import CLUSTER, WORKLOAD, plan, profile
from tests.test_planner import WORKLOAD as DECODER
from tests.test_planner import random_case


def timeline_of(made: Plan, **kwargs: float) -> Timeline:
    return simulate(made, Setting(CLUSTER, WORKLOAD, profile(**kwargs)))


def works(timeline: Timeline, position: int) -> list[tuple[str, str, float, float]]:
    return [
        (event.work.value, event.unit, event.start_s, event.end_s)
        for event in timeline.ranks[position].events
    ]


def test_alone_a_rank_computes_without_waiting() -> None:
    cluster = Cluster(
        nodes=(
            Node(host="a", devices=(DeviceSpec(kind="fast", memory_capacity_bytes=10**6),)),
        ),
        usable_memory_fraction=1.0,
    )
    alone = Plan.by_hand(microbatch_sizes=[2], num_microbatches=[1], state_shares=[1.0])
    timeline = simulate(alone, Setting(cluster, WORKLOAD, profile(gather_s=5.0)))
    assert works(timeline, 0) == [
        *(("forward", f"blocks.{i}", 2.0 * i, 2.0 * i + 2) for i in range(4)),
        *(("backward", f"blocks.{3 - i}", 8.0 + 4 * i, 12.0 + 4 * i) for i in range(4)),
        ("optimizer", "", 24.0, 28.0),
    ]
    assert timeline.step_time_s == 28.0
    assert timeline.idle_fraction(0) == 0.0


def test_gathers_hide_behind_compute_and_the_fast_rank_waits_for_the_slow_one() -> None:
    timeline = timeline_of(plan(), gather_s=1.0)
    gathers = [e for e in timeline.collectives if e.work is GATHER]
    assert [e.unit for e in gathers] == [f"blocks.{i}" for i in (0, 1, 2, 3, 2, 1, 0)]
    # The first gather is exposed. The second, launched beside it, follows at once; the third
    # is launched when the slow rank begins its second turn.
    assert [e.start_s for e in gathers[:4]] == pytest.approx([0, 1, 11, 21])
    slow = timeline.ranks[1]
    assert [e.start_s for e in slow.events if e.work is Work.FORWARD] == pytest.approx(
        [1, 11, 21, 31]
    )
    assert timeline.ranks[0].waiting_s > slow.waiting_s
    assert timeline.exposed_comm_s(1) == pytest.approx(1 + 2)  # first gather, last reduction


def test_links_that_are_slower_than_compute_set_the_pace() -> None:
    timeline = timeline_of(plan(), gather_s=100.0)
    busy_s = sum(event.seconds for event in timeline.collectives)
    assert busy_s == pytest.approx(7 * 100 + 4 * 200)
    assert timeline.step_time_s >= busy_s
    assert timeline.step_time_s <= busy_s + 120 + 3 + 1e-6


def test_no_rank_is_in_two_places_and_the_links_carry_one_thing_at_a_time() -> None:
    timeline = timeline_of(plan(recompute=True), gather_s=3.0, excess=0.2)
    for events in (*(rank.events for rank in timeline.ranks), timeline.collectives):
        for one, following in pairwise(events):
            assert one.end_s <= following.start_s + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_the_simulated_step_lies_between_the_slowest_rank_and_the_predicted_step(
    seed: int,
) -> None:
    cluster, measured, batch = random_case(seed)
    model = CostModel(Setting(cluster, DECODER, measured))
    size = cluster.world_size
    made = Plan.by_hand(
        microbatch_sizes=[1 + (i + seed) % 3 for i in range(size)],
        rank_batch_sizes=[batch if i == 0 else (i * seed) % 5 for i in range(size)],
        state_shares=[1 / size] * size,
        recompute=[i % 2 == 0 for i in range(size)],
    )
    predicted = model.predict(made)
    timeline = simulate(made, Setting(cluster, DECODER, measured))
    slowest = max(rank.forward_s + rank.backward_s for rank in predicted.ranks)
    assert timeline.step_time_s >= slowest
    assert timeline.step_time_s == pytest.approx(predicted.step_time_s, rel=0.1)
    for position, rank in enumerate(timeline.ranks):
        assert rank.busy_s + rank.waiting_s == pytest.approx(timeline.step_time_s)
        assert rank.peak_bytes <= predicted.ranks[position].memory.total_bytes
        assert rank.memory[-1].nbytes == rank.memory[0].nbytes


def test_ranks_that_compute_nothing_only_wait_and_store() -> None:
    stores = Plan.by_hand(
        microbatch_sizes=[2, 0], num_microbatches=[1, 0], state_shares=[0.25, 0.75]
    )
    rank = timeline_of(stores, gather_s=1.0).ranks[1]
    assert {event.work for event in rank.events} <= {
        Work.WAIT_GATHER,
        Work.WAIT_REDUCE,
        Work.AGREE,
        Work.OPTIMIZER,
    }
    assert rank.peak_bytes == 280 * 16 + 50


def test_units_that_stay_unsharded_are_gathered_once() -> None:
    kept = Plan.by_hand(
        microbatch_sizes=[3, 1], state_shares=[0.25, 0.75], reshard_after_forward=False
    )
    gathers = [e for e in timeline_of(kept, gather_s=1.0).collectives if e.work is GATHER]
    assert len(gathers) == 4


def test_the_trace_is_what_perfetto_reads() -> None:
    timeline = timeline_of(plan(), gather_s=1.0)
    events = json.loads(timeline.to_chrome_trace())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["tid"] for event in spans} == {0, 1, 2}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(
        timeline.step_time_s * 1e6
    )
    assert all(event["dur"] > 0 for event in spans)


def test_a_device_that_carries_data_itself_computes_afterwards() -> None:
    # Forward: 40 s of compute on the slower device, three gathers of 2 s beside it.
    timeline = timeline_of(plan(), gather_s=2.0, excess=1.5)
    alone = timeline_of(plan(), gather_s=2.0)
    lost_s = timeline.step_time_s - alone.step_time_s
    assert lost_s >= 1.5 * 5 * 2.0  # five gathers lie beside compute, and most reductions
    assert lost_s <= 1.5 * (7 * 2.0 + 4 * 4.0)
