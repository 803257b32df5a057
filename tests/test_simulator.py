"""Simulated steps against schedules drawn by hand, and against the closed form of the cost."""

import json

import pytest

from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.plan import Plan
from shardhet.records.schedule import GATHER
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Timeline, Work
from tests.test_cost import CLUSTER, WORKLOAD, plan, profile


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
