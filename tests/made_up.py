"""Profiles made up for a test: times are functions of sizes, and are said to be measured."""

from collections.abc import Callable, Sequence
from typing import Any

from shardhet.records.profiles import (
    CollectivePoint,
    Collectives,
    ComputePoint,
    DeviceProfile,
    Source,
    Timing,
    UnitProfile,
)

TRANSFORMER_KINDS = ("embedding", "block", "head")


def device_profile(
    kind: str,
    seconds: Callable[[int], tuple[float, float]],
    *,
    sizes: Sequence[int],
    unit_kinds: Sequence[str] = TRANSFORMER_KINDS,
    **others: Any,
) -> DeviceProfile:
    """``seconds(m)`` are of forward and backward of ``m`` samples, of a unit of any kind."""
    points = []
    for m in sizes:
        forward_s, backward_s = seconds(m)
        points.append(
            ComputePoint(
                microbatch_size=m,
                forward=Timing.single(forward_s),
                backward=Timing.single(backward_s),
            )
        )
    units = tuple(UnitProfile(unit_kind=name, points=tuple(points)) for name in unit_kinds)
    return DeviceProfile(device_kind=kind, source=Source.MEASURED, units=units, **others)


def collectives(
    sizes: Sequence[int],
    *,
    gather_s_per_byte: float,
    reduce_s_per_byte: float,
    **others: Any,
) -> Collectives:
    """Collectives without latency, measured at ``sizes`` in bytes."""
    points = tuple(
        CollectivePoint(
            nbytes=nbytes,
            gather=Timing.single(gather_s_per_byte * nbytes),
            reduce=Timing.single(reduce_s_per_byte * nbytes),
        )
        for nbytes in sizes
    )
    return Collectives(source=Source.MEASURED, points=points, **others)
