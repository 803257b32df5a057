"""Kinds of devices, and what people write in place of numbers: ``24 GiB``, ``PCIe 4 x8``,
``4090+A6000 | 3090x2``.

``kinds.csv`` has a source beside the figures of each kind.  Peaks are dense matrix products
that sum in float32, except under ``fp16_accumulation``: float16 with sums in float16.  A field
without a source is empty.  Memory is what a program can allocate of what the card carries.

What is written becomes the document that ``Cluster`` reads.  Links are priced by what they
carry in one direction, after the protocol of PCIe (12 of 16 GB/s in 3.0 x16) and before that of
a network, which ``shardhet.pricing.derive`` takes off.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from shardhet.records.codec import OBJECT, Bounds, NonNegative, PositiveInt

LEAST_PEAK_FLOPS_PER_S = 1e9  # a single core of any processor does more
FP16_ACCUMULATION = "fp16_accumulation"  # the peak in float16 with sums in float16, if listed
PEAKS = ("float32", "float16", "bfloat16", FP16_ACCUMULATION)
NUM_NEAREST = 3
# Words of names that tell no card from another.
_MAKERS, _SERIES = "nvidia amd intel", "geforce gtx rtx radeon rx instinct tesla arc generation"
SERIES = frozenset(f"{_MAKERS} {_SERIES}".split())
UNSUPPORTED = {  # by what names of such devices have
    "apple|mps|^m[1-9]( pro| max| ultra)?$": "torch has no collectives for Apple's GPUs (MPS)",
    "intel|arc": "Intel's GPUs (XPU) have not been tried, and no command starts ranks on them",
}
MEMORY_ALIKE = 0.88  # drivers show up to an eighth less than a card is sold with
MIB, GIGA, TERA = 2**20, 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """The specification of one kind of device, and the source of its figures."""

    kind: str
    memory_capacity_bytes: PositiveInt
    memory_bandwidth_bytes_per_s: Annotated[float, Bounds(minimum=1e8)]
    peak_flops_per_s: Annotated[tuple[tuple[str, NonNegative], ...], OBJECT]  # by dtype
    source: str
    board_power_w: Annotated[float, Bounds(minimum=1.0, maximum=1e4)] | None = None

    def __post_init__(self) -> None:
        for dtype, flops in self.peak_flops_per_s:
            if 0 < flops < LEAST_PEAK_FLOPS_PER_S:
                raise ValueError(
                    f"cluster: kind {self.kind!r} has peak_flops_per_s of {flops:g} in "
                    f"{dtype}, but these are FLOP per second. Write {flops:.1f}e+12 if TFLOP/s "
                    "are meant."
                )

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in ``dtype``; raises ``ValueError`` if the device does not support it."""
        peaks = dict(self.peak_flops_per_s)
        if not peaks.get(dtype):
            has = ", ".join(name for name, flops in peaks.items() if flops)
            raise ValueError(
                f"cluster: device kind {self.kind!r} has no peak_flops_per_s for {dtype}; it "
                f"has {has}. Plan in one of these, or leave the device out."
            )
        return peaks[dtype]


@cache
def built_in_kinds() -> Mapping[str, DeviceKind]:
    """The built-in kinds, by the name that the driver reports."""
    path = Path(__file__).with_name("kinds.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return {row["kind"]: _of_row(row) for row in csv.DictReader(file)}


def _of_row(row: Mapping[str, str]) -> DeviceKind:
    stated = [(dtype, row[f"{dtype}_tflops"]) for dtype in PEAKS]
    power = row["board_power_w"]
    return DeviceKind(
        kind=row["kind"],
        memory_capacity_bytes=int(float(row["memory_mib"]) * MIB),
        memory_bandwidth_bytes_per_s=float(row["memory_gb_per_s"]) * GIGA,
        peak_flops_per_s=tuple((dtype, float(peak) * TERA) for dtype, peak in stated if peak),
        source=row["source"],
        board_power_w=float(power) if power else None,
    )


def name_by_driver(kind: str) -> str:
    """What the driver calls a card of a kind; it leaves out "(16 GB)", which tells variants."""
    return re.sub(r" \(\d+ GB\)$", "", kind)


def kind_of_memory(name: str, nbytes: int) -> str:
    """The kind that the driver calls so, with memory nearest to this; ``name`` if none is."""
    known = built_in_kinds().values()
    alike = [kind for kind in known if name_by_driver(kind.kind) == name]
    nearest = min(
        alike, key=lambda kind: abs(kind.memory_capacity_bytes - nbytes), default=None
    )
    return name if nearest is None else nearest.kind


def named_kind(name: str, known: Mapping[str, DeviceKind]) -> str:
    """The known kind that ``name`` means: a whole name, or what tells it from all others.

    Words that name only the maker or the series need not be there.  Raises ``ValueError`` with
    the nearest if there is none, and with all if there are several.
    """
    if name in known:
        return name
    check_supported(name)
    typed = _words(name)
    found = {
        each: _words(each) - typed - SERIES
        for each, kind in known.items()
        if all(word in _words(each) or _is_memory_of(word, kind) for word in typed)
    }
    plain = [each for each, others in found.items() if not others] or list(found)
    if not typed - SERIES or not plain:
        raise ValueError(unknown_kind(name, known))
    if len(plain) > 1:
        raise ValueError(
            f"kind {name!r} may be {' or '.join(map(repr, plain))}. Write more of the name."
        )
    return plain[0]


def check_supported(name: str) -> None:
    """Raise ``ValueError`` if no rank can run on devices that are called so, however fast."""
    for maker, why in UNSUPPORTED.items():
        if re.search(rf"\b({maker})\b", name, re.IGNORECASE):
            raise ValueError(
                f"kind {name!r} is not supported: {why}. Ranks run on NVIDIA's GPUs (CUDA), on "
                "AMD's (ROCm) and on CPUs: leave it out."
            )


def unknown_kind(name: str, known: Mapping[str, DeviceKind]) -> str:
    """The error for an unknown kind: the nearest ones, and how to describe it in four lines."""
    nearest = sorted(known, key=lambda each: -_likeness(name, known[each]))[:NUM_NEAREST]
    listed = ", ".join(f"{each!r} ({_gb(known[each]):.0f} GB)" for each in nearest)
    return (
        f"kind {name!r} is not known; the nearest are {listed}. If it is one of them, write "
        "that name; else add yours to the cluster's file, with the figures of its data sheet:\n"
        "kinds:\n"
        f"  - {{kind: {name}, source: ..., memory_capacity_bytes: ... GiB,\n"
        "     memory_bandwidth_bytes_per_s: ... GB/s, peak_flops_per_s:\n"
        "     {float32: ... TFLOP/s, float16: ... TFLOP/s, bfloat16: ... TFLOP/s}}"
    )


def _words(name: str) -> frozenset[str]:
    """The words of a name, in which 16 GB is one and RTX4090Ti is three."""
    text = re.sub(r"(\d+) ?gi?b\b", r"\1gb", name.lower())
    text = re.sub(r"(gtx|rtx|rx|titan|arc)(?=[a-z]?\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(?=(ti|xtx?|gre|super)\b)", " ", text)
    return frozenset(re.findall(r"[a-z0-9]+", text))


def _is_memory_of(word: str, kind: DeviceKind) -> bool:
    stated = re.fullmatch(r"(\d+)gb", word)
    return stated is not None and MEMORY_ALIKE < _gb(kind) / int(stated[1]) < 1 / MEMORY_ALIKE


def _gb(kind: DeviceKind) -> float:
    """Of its memory, in units of 2**30 bytes, as cards are sold."""
    return kind.memory_capacity_bytes / (MIB * 1024)


def _likeness(typed: str, kind: DeviceKind) -> float:
    """The letters of the words that both have, less some for those that only one has.

    Numbers of one generation share their first digits.  Where all else is alike, the memory
    decides.
    """
    words, names = _words(typed), _words(kind.kind)
    numbers = [
        next(i for i in range(len(one), -1, -1) if other.startswith(one[:i]))
        for one in words
        for other in names
        if re.search(r"\d", one) and len(one) == len(other) and not one.endswith("gb")
    ]
    has_memory = any(_is_memory_of(word, kind) for word in words)
    alike = SequenceMatcher(None, typed.lower(), kind.kind.lower()).ratio()
    likeness = len("".join(words & names)) + 2 * sum(numbers) + 2 * has_memory + alike
    others = words ^ names
    return likeness - 0.1 * len("".join(others))


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
