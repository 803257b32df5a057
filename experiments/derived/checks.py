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
from shardhet.pricing.efficiency import Efficiency, efficiency_of
from shardhet.pricing.roofline import Roofline

SHIPPED, OWN, NO_MODEL = "as shipped", "a block of shardhet's own", "model left out"
NO_KIND, NO_POWER = "kind left out", "kind left out, power of its board not stated"
CHECKS = (SHIPPED, OWN, NO_MODEL, NO_KIND, NO_POWER)
CLEAR = 1.5  # kinds that differ by more must come in the right order


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Derived over published seconds of one block at one microbatch size."""

    check: str
    block: Timed
    size: int
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


def judged(blocks: Sequence[Timed], checks: Sequence[str] = CHECKS) -> list[Ratio]:
    """One ratio per check, block and size."""
    return [
        _ratio(check, block, size, efficiency)
        for check, block, efficiency in _judgements(blocks, checks)
        for size in sizes_of(block)
    ]


def _ratio(check: str, block: Timed, size: int, efficiency: Efficiency) -> Ratio:
    roofline = Roofline.of(kinds_by_name()[block.group[0]], block.dtype)
    unit = block.own_workload.kind_by_name["block"] if check == OWN else block.unit
    forward_s, backward_s = block.seconds_by_size[size]
    derived_forward_s = roofline.forward_s(unit, size, efficiency)
    derived_backward_s = roofline.backward_s(unit, size, efficiency)
    return Ratio(
        check=check,
        block=block,
        size=size,
        forward=derived_forward_s / forward_s,
        backward=derived_backward_s / backward_s,
        total=(derived_forward_s + derived_backward_s) / (forward_s + backward_s),
    )


def _judgements(
    blocks: Sequence[Timed], checks: Sequence[str]
) -> Iterator[tuple[str, Timed, Efficiency]]:
    """Every check of every block: the efficiency that the block is judged with."""
    for check in (SHIPPED, OWN):
        for block in blocks:
            kind, dtype = block.group
            yield check, block, efficiency_of(kinds_by_name()[kind], dtype)
    if NO_MODEL in checks:
        yield from _models_left_out(blocks)
    if NO_KIND in checks:
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


def relatives(rows: Iterable[Ratio]) -> list[Relative]:
    """All pairs of kinds on one block; ``rows`` are those of one check."""
    alike: dict[tuple[str, int, str, int], list[tuple[float, float]]] = {}
    for row in rows:
        block, published_s = row.block, sum(row.block.seconds_by_size[row.size])
        where = (block.model, block.seq_len, block.dtype, row.size)
        alike.setdefault(where, []).append((published_s, row.total * published_s))
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
