"""Efficiencies from times: three numbers per kind of device and precision."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.derived.blocks import Timed, kinds_by_name
from shardhet.pricing.efficiency import (
    MOST,
    TERA,
    Arithmetic,
    Efficiency,
    PowerLaw,
    arithmetic_of,
)
from shardhet.pricing.roofline import Roofline

Group = tuple[str, str]  # kind of device and dtype
Floats = NDArray[np.float64]
USUAL, USUAL_SLOWDOWN = 0.6, 0.1  # what a number is drawn to where the data say little
PULL, SLOWDOWN_PULL = 0.1, 0.05
PHASE_WEIGHT = 0.5  # of forward and of backward, beside their sum
OUTLIER = 0.1  # residuals of logarithms beyond it count less


@dataclass(frozen=True, slots=True)
class _Point:
    block: Timed
    size: int
    forward_s: float
    backward_s: float
    weight: float


def sizes_of(block: Timed) -> list[int]:
    """The sizes that are fitted and judged: powers of two, and the largest."""
    timed = block.seconds_by_size
    return sorted({size for size in timed if size & (size - 1) == 0} | {max(timed)})


def fitted(blocks: Sequence[Timed]) -> Efficiency:
    """The efficiency of one kind in one precision, from all blocks that were timed on it."""
    points = []
    for block in blocks:
        sizes = sizes_of(block)
        for size in sizes:
            forward_s, backward_s = block.seconds_by_size[size]
            points.append(_Point(block, size, forward_s, backward_s, len(sizes) ** -0.5))
    ((kind, dtype),) = {block.group for block in blocks}
    roofline = Roofline.of(kinds_by_name()[kind], dtype)

    def residuals(logs: Floats) -> Floats:
        efficiency = _efficiency(logs)
        found = [
            PULL * np.log(efficiency.forward / USUAL),
            PULL * np.log(efficiency.backward / USUAL),
            SLOWDOWN_PULL * np.log(efficiency.slowdown_per_s / USUAL_SLOWDOWN),
        ]
        for point in points:
            unit = point.block.unit
            forward_s = roofline.forward_s(unit, point.size, efficiency)
            backward_s = roofline.backward_s(unit, point.size, efficiency)
            both = (forward_s + backward_s) / (point.forward_s + point.backward_s)
            found += [
                point.weight * np.log(both),
                point.weight * PHASE_WEIGHT * np.log(forward_s / point.forward_s),
                point.weight * PHASE_WEIGHT * np.log(backward_s / point.backward_s),
            ]
        return np.array(found)

    begin = np.log([USUAL, USUAL, USUAL_SLOWDOWN])
    return _efficiency(least_squares(residuals, begin, loss="soft_l1", f_scale=OUTLIER).x)


def _efficiency(logs: Floats) -> Efficiency:
    forward, backward, slowdown_per_s = (float(each) for each in np.exp(logs))
    return Efficiency(forward=forward, backward=backward, slowdown_per_s=slowdown_per_s)


def fitted_by_group(blocks: Sequence[Timed]) -> dict[Group, Efficiency]:
    """One efficiency per kind of device and precision."""
    groups = dict.fromkeys(block.group for block in blocks)
    return {
        group: fitted([block for block in blocks if block.group == group]) for group in groups
    }


def watts_per_tflop_per_s(group: Group) -> float:
    """The power of the board over its peak."""
    kind = kinds_by_name()[group[0]]
    assert kind.board_power_w is not None
    return kind.board_power_w / (kind.peak(group[1]) / TERA)


def arithmetic_of_group(group: Group) -> Arithmetic:
    """Which units of the device compute."""
    return arithmetic_of(kinds_by_name()[group[0]], group[1])


def power_law(efficiency_by_group: dict[Group, Efficiency]) -> PowerLaw:
    """The line through the logarithms of efficiency and power; groups of one arithmetic."""
    watts = np.log([watts_per_tflop_per_s(group) for group in efficiency_by_group])
    laws = []
    for parts in (
        [each.forward for each in efficiency_by_group.values()],
        [each.backward for each in efficiency_by_group.values()],
    ):
        exponent, log_scale = np.polyfit(watts, np.log(np.minimum(parts, MOST)), 1)
        laws.append((float(np.exp(log_scale)), float(exponent)))
    return PowerLaw(forward=laws[0], backward=laws[1])


def middle(efficiency_by_group: dict[Group, Efficiency]) -> Efficiency:
    """The median efficiency; groups of one arithmetic."""
    every = efficiency_by_group.values()
    return Efficiency(
        forward=float(np.median([each.forward for each in every])),
        backward=float(np.median([each.backward for each in every])),
    )
