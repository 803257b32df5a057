"""How a cluster is described: nodes, links, kinds of devices; short in YAML, whole in JSON."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardhet.planner import Constraints, solve
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Link
from shardhet.records.kinds import built_in_kinds
from shardhet.records.profiles import Source
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
    assert profile.collectives.source is Source.DERIVED
    solution = solve(
        Scenario(cluster, workload, profile),
        global_batch_size=4 * cluster.world_size,
        constraints=Constraints(max_rounds=1),
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


def test_an_unknown_kind_is_told_of_the_nearest_and_of_four_lines_to_fill_in(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"devices\[1\]: kind 'RTX 3065 Ti' is not") as told:
        described(tmp_path, OWN_KINDS.replace("NVIDIA GeForce RTX 3060", "RTX 3065 Ti"))
    assert "'NVIDIA GeForce RTX 3060 Ti' (8 GB)" in str(told.value)
    lines = str(told.value).partition("\n")[2]
    assert len(lines.splitlines()) == 4
    node = "\nversion: 1\nnodes: [{host: a, devices: [{kind: RTX 3065 Ti}]}]"
    with pytest.raises(ValueError, match=r"memory_capacity_bytes is '\.\.\. GiB' but must be"):
        described(tmp_path, lines + node)  # as it is, it is of no card
    filled = lines.replace("... GiB", "12 GiB").replace("... GB/s", "360 GB/s")
    cluster = described(tmp_path, filled.replace("... TFLOP/s", "12.7 TFLOP/s") + node)
    [kind] = cluster.kinds
    assert kind.memory_capacity_bytes == 12 * 2**30
    assert kind.memory_bandwidth_bytes_per_s == 360e9
    assert kind.peak("bfloat16") == 12.7e12


def test_a_kind_that_no_rank_can_run_on_is_refused_however_it_is_described(
    tmp_path: Path,
) -> None:
    text = OWN_KINDS.replace("My Card", "Apple M3 Ultra")
    with pytest.raises(ValueError, match="'Apple M3 Ultra' is not supported: torch has no"):
        described(tmp_path, text).check_described()


def test_cards_of_two_sizes_of_memory_are_told_apart() -> None:
    """The driver calls them alike."""
    [planned] = Cluster.of_cards("RTX 4060 Ti 16GB").devices
    found = DeviceSpec(kind="NVIDIA GeForce RTX 4060 Ti", memory_capacity_bytes=15974 * 2**20)
    assert planned.accepts(found)
    assert planned.accepts(planned)  # of a cluster that is described
    assert not planned.accepts(replace(found, memory_capacity_bytes=7987 * 2**20))


def test_every_kind_that_comes_along_has_a_source_and_can_be_trained_on() -> None:
    kinds = built_in_kinds().values()
    assert len(kinds) >= 130
    for kind in kinds:
        assert kind.source
        assert kind.peak("float32") >= 1e12
        assert 2**31 < kind.memory_capacity_bytes < 2**39


def test_a_link_that_is_missing_is_assumed_and_said_or_named(tmp_path: Path) -> None:
    def without(*keys: str) -> Cluster:
        lines = [line for line in TEXT.splitlines() if not line.strip().startswith(keys)]
        return described(tmp_path, "\n".join(lines))

    assert not described(tmp_path, TEXT).assumed
    cluster = without("between_nodes", "link")
    assert [link.bandwidth_bytes_per_s for link in cluster.links] == [12e9, 125e6, 1e8]
    assert cluster.assumed == "Links that are not stated are assumed: PCIe 3 x16, 1 GbE."
    assert cluster.nodes[2].link is None  # of a single device
    assert Cluster.from_json(cluster.to_json()) == cluster
    with pytest.raises(ValueError, match="between_regions, is not stated"):
        _ = without("between_regions").links


@pytest.mark.parametrize(
    ("written", "bytes_per_s", "latency_s"),
    [
        ("PCIe 4 x8", 12e9, 2e-5),
        ("PCIe 4.0 x16", 24e9, 2e-5),
        ("nvlink 3", 300e9, 1e-5),
        ("InfiniBand HDR", 25e9, 2e-5),
        ("10 GbE", 1.25e9, 5e-5),
        ("2.5gbe", 0.3125e9, 5e-5),
        ("40 Gbit/s Ethernet", 5e9, 5e-5),
        ("12 GB/s", 12e9, 5e-5),
        ("1 GiB/s", 2.0**30, 5e-5),
    ],
)
def test_links_are_stated_by_name(
    written: str, bytes_per_s: float, latency_s: float, tmp_path: Path
) -> None:
    stated = (
        "between_nodes: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.0e+9, source: measured}"
    )
    link = described(tmp_path, TEXT.replace(stated, f"between_nodes: {written}")).between_nodes
    assert link == Link(latency_s=latency_s, bandwidth_bytes_per_s=bytes_per_s, source=written)


@pytest.mark.parametrize("written", ["fast", "PCIe 4", "PCIe 4 x7", "NVLink 9", "10", "10 GbH"])
def test_what_names_no_link_is_refused_with_names(written: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"nodes\[1\]: link is .* Write PCIe 4 x8, NVLink 3, 10"
    ):
        described(tmp_path, TEXT.replace("region: far", f"region: far, link: '{written}'"))


def test_quantities_may_have_units(tmp_path: Path) -> None:
    text = TEXT.replace("memory_capacity_bytes: 1000", "memory_capacity_bytes: 24 GB")
    text = text.replace("region: far", "region: far, host_memory_bytes: 64.0e+9")
    text = text.replace("bandwidth_bytes_per_s: 3.0e+11", "bandwidth_bytes_per_s: 300 GB/s")
    text = text.replace("memory_capacity_bytes: 70", "memory_capacity_bytes: 7 GiB")
    cluster = described(tmp_path, text)
    assert cluster.devices[0].memory_capacity_bytes == 24_000_000_000
    assert cluster.devices[3].memory_capacity_bytes == 7 * 2**30
    assert cluster.nodes[2].host_memory_bytes == 64_000_000_000
    assert cluster.kinds[0].memory_bandwidth_bytes_per_s == 3e11
    with pytest.raises(ValueError, match="memory_capacity_bytes is '24 Gbit' but must be"):
        described(tmp_path, text.replace("24 GB", "24 Gbit"))


GEFORCE = "NVIDIA GeForce RTX"


@pytest.mark.parametrize(
    ("cards", "kinds"),
    [
        (
            "4090+A6000 | 3090x2",
            [[f"{GEFORCE} 4090", "NVIDIA RTX A6000"], [f"{GEFORCE} 3090"] * 2],
        ),
        ("2x 4090 + 3 x 3090", [[f"{GEFORCE} 4090"] * 2 + [f"{GEFORCE} 3090"] * 3]),
        ("RTX4090x1|rtx 3090ti", [[f"{GEFORCE} 4090"], [f"{GEFORCE} 3090 Ti"]]),
        ("4060Ti 16GB + 4060 Ti", [[f"{GEFORCE} 4060 Ti (16 GB)", f"{GEFORCE} 4060 Ti"]]),
        ("1070|TITAN Xp", [["NVIDIA GeForce GTX 1070"], ["NVIDIA TITAN Xp"]]),
        ("7900XTX x2", [["AMD Radeon RX 7900 XTX"] * 2]),
        ("V100 SXM2 32GB|T4 16GB", [["Tesla V100-SXM2-32GB"], ["Tesla T4"]]),
        ("NVIDIA H100 80GB HBM3x8", [["NVIDIA H100 80GB HBM3"] * 8]),
    ],
)
def test_a_cluster_is_written_in_one_line(cards: str, kinds: list[list[str]]) -> None:
    cluster = Cluster.of_cards(cards, network="10 GbE")
    assert [[each.kind for each in node.devices] for node in cluster.nodes] == kinds
    assert {each.host for each in cluster.devices} == {None}  # any that has such cards
    assert cluster.between_nodes is None or cluster.between_nodes.source == "10 GbE"
    cluster.check_described()


def test_hosts_of_one_line_may_be_named() -> None:
    cluster = Cluster.named("tower: 4090 | old: 3090x2")
    assert [device.host for device in cluster.devices] == ["tower", "old", "old"]
