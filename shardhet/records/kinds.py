"""Kinds of devices: specifications, and the table of built-in kinds.

``kinds.csv`` has a source beside the figures of each kind.  Peaks are dense matrix products
that sum in float32, except under ``fp16_accumulation``: float16 with sums in float16.  A field
without a source is empty.  Memory is what a program can allocate of what the card carries.
"""

import csv
import re
from collections.abc import Iterable, Mapping
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


def unknown_kind(name: str, known: Iterable[str]) -> str:
    """The error for an unknown kind: the nearest ones, and how to describe it in four lines."""
    nearest = sorted(known, key=lambda each: -_likeness(name, each))[:NUM_NEAREST]
    listed = ", ".join(map(repr, nearest))
    return (
        f"kind {name!r} is not known; the nearest are {listed}. Take one of them, or add yours "
        "to the file, with its own figures (these are of an RTX 3060):\n"
        "kinds:\n"
        f'  - {{kind: {name}, source: "where from", memory_capacity_bytes: 12884901888,\n'
        "     memory_bandwidth_bytes_per_s: 360.0e+9,\n"
        "     peak_flops_per_s: {float32: 12.7e+12, float16: 25.4e+12, bfloat16: 25.4e+12}}"
    )


def _likeness(typed: str, name: str) -> float:
    """The letters of the words that both have, less some for those that only one has.

    Gigabytes are no words; they decide where all else is alike.
    """
    models = [re.sub(r"\d+ ?gb", "", each.lower()) for each in (typed, name)]
    words = [set(re.findall(r"[a-z]+|\d+", each)) for each in models]
    shared, others = words[0] & words[1], words[0] ^ words[1]
    alike = SequenceMatcher(None, typed.lower(), name.lower()).ratio()
    return len("".join(shared)) - 0.1 * len("".join(others)) + alike
