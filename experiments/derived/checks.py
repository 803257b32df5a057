"""Derived over published times, with models and kinds of device left out of the fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log

import numpy as np

from experiments.derived.blocks import Timed, kinds_by_name
from experiments.derived.fit import (
    Group,
    arithmetic_of_group,
    fitted,
    fitted_by_group,
    middle,
    power_law,
    sizes_of,
    watts_per_tflop_per_s,
)
from shardhet.pricing.efficiency import FITTED, Efficiency
from shardhet.pricing.roofline import Roofline

SHIPPED, NO_MODEL = "as shipped", "model left out"
NO_KIND, NO_POWER = "kind left out", "kind left out, power of the board not stated"
CHECKS = (SHIPPED, NO_MODEL, NO_KIND, NO_POWER)
CLEAR = 1.5  # kinds that differ by more must come in the right order


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Derived over published seconds of one block at one microbatch size."""

    check: str
    model: str
    gpu: str
    seq_len: int
    dtype: str
    microbatch_size: int
    forward: float
    backward: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """Two kinds on the same block: the derived relative speed over the published one."""

    ratio: float
    published: float  # seconds on one over seconds on the other
    derived: float

    @property
    def is_reversed(self) -> bool:
        """Whether the faster of two kinds that clearly differ is taken for the slower."""
        clear = max(self.published, 1 / self.published) > CLEAR
        return clear and (self.published > 1) != (self.derived > 1)


def ratios(blocks: Sequence[Timed]) -> Iterator[tuple[str, Timed, Efficiency]]:
    """Every check of every block: the efficiency that the block is judged with."""
    for block in blocks:
        kind, dtype = block.group
        yield SHIPPED, block, FITTED[kind][dtype]
    yield from _models_left_out(blocks)
    yield from _kinds_left_out(blocks)


def _models_left_out(blocks: Sequence[Timed]) -> Iterator[tuple[str, Timed, Efficiency]]:
    for model in dict.fromkeys(block.model for block in blocks):
        left_out = [block for block in blocks if block.model == model]
        for group in dict.fromkeys(block.group for block in left_out):
            rest = [each for each in blocks if each.group == group and each.model != model]
            if rest:
                efficiency = fitted(rest)
            else:  # timed with this model alone
                others = [each for each in blocks if each.group != group]
                efficiency = by_power(group, fitted_by_group(others))
            for block in left_out:
                if block.group == group:
                    yield NO_MODEL, block, efficiency


def _kinds_left_out(blocks: Sequence[Timed]) -> Iterator[tuple[str, Timed, Efficiency]]:
    efficiency_by_group = fitted_by_group(blocks)
    for kind in dict.fromkeys(kind for kind, _ in efficiency_by_group):
        rest = {group: each for group, each in efficiency_by_group.items() if group[0] != kind}
        for block in blocks:
            if block.group[0] == kind:
                yield NO_KIND, block, by_power(block.group, rest)
                yield NO_POWER, block, middle(_alike(block.group, rest))


def by_power(group: Group, known: dict[Group, Efficiency]) -> Efficiency:
    """The efficiency by the power of the board, from those of other kinds."""
    return power_law(_alike(group, known)).at(watts_per_tflop_per_s(group))


def _alike(group: Group, known: dict[Group, Efficiency]) -> dict[Group, Efficiency]:
    arithmetic = arithmetic_of_group(group)
    return {k: v for k, v in known.items() if arithmetic_of_group(k) is arithmetic}


def judged(blocks: Sequence[Timed]) -> list[Ratio]:
    """One ratio per check, block and size."""
    found = []
    for check, block, efficiency in ratios(blocks):
        roofline = Roofline.of(kinds_by_name()[block.group[0]], block.dtype)
        for size in sizes_of(block):
            published = block.seconds_by_size[size]
            derived = (
                roofline.forward_s(block.unit, size, efficiency),
                roofline.backward_s(block.unit, size, efficiency),
            )
            found.append(
                Ratio(
                    check=check,
                    model=block.model,
                    gpu=block.gpu,
                    seq_len=block.seq_len,
                    dtype=block.dtype,
                    microbatch_size=size,
                    forward=_short(derived[0] / published[0]),
                    backward=_short(derived[1] / published[1]),
                    total=_short(sum(derived) / sum(published)),
                )
            )
    return found


def relatives(blocks: Sequence[Timed], rows: Iterable[Ratio]) -> list[Relative]:
    """All pairs of kinds on one block; ``rows`` are those of one check."""
    published = {
        (block.model, block.gpu, block.seq_len, block.dtype, size): sum(seconds)
        for block in blocks
        for size, seconds in block.seconds_by_size.items()
    }
    alike: dict[tuple[str, int, str, int], list[tuple[float, float]]] = {}
    for row in rows:
        key = (row.model, row.gpu, row.seq_len, row.dtype, row.microbatch_size)
        where = (row.model, row.seq_len, row.dtype, row.microbatch_size)
        alike.setdefault(where, []).append((published[key], row.total * published[key]))
    return [
        Relative(
            ratio=(ours / our_other) / (theirs / their_other),
            published=theirs / their_other,
            derived=ours / our_other,
        )
        for every in alike.values()
        for (theirs, ours), (their_other, our_other) in combinations(every, 2)
    ]


def factor(values: Iterable[float], quantile: float) -> float:
    """The factor, at least 1, that this part of the values are within."""
    return exp(float(np.quantile([abs(log(value)) for value in values], quantile)))


def covered(values: Sequence[float], within: float) -> float:
    """The part of the values that are within a factor of 1."""
    return sum(max(value, 1 / value) <= within for value in values) / len(values)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
