"""Whose plans are priced, and what a trace of a simulated step holds.

Prices themselves are recorded (``tests.recorded_prices``), and held by what is measured.
"""

import json
from dataclasses import replace

import pytest

from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
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


def profile(*, gather_s: float = 0.0) -> Profile:
    devices = tuple(
        device_profile(
            kind,
            lambda m, speed=speed: (speed * m, 2 * speed * m),
            sizes=(1, 2, 3),
            unit_kinds=("block",),
            optimizer_seconds_per_element=0.01,
            reserved_bytes=50,
        )
        for kind, speed in (("fast", 1.0), ("slow", 10.0))
    )
    links = collectives(
        (200, 400, 800),
        gather_s_per_byte=gather_s / 400,
        reduce_s_per_byte=2 * gather_s / 400,
    )
    return Profile(devices=devices, collectives=links)


def plan() -> Plan:
    return Plan.by_hand(
        microbatch_sizes=[3, 1], num_microbatches=[2, 1], state_shares=[0.25, 0.75]
    )


def test_the_trace_is_what_perfetto_reads() -> None:
    timeline = simulate(plan(), Scenario(CLUSTER, WORKLOAD, profile(gather_s=1.0)))
    events = json.loads(timeline.to_chrome_trace())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["tid"] for event in spans} == {0, 1, 2}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(
        timeline.step_time_s * 1e6
    )
    assert all(event["dur"] > 0 for event in spans)


def test_like_cards_have_the_budgets_of_their_own_hosts() -> None:
    card = DeviceSpec(kind="fast", memory_capacity_bytes=10_000)
    nodes = (
        Node(host=host, devices=(card,), library_bytes=nbytes)
        for host, nbytes in (("a", 1_000), ("b", 2_000))
    )
    cluster = replace(CLUSTER, nodes=tuple(nodes))
    even = Plan.even(2, microbatch_size=1)
    found = CostModel(Scenario(cluster, WORKLOAD, profile())).predict(even)
    assert [rank.memory_budget_bytes for rank in found.ranks] == [8_500, 7_500]


def test_a_plan_for_other_devices_is_refused() -> None:
    other = Plan.by_hand(
        microbatch_sizes=[1, 1],
        state_shares=[0.5, 0.5],
        devices=[DeviceSpec(kind="slow"), DeviceSpec(kind="fast")],
    )
    model = CostModel(Scenario(CLUSTER, WORKLOAD, profile()))
    with pytest.raises(ValueError, match=r"ranks\[0\] is for slow"):
        model.predict(other)
    with pytest.raises(ValueError, match="it has 1 devices"):
        model.predict(Plan.even(1, microbatch_size=1))


def test_the_plan_that_a_run_leaves_is_priced_though_its_root_has_no_elements() -> None:
    plan = Plan.by_hand(microbatch_sizes=[1, 1])
    model = CostModel(Scenario(CLUSTER, WORKLOAD, profile()))
    of_run = replace(plan, units=(*WORKLOAD.planned_units, PlannedUnit(fqn="", numel=0)))
    assert model.predict(of_run).step_time_s == model.predict(plan).step_time_s
    other = replace(of_run, units=(*WORKLOAD.planned_units, PlannedUnit(fqn="", numel=3)))
    with pytest.raises(ValueError, match=r"403 parameters, .* has 400; units root differ"):
        model.predict(other)
