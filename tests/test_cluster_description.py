"""How a cluster is described: nodes, links, kinds of devices; short in YAML, whole in JSON."""

from pathlib import Path

import pytest

from shardhet.planner import Demands, solve
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster
from shardhet.records.kinds import built_in_kinds
from shardhet.records.workload import Workload
from tests.selection import one_in

pytest.importorskip("yaml", reason="descriptions by hand are YAML")

DESCRIBED = Path(__file__).parent.parent / "conf" / "cluster" / "described"

TEXT = """
version: 1
kinds:
  - kind: A
    memory_capacity_bytes: 1000
    memory_bandwidth_bytes_per_s: 3.0e+11
    peak_flops_per_s: {float32: 1.0e+13, bfloat16: 0}
    source: a datasheet
nodes:
  - host: n
    count: 2
    link: {latency_s: 1.0e-5, bandwidth_bytes_per_s: 1.0e+10}
    devices: [{kind: A, count: 3}, {kind: B, memory_capacity_bytes: 70}]
  - {host: alone, region: far, devices: [{kind: A}]}
between_nodes: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.0e+9, source: measured}
between_regions: {latency_s: 0.05, bandwidth_bytes_per_s: 1.0e+8}
usable_memory_fraction: 0.5
"""


def described(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return Cluster.load(path)


def test_a_short_description_stands_for_every_device(tmp_path: Path) -> None:
    cluster = described(tmp_path, TEXT)
    assert [node.host for node in cluster.nodes] == ["n-0", "n-1", "alone"]
    assert [device.kind for device in cluster.devices] == [*"AAAB", *"AAAB", "A"]
    assert cluster.memory_budget_bytes(0) == 500
    assert cluster.memory_budget_bytes(3) == 35
    assert [link.latency_s for link in cluster.links] == [1e-5, 1e-4, 0.05]
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_a_kind_without_the_dtype_says_what_it_has(tmp_path: Path) -> None:
    kind = described(tmp_path, TEXT).kind("A")
    assert kind.peak("float32") == 1e13
    with pytest.raises(ValueError, match="bfloat16; it has float32"):
        kind.peak("bfloat16")


@pytest.mark.parametrize(
    "found, spoiled, words",
    [
        ("version: 1", "version: 3", "version 3"),
        ("count: 2", "count: 0", "count"),
        ("count: 3", "count: many", "count"),
        ("{kind: A}", "{kind: A, speed: 3}", "speed"),
        ("host: alone", "host: n-1", "n-1"),
        ("latency_s: 0.05", "latency_s: -1", "latency_s"),
        ("memory_capacity_bytes: 1000", "memory_capacity_bytes: lots", "memory_capacity_bytes"),
        (
            "usable_memory_fraction: 0.5",
            "usable_memory_fraction: 1.5",
            "usable_memory_fraction",
        ),
        ("nodes:", "hosts:", "nodes"),
        ("region: far", "region: [far", "not YAML"),
        ("version: 1", "version: 1\nnodes: []", r"not YAML \(line \d+: 'nodes' stands twice"),
    ],
)
def test_a_spoiled_description_is_refused_by_file_and_field(
    tmp_path: Path, found: str, spoiled: str, words: str
) -> None:
    assert found in TEXT
    with pytest.raises(ValueError, match=words) as raised:
        described(tmp_path, TEXT.replace(found, spoiled))
    assert "c.yaml" in str(raised.value)


@pytest.mark.parametrize(
    "path", one_in(2, sorted(DESCRIBED.glob("*.yaml"))), ids=lambda path: path.stem
)
def test_the_clusters_that_come_along_can_be_planned_for(path: Path) -> None:
    cluster = Cluster.load(path)
    if not cluster.kinds:
        pytest.skip("not described by specifications")
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert all(cluster.kind(device.kind).source for device in cluster.devices)
    assert all(link.source for link in cluster.links)
    workload = Workload.transformer(
        num_layers=4, width=512, num_heads=8, seq_len=128, vocab_size=1000
    )
    profile = derive_profile(cluster, workload)
    assert not profile.is_measured
    solution = solve(
        Setting(cluster, workload, profile),
        global_batch_size=4 * cluster.world_size,
        demands=Demands(max_rounds=1),
    )
    assert solution.relative_gap < 0.01
    assert all(rank.fits for rank in solution.predicted.ranks)


OWN_KINDS = """
version: 1
kinds:
  - {kind: My Card, source: tried, memory_capacity_bytes: 12884901888,
     memory_bandwidth_bytes_per_s: 360.0e+9,
     peak_flops_per_s: {float32: 12.7e+12}}
nodes:
  - host: box
    link: {latency_s: 1.0e-5, bandwidth_bytes_per_s: 1.0e+10}
    devices: [{kind: My Card}, {kind: NVIDIA GeForce RTX 3060}, {kind: NVIDIA GeForce RTX 4090}]
"""


def test_own_kinds_stand_beside_those_that_come_along(tmp_path: Path) -> None:
    cluster = described(tmp_path, OWN_KINDS)
    assert [kind.source == "tried" for kind in cluster.kinds] == [True, False, False]
    assert cluster.devices[1].memory_capacity_bytes == 11980 * 2**20
    assert dict(cluster.kinds[2].peak_flops_per_s)["fp16_accumulation"] == 330.4e12
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_an_unknown_kind_is_told_of_the_nearest_and_of_four_lines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"devices\[1\]: kind 'RTX 3060' is not known") as told:
        described(tmp_path, OWN_KINDS.replace("NVIDIA GeForce RTX 3060", "RTX 3060"))
    assert "'NVIDIA GeForce RTX 3060', 'NVIDIA GeForce RTX 3060 Ti'" in str(told.value)
    lines = str(told.value).partition("\n")[2]
    assert len(lines.splitlines()) == 4
    cluster = described(
        tmp_path, f"{lines}\nversion: 1\nnodes: [{{host: a, devices: [{{kind: RTX 3060}}]}}]"
    )
    assert cluster.kinds[0].source == "where from"


def test_every_kind_that_comes_along_has_a_source_and_can_be_trained_on() -> None:
    kinds = built_in_kinds().values()
    assert len(kinds) >= 60
    for kind in kinds:
        assert kind.source
        assert kind.peak("float32") >= 1e12
        assert 2**32 < kind.memory_capacity_bytes < 2**39


def test_kinds_of_another_file_are_looked_for_beside_the_description(tmp_path: Path) -> None:
    text = "version: 1\nkinds: absent.yaml\nnodes: []\n"
    with pytest.raises(ValueError, match=r"kinds names .*absent\.yaml, which does not exist"):
        described(tmp_path, text)


def test_a_link_that_is_missing_is_named_when_it_is_needed(tmp_path: Path) -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith("between_nodes")]
    with pytest.raises(ValueError, match="cluster: between_nodes, is not stated"):
        _ = described(tmp_path, "\n".join(lines)).links
