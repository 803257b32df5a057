"""What replicas are predicted to take: bytes as they are kept, seconds by the formulas."""

import pytest

from shardhet import Plan
from shardhet.apps.planning.replicas import told_price
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.replicas import (
    COPY_BYTES_PER_S,
    WRITE_BYTES_PER_S,
    ReplicaPrice,
    replica_price,
)
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.records.kinds import DeviceKind
from shardhet.records.plan import RankPlan
from shardhet.records.workload import Unit, UnitKind, Workload

KIND = DeviceKind(
    kind="card",
    memory_capacity_bytes=10**10,
    memory_bandwidth_bytes_per_s=1e11,
    peak_flops_per_s=(("float32", 1e13),),
    source="made up",
)
SLOW, SLOWER = (
    Link(latency_s=0.0, bandwidth_bytes_per_s=1e8),
    Link(latency_s=0.0, bandwidth_bytes_per_s=1e7),
)
NUM_ROWS, WIDTH = 1000, 10
NUMEL = NUM_ROWS * WIDTH
KEPT = 12  # bytes per element: float32 parameter and two moments


def setting(*nodes: tuple[int, str], link: Link | None = SLOW) -> Setting:
    """One of nodes with so many devices, each in a region."""
    device = DeviceSpec(kind="card", memory_capacity_bytes=10**10)
    cluster = Cluster(
        nodes=tuple(
            Node(host=f"n{i}", devices=(device,) * num, link=SLOW, region=region)
            for i, (num, region) in enumerate(nodes)
        ),
        kinds=(KIND,),
        between_nodes=link,
        between_regions=SLOWER,
    )
    kind = UnitKind(
        name="block",
        param_shapes=((NUM_ROWS, WIDTH),),
        forward_flops=10**9,
        backward_flops=2 * 10**9,
        input_bytes=40,
        activation_bytes=100,
        transient_bytes=0,
    )
    workload = Workload(kinds=(kind,), units=(Unit(fqn="block", kind="block"),))
    derivable = cluster if link is not None else setting(*nodes).cluster
    return Setting(cluster, workload, derive_profile(derivable, workload))


def plan(*shares: float) -> Plan:
    return Plan(
        ranks=tuple(RankPlan(microbatch_sizes=(1,), state_share=share) for share in shares)
    )


def test_every_node_has_its_own_rows_and_those_that_it_keeps_twice() -> None:
    price = replica_price(plan(0.5, 0.3, 0.2), setting((1, ""), (1, ""), (1, "")))
    # The largest, 0.5, goes to the emptiest node, the third; then 0.3 and 0.2 to the second
    # and to the first by what these hold.
    held = [0.5 + 0.3, 0.3 + 0.2, 0.2 + 0.5]
    assert price.bytes_by_node == tuple(pytest.approx(2 * KEPT * NUMEL * h) for h in held)
    assert price.pause_s == pytest.approx(0.5 * KEPT * NUMEL / COPY_BYTES_PER_S)
    assert price.write_s == pytest.approx(0.5 * KEPT * NUMEL / WRITE_BYTES_PER_S)
    assert price.send_s == pytest.approx(0.5 * KEPT * NUMEL / 1e8)  # the first node sends


def test_what_a_node_sends_and_receives_adds_up() -> None:
    price = replica_price(plan(0.3, 0.3, 0.4), setting((2, ""), (1, "")))
    assert price.send_s == pytest.approx(0.6 * KEPT * NUMEL / 1e8)


def test_copies_between_regions_take_their_link() -> None:
    price = replica_price(plan(0.5, 0.5), setting((1, "east"), (1, "west")), link_fraction=0.5)
    assert price.send_s == pytest.approx(0.5 * KEPT * NUMEL / 1e7 / 0.5)


def test_one_node_keeps_its_rows_once_per_version() -> None:
    price = replica_price(plan(0.5, 0.5), setting((2, "")))
    assert price.bytes_by_node == (2 * KEPT * NUMEL,)
    assert price.send_s == 0
    assert "One node: its loss takes them along" in told_price(price, 1.0, 1)


def test_an_unknown_link_is_said() -> None:
    price = replica_price(plan(0.5, 0.5), setting((1, ""), (1, ""), link=None))
    assert price.send_s is None
    text = told_price(price, 1e-9, 1)
    assert "between_nodes is not stated" in text
    assert "at most" not in text  # of steps that are longer by a time that is not known


@pytest.mark.parametrize("step_s", [0.5, 3.0, 40.0])
def test_steps_between_replicas_that_are_called_cheap_are(step_s: float) -> None:
    price = ReplicaPrice(bytes_by_node=(1, 1), pause_s=0.5, write_s=2.0, send_s=20.0)
    every = price.least_every(step_s, 0.05)
    assert price.most_s(step_s, every) <= 0.05 * step_s
    assert every == 1 or price.most_s(step_s, every - 1) > 0.05 * step_s
    assert price.wait_s(step_s, 1) == pytest.approx(0.5 + max(0.0, 22.0 - step_s))
