"""What people write in place of numbers: ``24 GiB``, ``PCIe 4 x8``, ``4090+A6000 | 3090x2``.

Here it becomes the document that ``Cluster`` reads.  Links are priced by what they carry in one
direction, after the protocol of PCIe (12 of 16 GB/s in 3.0 x16) and before that of a network,
which ``shardhet.pricing.derive`` takes off.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardhet.records.kinds import DeviceKind, named_kind

LINK_KEYS = ("link", "between_nodes", "between_regions")
ASSUMED = ", assumed because none is stated"
# What every board and every machine has at least, so that plans are not slower than promised.
DEFAULT_LINKS = {"link": f"PCIe 3 x16{ASSUMED}", "between_nodes": f"1 GbE{ASSUMED}"}
PCIE_LATENCY_S, NVLINK_LATENCY_S, NETWORK_LATENCY_S, FABRIC_LATENCY_S = 2e-5, 1e-5, 5e-5, 2e-5
PCIE_3_LANE_BYTES_PER_S = 12e9 / 16  # twice as much in each later generation
# One way, of all links of a card: of P100, V100, A100, H100 and B200 (NVIDIA's data sheets).
NVLINK_BYTES_PER_S = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9}
INFINIBAND_BITS_PER_S = {"fdr": 56e9, "edr": 100e9, "hdr": 200e9, "ndr": 400e9}
BYTES = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
PACES = BYTES | {
    "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "mbps": 1e6 / 8, "gbps": 1e9 / 8,
    "gbe": 1e9 / 8,
}  # fmt: skip
FLOPS = {"": 1.0, "gflop": 1e9, "tflop": 1e12}
MEASURED = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?) *([a-z]*)(?:/s)?", re.IGNORECASE)
LINK_EXAMPLES = "PCIe 4 x8, NVLink 3, 10 GbE, InfiniBand HDR or 12 GB/s"


def spelled_out(document: Any, where: str) -> Any:
    """The document with numbers for quantities with units, and links in place of their names.

    Raises ``ValueError``, which names the field, if what stands there is neither.
    """
    if isinstance(document, list):
        return [spelled_out(each, f"{where}[{i}]") for i, each in enumerate(document)]
    if not isinstance(document, dict):
        return document
    return {key: _spelled_out(key, each, f"{where}: {key}") for key, each in document.items()}


def _spelled_out(key: Any, value: Any, where: str) -> Any:
    name = str(key)
    if name in LINK_KEYS and isinstance(value, str):
        return link_named(value, where)
    if name == "peak_flops_per_s" and isinstance(value, dict):
        return {each: _number(flops, FLOPS, where) for each, flops in value.items()}
    if name.endswith(("_bytes", "_bytes_per_s")):
        number = _number(value, PACES if name.endswith("_s") else BYTES, where)
        # 23.65 GiB is no whole number of bytes; 64.0e+9 is one, and 64.5 a mistake.
        is_whole = isinstance(value, str) or (isinstance(number, float) and number.is_integer())
        return int(number) if is_whole and name.endswith("_bytes") else number
    return spelled_out(value, where)


def _number(value: Any, units: Mapping[str, float], where: str) -> Any:
    """The number that a text states in one of these units; anything else as it is."""
    if not isinstance(value, str):
        return value
    found = MEASURED.fullmatch(value.strip())
    if found is None or found[2].lower() not in units:
        raise ValueError(
            f"{where} is {value!r} but must be a number, or one with a unit. Write "
            "24 GiB, 936 GB/s or 35.6 TFLOP/s."
        )
    return float(found[1]) * units[found[2].lower()]


def link_named(name: str, where: str) -> dict[str, Any]:
    """The link that is called ``PCIe 4 x8``, ``NVLink 3``, ``10 GbE`` or ``12 GB/s``."""
    plain = name.removesuffix(ASSUMED).strip().lower()
    pcie = re.fullmatch(r"pcie *(\d)(?:\.0)?[ ,]*x *(\d+)", plain)
    nvlink = re.fullmatch(r"nvlink *(\d)(?:\.0)?", plain)
    fabric = re.fullmatch(r"(?:infiniband|ib) *(fdr|edr|hdr|ndr)", plain)
    if pcie and int(pcie[2]) in (1, 2, 4, 8, 16) and 1 <= int(pcie[1]) <= 6:
        per_lane = PCIE_3_LANE_BYTES_PER_S * 2.0 ** (int(pcie[1]) - 3)
        latency_s, bytes_per_s = PCIE_LATENCY_S, int(pcie[2]) * per_lane
    elif nvlink and int(nvlink[1]) in NVLINK_BYTES_PER_S:
        latency_s, bytes_per_s = NVLINK_LATENCY_S, NVLINK_BYTES_PER_S[int(nvlink[1])]
    elif fabric:
        latency_s, bytes_per_s = FABRIC_LATENCY_S, INFINIBAND_BITS_PER_S[fabric[1]] / 8
    else:
        found = MEASURED.fullmatch(plain.removesuffix("ethernet").strip())
        paces = PACES | {"g": PACES["gbe"]}  # as networks are called
        if found is None or not found[2] or found[2] not in paces:
            raise ValueError(
                f"{where} is {name!r} but must be the name of a link. Write {LINK_EXAMPLES}, "
                "or latency_s and bandwidth_bytes_per_s."
            )
        latency_s, bytes_per_s = NETWORK_LATENCY_S, float(found[1]) * paces[found[2]]
        if where.endswith(": link"):
            latency_s = PCIE_LATENCY_S
    return {"latency_s": latency_s, "bandwidth_bytes_per_s": bytes_per_s, "source": name}


def cards_document(
    cards: str, network: str | None, known: Mapping[str, DeviceKind]
) -> dict[str, Any]:
    """The description that ``[host:] CARD[xN] + CARD | ...`` stands for.

    A card is named by what tells it from all others, as 4090, A6000 or V100 SXM2 32GB.
    """
    hosts = [each.rpartition(":") for each in cards.split("|")]
    if len({bool(colon) for _, colon, _ in hosts}) > 1:
        raise ValueError(f"{cards!r} names some hosts. Name all, or none.")
    nodes = [
        {
            "host": host.strip() if colon else f"host-{i}",
            "devices": [_card(each, known) for each in listed.split("+")],
        }
        for i, (host, colon, listed) in enumerate(hosts)
    ]
    between = {} if network is None else {"between_nodes": network}
    return {"version": 1, "nodes": nodes, **between}


def _card(written: str, known: Mapping[str, DeviceKind]) -> dict[str, Any]:
    name = written.strip()
    # "RTX 580" and "rx 580" are no 580 cards: the x of a number follows no letter of its case.
    count = re.fullmatch(r"(\d{1,2}) *[xX*] *(.+)|(.+?) *(?<![a-z])[x*] *(\d{1,3})", name)
    number, name = (count[1] or count[4], count[2] or count[3]) if count else ("1", name)
    if not name or int(number) < 1 or re.search("[,;/&]", name):
        raise ValueError(
            f"{written!r} but a host has cards, as in '4090+A6000 | 3090x2'. Write each "
            "with + between two cards, x2 behind two alike, and | between two hosts."
        )
    return {"kind": named_kind(name, known), "count": int(number)}


def conf_dir() -> Path:
    """The folder ``conf/``, inside the installed package or next to it in a checkout."""
    package_dir = Path(__file__).parent.parent
    installed = package_dir / "conf"
    return installed if installed.is_dir() else package_dir.parent / "conf"


def described_cluster(name: str | Path) -> str | Path:
    """The path of the cluster that is described under this name; else the name as it is."""
    path = conf_dir() / "cluster" / "described" / f"{name}.yaml"
    return path if path.is_file() else name
