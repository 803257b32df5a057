"""What plans leave free of a device: a tenth, or what libraries and fragmentation take."""

from dataclasses import replace

import pytest

from shardhet.records.cluster import LEAST_FRAGMENTATION, Cluster, DeviceSpec, Link, Node
from shardhet.records.margin import (
    with_fraction,
    with_libraries,
)

GIB = 2**30
PCIE, NVLINK = (Link(latency_s=1e-5, bandwidth_bytes_per_s=gb * 1e9) for gb in (12, 150))


def node(host: str, number: int, link: Link | None, gib: int = 16) -> Node:
    device = DeviceSpec(host=host, kind="card", memory_capacity_bytes=gib * GIB)
    return Node(host=host, devices=(device,) * number, link=link)


DESKTOP = with_libraries(Cluster(nodes=(node("a", 3, PCIE, gib=24),)))
ONE_NODE = with_libraries(Cluster(nodes=(node("a", 8, NVLINK),)))
TWO_NODES = with_libraries(
    Cluster(nodes=(node("a", 8, NVLINK), node("b", 1, None)), between_nodes=PCIE)
)
ALL = (DESKTOP, ONE_NODE, TWO_NODES)


def library_bytes(cluster: Cluster, position: int) -> int:
    return cluster.node_of[position].library_bytes or 0


@pytest.mark.parametrize("cluster", ALL)
def test_a_tenth_stays_free_and_a_part_of_it_for_fragmentation(cluster: Cluster) -> None:
    for i, device in enumerate(cluster.devices):
        capacity = device.memory_capacity_bytes or 0
        free = capacity - cluster.memory_budget_bytes(i)
        assert free >= int(0.1 * capacity)
        assert free - library_bytes(cluster, i) >= int(LEAST_FRAGMENTATION * capacity)


@pytest.mark.parametrize("cluster", ALL)
def test_what_is_stated_is_used_whatever_libraries_take(cluster: Cluster) -> None:
    stated = with_fraction(cluster, 0.97)
    assert stated.memory_budget_bytes(0) == int(
        (cluster.devices[0].memory_capacity_bytes or 0) * 0.97
    )
    assert stated.nodes[0].library_bytes is None
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize("cluster", ALL)
def test_a_part_of_all_budgets_and_a_larger_one(cluster: Cluster) -> None:
    some, bound = cluster.with_part_of_budgets(0.97)
    for i in range(cluster.world_size):
        budget = cluster.memory_budget_bytes(i)
        part = min(some.memory_budget_bytes(i), bound.get(i, budget))
        assert part == pytest.approx(0.97 * budget, abs=2)
        library = cluster.node_of[i].library_bytes
        capacity = cluster.capacity_for(2 * budget, library)
        grown = replace(cluster.devices[i], memory_capacity_bytes=capacity)
        nodes = (Node(host="a", devices=(grown,), library_bytes=library),)
        assert Cluster(nodes=nodes).memory_budget_bytes(0) >= 2 * budget
        assert Cluster(nodes=nodes).memory_budget_bytes(0) <= 2 * budget + 2
