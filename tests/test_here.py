"""``shardhet cluster``, and planning for the cards that are here."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from shardhet import plan_for
from shardhet.apps.cluster import main
from shardhet.profiler import here
from shardhet.profiler.here import (
    FoundCard,
    cluster_here,
    network_link,
    pcie_link,
)
from shardhet.records.cluster import Cluster, DeviceSpec
from tests.small_models import Chain
from tests.worlds import run_ranks

MIB = 2**20


def card(host: str, kind: str, mib: int, **said: str | int) -> FoundCard:
    device = DeviceSpec(host=host, kind=kind, memory_capacity_bytes=mib * MIB, uuid="its own")
    return FoundCard(device=device, **said)  # type: ignore[arg-type]


FOUND = [
    card("tower", "NVIDIA GeForce RTX 4090", 24080, link="PCIe 4 x16", network="10 GbE"),
    card("tower", "NVIDIA GeForce RTX 4060 Ti", 15975, link="PCIe 4 x8", network="10 GbE"),
    card("old", "Tesla T4", 14912, link="PCIe 3 x16", network="1 GbE", free_bytes=10 * 2**30),
    card("old", "Tesla T4", 14912, link="PCIe 3 x16", network="1 GbE", free_bytes=12 * 2**30),
]


def test_what_is_found_is_a_file_that_plans_are_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(here, "cards_here", lambda: FOUND)
    path = tmp_path / "cards.yaml"
    main([f"out={path}"])
    assert f"written to {path}" in capsys.readouterr().err.replace("\n", "")
    cluster = Cluster.load(path)
    cluster.check_described()
    assert not cluster.assumed
    found = [node.link.source for node in cluster.nodes if node.link]
    assert [*found, cluster.between_nodes and cluster.between_nodes.source] == [
        "PCIe 4 x8",
        "PCIe 3 x16",
        "1 GbE",
    ]
    assert cluster.devices[1].kind == "NVIDIA GeForce RTX 4060 Ti (16 GB)"
    for planned, each in zip(cluster.devices, FOUND, strict=True):
        assert planned.accepts(each.device)
    memory = [node.host_memory_bytes for node in cluster.nodes]
    assert memory == [None, 9 * 2**30]  # 0.9 of what the ranks found, at least


def test_a_card_that_is_not_known_is_to_be_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(here, "cards_here", lambda: [card("a", "NVIDIA New", 1000)] * 2)
    main([])
    told = capsys.readouterr()
    assert "Fill in what stands as ... from its data sheet" in told.err
    path = tmp_path / "cards.yaml"
    path.write_text(told.out)
    with pytest.raises(ValueError, match=r"memory_bandwidth_bytes_per_s is '\.\.\. GB/s' but"):
        Cluster.load(path)
    filled = told.out.replace("... GB/s", "900 GB/s").replace("... TFLOP/s", "20 TFLOP/s")
    path.write_text(filled)
    assert Cluster.load(path).kind("NVIDIA New").peak("float16") == 20e12


def test_pcie_and_the_network_are_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "SYSTEM", tmp_path)
    assert pcie_link("0000:01:00.0") is None
    assert network_link() is None
    slot = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    place = slot / "0000:01:00.0"
    place.mkdir(parents=True)
    for folder, speed, lanes in ((place, "16.0", 16), (slot, "8.0", 8)):
        (folder / "max_link_speed").write_text(f"{speed} GT/s PCIe\n")
        (folder / "max_link_width").write_text(f"{lanes}\n")
    of_bus = tmp_path / "sys/bus/pci/devices"
    of_bus.mkdir(parents=True)
    (of_bus / place.name).symlink_to(place)
    assert pcie_link("0000:01:00.0") == "PCIe 3 x8"  # of the slot
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(
        "Iface Destination Gateway\ndocker0 000011AC 0\neth1 00000000 0101A8C0\n"
    )
    (tmp_path / "sys/class/net/eth1").mkdir(parents=True)
    speed = tmp_path / "sys/class/net/eth1/speed"
    for said, link in (("2500\n", "2.5 GbE"), ("-1\n", None)):
        speed.write_text(said)
        assert network_link() == link


def test_wrong_keys_and_no_gpu_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for given, words in (
        ([], "cluster: torch sees no GPU on this machine. Name the cards"),
        (["oot=c.yaml"], "oot=c.yaml: the only key is out"),
        (["out=/nowhere/c.yaml"], "the folder of '/nowhere/c.yaml' does not exist"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(given)
        assert words in capsys.readouterr().err


def test_without_a_cluster_plans_are_for_what_is_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Chain(*(nn.Linear(8, 8) for _ in range(3)))
    with pytest.raises(ValueError, match="cluster: torch sees no GPU on this machine"):
        plan_for(model, torch.zeros(2, 8), global_batch_size=8)
    monkeypatch.setattr(here, "cards_here", lambda: FOUND[2:])
    plan = plan_for(model, torch.zeros(2, 8), global_batch_size=8)
    assert [rank.device.kind for rank in plan.ranks] == ["Tesla T4"] * 2
    assert "No cluster is given: planned for what is here, Tesla T4 14.6 GiB" in caplog.text


def _kinds_of_all(rank: int) -> list[str | None]:
    """As on three hosts' cards, each of a rank."""
    with (
        mock.patch.object(FoundCard, "at", FOUND.__getitem__),
        mock.patch("torch.cuda.device_count", return_value=4),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.current_device", return_value=rank),
    ):
        return [device.kind for device in cluster_here().devices]


def test_ranks_plan_for_the_cards_of_all() -> None:
    kinds = [each.kind for each in Cluster.of_cards("4090+4060 Ti 16GB | T4").devices]
    assert run_ranks(_kinds_of_all, 3) == [kinds] * 3
