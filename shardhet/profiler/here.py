"""The cards and hosts of all ranks: what they are, and what plans may keep on a host.

What the driver and the system say is stated: kinds, memory, what PCIe and the network's default
interface carry.  NVLink is not looked for.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist

from shardhet.comm.channel import Channel
from shardhet.comm.devices import available_bytes, processors, share_of_processors
from shardhet.comm.members import local_device_spec
from shardhet.pricing.hosts import update_bytes
from shardhet.profiler.stopwatch import Stopwatch
from shardhet.records.cluster import USABLE_MEMORY_FRACTION, Cluster, DeviceSpec
from shardhet.records.kinds import built_in_kinds, kind_of_memory, link_named
from shardhet.training.emulation import EmulatedDevice

NUMEL = 2**22  # 16 MiB, of which a step moves 112: more than caches hold
LEAST_BYTES_PER_S = 1e8  # that a cluster may state


@dataclass(frozen=True, slots=True)
class HostPartReport:
    """What one rank finds of its host while the others of the host do the same."""

    bytes_per_s: float  # its processors' share, in the optimizer's step
    free_bytes: int | None  # before anything was placed there; None: it does not say
    device_bytes: int | None  # of it, that an emulated device has; None: all, it has no other

    @classmethod
    def measured(
        cls,
        neighbours: Sequence[Sequence[int]],
        free_bytes: int | None,
        device_bytes: int | None,
        *,
        num_repeats: int,
        emulated: EmulatedDevice | None,
    ) -> "HostPartReport":
        """Time torch's fused AdamW; ``neighbours`` are the processors of the host's others."""
        before = torch.get_num_threads()
        param = torch.nn.Parameter(torch.zeros(NUMEL))
        param.grad = torch.ones(NUMEL)
        optimizer = torch.optim.AdamW([param], fused=True)
        stopwatch, seconds = Stopwatch(torch.device("cpu"), emulated), []
        torch.set_num_threads(share_of_processors(processors(), neighbours))
        try:
            optimizer.step()  # makes its states
            for _ in range(num_repeats):
                with stopwatch.running():
                    optimizer.step()
                seconds.append(stopwatch.seconds)
        finally:
            torch.set_num_threads(before)
        pace = update_bytes(num_moments=2) * NUMEL / median(seconds)
        return cls(pace, free_bytes, device_bytes)


def pace_of(parts: Sequence[HostPartReport]) -> float | None:
    """Bytes that a host's processors read and write per second, of all its ranks' reports."""
    return max(LEAST_BYTES_PER_S, sum(each.bytes_per_s for each in parts)) if parts else None


def room_of(parts: Sequence[HostPartReport]) -> int | None:
    """Bytes of a host for what plans keep there; None if devices have all of its memory."""
    free = [each.free_bytes for each in parts if each.free_bytes is not None]
    taken = [each.device_bytes for each in parts if each.device_bytes is not None]
    if not free or len(taken) < len(parts):
        return None
    return max(1, int(USABLE_MEMORY_FRACTION * (min(free) - sum(taken))))


SYSTEM = Path("/")
GIB = 2**30
TO_FILL_IN = {
    "source": "...",
    "memory_bandwidth_bytes_per_s": "... GB/s",
    "peak_flops_per_s": dict.fromkeys(("float32", "float16", "bfloat16"), "... TFLOP/s"),
}
GENERATIONS = ("2.5", "5.0", "8.0", "16.0", "32.0", "64.0")  # of PCIe, by GT/s
NOTHING_HERE = (
    "torch sees no GPU on this machine. Name the cards, as in cards='4090+A6000 | 3090x2', or "
    "run shardhet cluster out=cards.yaml where they are, and give cluster=cards.yaml."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCard:
    """One card, and what its host says."""

    device: DeviceSpec
    link: str | None = None  # "PCIe 4 x8"
    network: str | None = None  # "10 GbE"
    free_bytes: int | None = None  # of the host's memory

    @classmethod
    def at(cls, index: int) -> Self:
        """The card that torch counts as ``index``."""
        properties = torch.cuda.get_device_properties(index)
        place = [
            getattr(properties, f"pci_{each}_id", 0) for each in ("domain", "bus", "device")
        ]
        return cls(
            device=local_device_spec(torch.device("cuda", index)),
            link=pcie_link("{:04x}:{:02x}:{:02x}.0".format(*place)),
            network=network_link(),
            free_bytes=available_bytes(),
        )


def cards_here() -> list[FoundCard]:
    """The cards of this host that torch sees."""
    return [FoundCard.at(index) for index in range(torch.cuda.device_count())]


def card_of_each_rank(index: int) -> list[FoundCard]:
    """The card of each rank, of which this one's is ``index``.  Collective."""
    own = FoundCard.at(index) if index < torch.cuda.device_count() else None
    found: list[FoundCard | None] = Channel.of_world().exchange_objects(own)
    return [card for card in found if card is not None]


def cluster_here() -> Cluster:
    """The cluster of all ranks' cards if there are ranks, else of this host's.  Collective."""
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_ranks:
        has_gpu = torch.cuda.is_available()
        found = card_of_each_rank(torch.cuda.current_device() if has_gpu else 0)
    else:
        found = cards_here()
    return Cluster.from_document(document_of(found), source="the cards that are here")


def said_of(cluster: Cluster) -> str:
    """A sentence that names what ``cluster_here`` has found."""
    cards = ", ".join(dict.fromkeys(str(device) for device in cluster.devices))
    return f"No cluster is given: planned for what is here, {cards}."


def document_of(found: Sequence[FoundCard]) -> dict[str, Any]:
    """The description of these cards; ``ValueError`` if there are none."""
    if not found:
        raise ValueError(f"cluster: {NOTHING_HERE}")
    hosts = dict.fromkeys(card.device.host for card in found)
    documents = [_of_host([c for c in found if c.device.host == host]) for host in hosts]
    kinds = {kind["kind"]: kind for each in documents for kind in each["kinds"]}
    whole: dict[str, Any] = {"version": 1, "nodes": [n for d in documents for n in d["nodes"]]}
    networks = [each["between_nodes"] for each in documents if "between_nodes" in each]
    if len(networks) == len(documents):
        whole["between_nodes"] = slowest(networks)
    return whole | ({"kinds": list(kinds.values())} if kinds else {})


def _of_host(cards: Sequence[FoundCard]) -> dict[str, Any]:
    stated = []
    for card in cards:
        nbytes = card.device.memory_capacity_bytes or 0
        kind = kind_of_memory(card.device.kind or "", nbytes)
        stated.append({"kind": kind, "memory_capacity_bytes": f"{nbytes / GIB:.2f} GiB"})
    devices = [{**first, "count": len(list(alike))} for first, alike in groupby(stated)]
    node = {"host": cards[0].device.host, "devices": devices}
    links = [card.link for card in cards if card.link is not None]
    if len(links) == len(cards) > 1:
        node["link"] = slowest(links)
    free_bytes = room_of([HostPartReport(0.0, card.free_bytes, 0) for card in cards])
    if free_bytes is not None:
        node["host_memory_bytes"] = f"{free_bytes / GIB:.1f} GiB"
    unknown = [each for each in stated if each["kind"] not in built_in_kinds()]
    document = {"nodes": [node], "kinds": [{**each, **TO_FILL_IN} for each in unknown]}
    return document | ({"between_nodes": cards[0].network} if cards[0].network else {})


def slowest(links: Sequence[str]) -> str:
    """The name of the link that carries least."""
    return min(links, key=lambda name: link_named(name, "link")["bandwidth_bytes_per_s"])


def pcie_link(address: str) -> str | None:
    """What a card and its slot carry at most; None if the system does not say so."""
    card = SYSTEM / "sys/bus/pci/devices" / address
    found = []
    for place in (card, card.resolve().parent):  # the slot is the bridge that it hangs on
        with suppress(OSError, ValueError, IndexError):
            speed = (place / "max_link_speed").read_text().split()[0]
            lanes = int((place / "max_link_width").read_text())
            found.append(f"PCIe {GENERATIONS.index(speed) + 1} x{lanes}")
    return slowest(found) if found else None


def network_link() -> str | None:
    """What the interface of the default route carries; None if the system does not say so."""
    with suppress(OSError, ValueError, StopIteration):
        routes = (SYSTEM / "proc/net/route").read_text().splitlines()[1:]
        interface = next(each.split()[0] for each in routes if each.split()[1] == "00000000")
        mbit = int((SYSTEM / "sys/class/net" / interface / "speed").read_text())
        return f"{mbit / 1000:g} GbE" if mbit > 0 else None
    return None
