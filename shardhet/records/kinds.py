"""Kinds of devices: specifications, and the table of built-in kinds.

``kinds.csv`` has a source beside the figures of each kind.  Peaks are dense matrix products
that sum in float32, except under ``fp16_accumulation``: float16 with sums in float16.  A field
without a source is empty.  Memory is what a program can allocate of what the card carries.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Annotated

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
