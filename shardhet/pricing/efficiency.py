"""What part of its peak a device reaches in matrix products, by kind and precision.

Fitted for kinds that others have published times of: the blocks of Cephalo (Guo et al., ICS
2025), float32 without TF32 and float16 with sums in float32.  ``experiments/derived`` fits
these numbers and checks them by leaving models and kinds out.

Elsewhere the part follows from the power of the board, if it is stated: a kind with x watts
per TFLOP/s of its peak reaches

    min(MOST, a x^b)

in large products, with a and b fitted over the kinds above, once for products in 16 bits on
cards with units for them and once for all others.  Boards of 70 W do not hold the clock that
their peak is stated at; boards of 300 W mostly do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shardhet.records.kinds import DeviceKind

HALVES = ("float16", "bfloat16")
MOST = 0.97
LEAST_TENSOR_RATIO = 1.5  # of the peak in 16 bits over that in float32, with units for them
TERA = 1e12

# Nine of ten blocks were predicted within these factors; experiments/derived, results.csv.
SPREAD_FITTED = 1.2  # leaving the model out
SPREAD_BY_POWER = 1.4  # leaving the kind out
SPREAD_UNKNOWN = 1.5  # leaving the kind out, with the power of its board not stated


class Arithmetic(Enum):
    """Which units of a device compute the products."""

    PLAIN = "plain"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How near a device comes to its peak, and how far this was found to be off."""

    forward: float  # the part of the peak in large products
    backward: float
    slowdown_per_s: float = 0.0  # a visit of t seconds takes (1 + slowdown_per_s t) t
    spread: float = SPREAD_FITTED  # a factor that covers nine of ten blocks


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """``scale`` x^``exponent`` in forward and in backward."""

    forward: tuple[float, float]  # scale and exponent
    backward: tuple[float, float]

    def at(self, watts_per_tflop_per_s: float) -> Efficiency:
        """The efficiency of a kind that is not in the table."""
        parts = [
            min(MOST, scale * watts_per_tflop_per_s**exponent)
            for scale, exponent in (self.forward, self.backward)
        ]
        return Efficiency(forward=parts[0], backward=parts[1], spread=SPREAD_BY_POWER)


def _row(forward: float, backward: float, slowdown_per_s: float) -> Efficiency:
    return Efficiency(forward=forward, backward=backward, slowdown_per_s=slowdown_per_s)


FITTED: Mapping[str, Mapping[str, Efficiency]] = {
    "NVIDIA A100-SXM4-40GB": {
        "float32": _row(0.927, 0.948, 0.027),
        "float16": _row(0.782, 0.810, 0.057),
    },
    "NVIDIA A100-SXM4-80GB": {
        "float16": _row(0.814, 0.807, 0.044),
    },
    "NVIDIA A10G": {
        "float32": _row(0.527, 0.629, 0.040),
        "float16": _row(0.947, 0.947, 0.033),
    },
    "NVIDIA H100 NVL": {
        "float32": _row(0.670, 0.722, 0.090),
        "float16": _row(0.497, 0.467, 0.151),
    },
    "NVIDIA L4": {
        "float32": _row(0.400, 0.554, 1.820),
        "float16": _row(0.695, 0.681, 1.156),
    },
    "NVIDIA L40S": {
        "float32": _row(0.393, 0.506, 0.322),
    },
    "NVIDIA RTX A6000": {
        "float32": _row(0.516, 0.608, 0.245),
        "float16": _row(0.845, 0.856, 0.772),
    },
    "Tesla P100-PCIE-12GB": {
        "float32": _row(0.637, 0.800, 0.030),
        "float16": _row(0.812, 0.877, 0.065),
    },
    "Tesla P40": {
        "float32": _row(0.517, 0.708, 0.020),
        "float16": _row(0.606, 0.774, 0.088),
    },
    "Tesla T4": {
        "float32": _row(0.598, 0.630, 0.177),
        "float16": _row(0.508, 0.473, 0.557),
    },
    "Tesla V100-PCIE-16GB": {
        "float32": _row(0.936, 0.961, 0.088),
        "float16": _row(0.733, 0.762, 0.092),
    },
    "Tesla V100-SXM2-16GB": {
        "float32": _row(0.910, 0.944, 0.075),
        "float16": _row(0.744, 0.744, 0.136),
    },
}
POWER_LAWS: Mapping[Arithmetic, PowerLaw] = {
    Arithmetic.PLAIN: PowerLaw(forward=(0.316, 0.276), backward=(0.416, 0.227)),
    Arithmetic.TENSOR: PowerLaw(forward=(0.660, 0.232), backward=(0.647, 0.263)),
}
UNKNOWN: Mapping[Arithmetic, Efficiency] = {
    Arithmetic.PLAIN: Efficiency(forward=0.606, backward=0.722, spread=SPREAD_UNKNOWN),
    Arithmetic.TENSOR: Efficiency(forward=0.744, backward=0.762, spread=SPREAD_UNKNOWN),
}


SAME_CHIP = {  # with more memory, or slower links
    "NVIDIA A800-SXM4-80GB": "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100-SXM4-40GB",
    "Tesla V100-SXM2-32GB": "Tesla V100-SXM2-16GB",
}


def arithmetic_of(kind: DeviceKind, dtype: str) -> Arithmetic:
    """Which units compute products of this dtype."""
    peaks = dict(kind.peak_flops_per_s)
    ratio = kind.peak(dtype) / (peaks.get("float32") or kind.peak(dtype))
    has_units = dtype in HALVES and ratio >= LEAST_TENSOR_RATIO
    return Arithmetic.TENSOR if has_units else Arithmetic.PLAIN


def efficiency_of(kind: DeviceKind, dtype: str) -> Efficiency:
    """The fitted efficiency, or that by the power of the board, or the median of all."""
    name = kind.kind
    while name:
        row = FITTED.get(name, {}).get("float16" if dtype in HALVES else dtype)
        if row is not None:
            return row
        name = SAME_CHIP.get(name, "")
    arithmetic = arithmetic_of(kind, dtype)
    if kind.board_power_w is None:
        return UNKNOWN[arithmetic]
    return POWER_LAWS[arithmetic].at(kind.board_power_w / (kind.peak(dtype) / TERA))
