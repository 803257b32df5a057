"""Measured seconds and bytes per kind of device and unit, with interpolation between them.

A profile is *measured* (by the profiler), *imported* from a table that somebody else
measured, or *derived* from a specification.  Every part of a profile says which: a derived
figure is a sourced estimate, not a measurement.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from math import inf, isfinite
from typing import Annotated, ClassVar, Self

from shardhet.records.codec import (
    OMITTABLE,
    Count,
    Document,
    Fraction,
    NonNegative,
    PositiveInt,
    Seconds,
    repeated,
)

# How a layer's time is extrapolated beyond the measured sizes.  Chosen on the 424 curves of
# Cephalo's published profiles (sizes 1-5 predict the largest).  With one kind of GPU held out:
# median error 2.9 %, p90 14.5 % (plain least squares: 3.8 and 15.8).
PROPORTIONAL_PART = 0.1  # weight of the proportional slope; the fit's slope has the rest
SLOPE_GROWTH = 1.02  # devices under sustained load slow down a little


class Source(Enum):
    """Where the figures of a profile come from."""

    MEASURED = "measured"
    IMPORTED = "imported"  # measured by others, read from a table
    DERIVED = "derived"  # computed from a specification


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One duration; ``num_samples`` is 0 if it was not measured here.

    Steps are predicted from ``mean_s``: they are sums of hundreds of such durations, and the
    mean of a sum is the sum of the means.  The sum of the medians is too small, because
    disturbances only make a computation longer.
    """

    mean_s: Seconds
    median_s: Seconds
    p10_s: Seconds
    p90_s: Seconds
    num_samples: Count

    def __post_init__(self) -> None:
        ordered = 0 <= self.p10_s <= self.median_s <= self.p90_s
        is_finite = isfinite(self.p90_s) and isfinite(self.mean_s)
        if not ordered or not is_finite or self.mean_s < 0 or self.num_samples < 0:
            raise ValueError(
                f"profile: p10 {self.p10_s}, median {self.median_s}, p90 {self.p90_s} and mean "
                f"{self.mean_s} of {self.num_samples} samples, but they must be finite, at "
                "least 0 and the first three in this order. Measure again."
            )

    @classmethod
    def single(cls, seconds: float) -> Self:
        """A figure without samples, read from a table or computed."""
        return cls(
            mean_s=seconds, median_s=seconds, p10_s=seconds, p90_s=seconds, num_samples=0
        )


@dataclass(frozen=True)
class Curve:
    """Values at measured positions: linear between them, affine beyond the last."""

    positions: tuple[float, ...]  # ascending, positive
    values: tuple[float, ...]

    def at(self, position: float) -> float:
        """The value at ``position``; never negative."""
        i = bisect_left(self.positions, position)
        if i == len(self.positions):
            last = self.values[-1]
            return max(0.0, last + self.slope_beyond * (position - self.positions[-1]))
        x, y = self.positions[i], self.values[i]
        if x == position:
            return y
        # Below the first position the line ends at the fit's intercept: a latency remains.
        x0, y0 = (
            (self.positions[i - 1], self.values[i - 1]) if i else (0.0, self.intercept_at_zero)
        )
        return y0 + (y - y0) * (position - x0) / (x - x0)

    @cached_property
    def slope_beyond(self) -> float:
        """Growth per unit of position beyond the last one.

        It is the slope of a fit weighted by position, mixed with a little of the proportional
        slope.
        """
        proportional = self.values[-1] / self.positions[-1]
        fitted = self._fit[1] if len(self.positions) > 1 else proportional
        mixed = (1 - PROPORTIONAL_PART) * fitted + PROPORTIONAL_PART * proportional
        return max(0.0, SLOPE_GROWTH * mixed)

    @cached_property
    def intercept_at_zero(self) -> float:
        """The value at position 0, clamped between zero and the first value."""
        return min(max(0.0, self._fit[0]), self.values[0]) if len(self.positions) > 1 else 0.0

    @cached_property
    def _fit(self) -> tuple[float, float]:
        """Intercept and slope minimising sum_i x_i (y_i - a - b x_i)^2.

        No y_i is above a later one: what takes longer than more of it does was disturbed, and
        a line through it would promise that ever more costs nothing.
        """
        weights = self.positions
        total = sum(weights)
        undisturbed = [*accumulate(reversed(self.values), min)][::-1]
        pairs = list(zip(weights, self.positions, undisturbed, strict=True))
        mean_x = sum(w * x for w, x, _ in pairs) / total
        mean_y = sum(w * y for w, _, y in pairs) / total
        spread = sum(w * (x - mean_x) ** 2 for w, x, _ in pairs)
        slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in pairs) / spread
        return mean_y - slope * mean_x, slope


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePoint:
    """One unit run forward and backward on one microbatch, without recomputation."""

    microbatch_size: PositiveInt
    forward: Timing
    backward: Timing
    peak_bytes: Count | None = None  # peak use above what was allocated before; None: unknown


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """Measurements of one kind of unit on one kind of device, at all microbatch sizes."""

    unit_kind: str
    points: tuple[ComputePoint, ...]

    def __post_init__(self) -> None:
        sizes = [point.microbatch_size for point in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(
                f"profile: unit kind {self.unit_kind!r} has microbatch sizes {sizes} but they "
                "must be ascending, different and at least 1. Sort them."
            )

    @cached_property
    def forward_s(self) -> Curve:
        """Seconds of a forward pass as a function of the microbatch size."""
        return self._curve([point.forward.mean_s for point in self.points])

    @cached_property
    def backward_s(self) -> Curve:
        """Seconds of a backward pass as a function of the microbatch size."""
        return self._curve([point.backward.mean_s for point in self.points])

    @cached_property
    def peak_bytes(self) -> Curve | None:
        """Peak bytes as a function of the microbatch size; None if not measured."""
        peaks = [point.peak_bytes for point in self.points]
        known = [float(peak) for peak in peaks if peak is not None]
        return self._curve(known) if len(known) == len(peaks) else None

    def _curve(self, values: Sequence[float]) -> Curve:
        sizes = tuple(float(point.microbatch_size) for point in self.points)
        return Curve(sizes, tuple(values))


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """How one kind of device performs on every kind of unit."""

    device_kind: str
    source: Source
    units: tuple[UnitProfile, ...]
    optimizer_seconds_per_element: NonNegative = 0.0
    # Seconds that compute loses per second of concurrent collectives.  It exceeds 1 where the
    # host's processor both computes and moves the data, because it does them in turn.
    overlap_slowdown: NonNegative = 0.0
    reserved_bytes: Count = 0  # a process's memory besides tensors: driver context, libraries
    note: str = ""  # versions and date, or the address of the table or the specification

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_slowdown < inf:
            raise ValueError(
                f"profile: overlap_slowdown of device kind {self.device_kind!r} is "
                f"{self.overlap_slowdown} but must be finite and at least 0."
            )

    @cached_property
    def unit_by_kind(self) -> dict[str, UnitProfile]:
        """The unit profiles by kind of unit."""
        return {unit.unit_kind: unit for unit in self.units}

    def with_times(self, change: Callable[[float], float]) -> Self:
        """The device with units that take ``change(seconds)``, without their samples."""

        def point(each: ComputePoint) -> ComputePoint:
            forward, backward = (
                Timing.single(change(old.mean_s)) for old in (each.forward, each.backward)
            )
            return replace(each, forward=forward, backward=backward)

        units = (replace(unit, points=tuple(map(point, unit.points))) for unit in self.units)
        return replace(self, units=tuple(units))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint:
    """Times of the gather and the reduction of one unit's flat tensor with even shards."""

    nbytes: PositiveInt  # of the whole tensor
    gather: Timing
    reduce: Timing


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """How long the links take for a unit's flat tensor.

    A pipelined ring moves the whole tensor past every device, however it is cut.  With direct
    messages, the owner of the largest shard sends it to every receiver.  The unevenness weight
    says where between the two (0 and 1) the measured collectives lie.
    """

    source: Source
    points: tuple[CollectivePoint, ...]
    gather_unevenness_weight: Fraction = 0.0
    reduce_unevenness_weight: Fraction = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        sizes = [point.nbytes for point in self.points]
        if sizes != sorted(set(sizes)) or any(nbytes < 1 for nbytes in sizes):
            raise ValueError(
                f"profile: collectives have nbytes {sizes} but they must be ascending, "
                "different and at least 1. Sort them."
            )

    @cached_property
    def gather_s(self) -> Curve | None:
        """Seconds of an even gather by bytes; None if communication is not counted."""
        return self._curve([point.gather.mean_s for point in self.points])

    @cached_property
    def reduce_s(self) -> Curve | None:
        """Seconds of an even reduction by bytes; None if communication is not counted."""
        return self._curve([point.reduce.mean_s for point in self.points])

    def _curve(self, values: Sequence[float]) -> Curve | None:
        """More bytes never take less: what took longer than a larger one was disturbed."""
        sizes = tuple(float(point.nbytes) for point in self.points)
        undisturbed = tuple(accumulate(reversed(values), min))[::-1]
        return Curve(sizes, undisturbed) if sizes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLink:
    """What was measured between two devices, one message at a time."""

    sender: Count  # positions in the cluster
    receiver: Count
    latency_s: NonNegative
    bandwidth_bytes_per_s: NonNegative


@dataclass(frozen=True, kw_only=True)
class Profile(Document):
    """Everything the planner knows about speeds and sizes."""

    document_name: ClassVar[str] = "profile"
    document_version: ClassVar[int] = 5

    devices: tuple[DeviceProfile, ...]
    collectives: Collectives
    # The same where rows cross between nodes once per node; None: there is one node, or they
    # were not measured.
    two_levels: Annotated[Collectives | None, OMITTABLE] = None
    unit_overhead_s: Seconds = (
        0.0  # host time per unit and phase, outside microbatches and waits
    )
    # They tell how long collectives take without some of the devices.
    pairs: Annotated[tuple[PairLink, ...], OMITTABLE] = ()
    # Of links' bandwidth, where collectives are derived; None: as derived, or measured.
    link_fraction: Fraction | None = None
    note: str = ""

    def __post_init__(self) -> None:
        kinds = [device.device_kind for device in self.devices]
        twice = repeated(kinds)
        if twice or not kinds:
            raise ValueError(
                f"profile: {len(kinds)} device kinds, {twice} more than once. Give at least "
                "one, and each once."
            )
        if not 0 <= self.unit_overhead_s < inf:
            raise ValueError(
                f"profile: unit_overhead_s is {self.unit_overhead_s} but must be finite and at "
                "least 0."
            )

    def device(self, device_kind: str | None) -> DeviceProfile:
        """The profile of one kind of device; raises ``ValueError`` listing the known kinds."""
        device = self._device_by_kind.get(device_kind)
        if device is not None:
            return device
        known = ", ".join(device.device_kind for device in self.devices)
        raise ValueError(
            f"profile: device kind {device_kind!r} was not profiled; there are {known}. "
            "Measure it, or derive it from its specification."
        )

    @cached_property
    def _device_by_kind(self) -> dict[str | None, DeviceProfile]:
        return {device.device_kind: device for device in self.devices}

    def unit(self, device_kind: str | None, unit_kind: str) -> UnitProfile:
        """One kind of unit on one kind of device; raises ``ValueError`` if it is missing."""
        device = self.device(device_kind)
        if unit_kind not in device.unit_by_kind:
            known = ", ".join(device.unit_by_kind)
            raise ValueError(
                f"profile: device kind {device_kind!r} has no times of unit kind "
                f"{unit_kind!r}; there are {known}. Measure it for this model."
            )
        return device.unit_by_kind[unit_kind]
