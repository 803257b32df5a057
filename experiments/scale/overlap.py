"""Overlap: how near a step comes to the larger of its compute and its collectives.

Collectives alone are the same step with no compute: gathers, reductions, agreements and the
runtime itself.  Compute alone is plain PyTorch in the same processes at the same time.  What
a unit computes is set to a multiple of what collectives alone take; at one, overlap has most
to hide.  Asleep, compute leaves the cores to the collectives, as an accelerator does; busy,
it shares the machine's cores with the other ranks and all their collectives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Spread, Table
from experiments.common.systems import FSDP2, HET, PLAIN, Rounds
from experiments.scale import records
from experiments.scale.paced import PacedModel, Sleeper, Worker, step_seconds
from experiments.scale.records import (
    Effort,
    Part,
    Report,
    Sample,
    median,
    ms,
    ms_spread,
    spread,
)
from shardhet import Plan

NAME = "overlap"
WORLD_SIZES = (2, 4)  # of two cores: one for each rank, or half of one
NUM_UNITS = 16
QUICK_NUM_UNITS = 6
UNIT_NUMEL = 2**20
RATIOS = (0.5, 1.0, 2.0)  # compute over collectives alone, before it is measured
QUICK_RATIOS = (1.0,)
MOST_OF_LARGER = 1.1
SLEPT, BUSY = "slept", "busy"
QUANTITY = "step_s"


class Compute(NamedTuple):
    """How compute is spent, on how many ranks."""

    world_size: int
    kind: str  # SLEPT or BUSY


def measure(effort: Effort) -> list[Sample]:
    """One launch for each number of ranks."""
    ratios = QUICK_RATIOS if effort.is_quick else RATIOS
    rounds = effort.rounds(3, 2)
    num_units = QUICK_NUM_UNITS if effort.is_quick else NUM_UNITS
    return [
        sample
        for world_size in WORLD_SIZES
        for sample in run_ranks(
            _measure_rank, world_size, world_size, num_units, ratios, rounds
        )[0]
    ]


def _measure_rank(
    rank: int, world_size: int, num_units: int, ratios: Sequence[float], rounds: Rounds
) -> list[Sample]:
    batch = (torch.zeros(1, 1),)
    samples = []
    for kind, spend in ((SLEPT, Sleeper()), (BUSY, Worker())):
        compute = Compute(world_size, kind)
        models = [PacedModel(num_units, UNIT_NUMEL, spend) for _ in range(3)]
        trio = records.trio(models, PacedModel.units, Plan.even(world_size, microbatch_size=1))
        sharded = [each for each in trio if each.name != PLAIN]
        alone = records.step_seconds(sharded, batch, rounds)
        samples += records.samples_of(NAME, case_name(compute, 0), QUANTITY, alone)
        collectives_s = Spread.of(alone[HET]).median  # the same on every rank
        for ratio in ratios:
            for model in models:
                model.set_pace(ratio * collectives_s / step_seconds(num_units, 1, 1.0))
            seconds = records.step_seconds(trio, batch, rounds)
            samples += records.samples_of(NAME, case_name(compute, ratio), QUANTITY, seconds)
    return samples


def case_name(compute: Compute, ratio: float) -> str:
    """In the file; ratio 0 is collectives alone."""
    return f"{compute.world_size} ranks, {compute.kind}, compute / collectives {ratio:g}"


def over_larger(
    samples: Sequence[Sample], compute: Compute, ratio: float, system: str
) -> float:
    """Step time over the larger of compute alone and the system's collectives alone."""
    case = case_name(compute, ratio)
    compute_s = median(samples, case, PLAIN, QUANTITY)
    collectives_s = median(samples, case_name(compute, 0), system, QUANTITY)
    return median(samples, case, system, QUANTITY) / max(compute_s, collectives_s)


def ratios_in(samples: Sequence[Sample]) -> list[float]:
    """Those that were measured."""
    found = {sample.case for sample in samples}
    first = Compute(WORLD_SIZES[0], SLEPT)
    return [ratio for ratio in RATIOS if case_name(first, ratio) in found]


def report(samples: Sequence[Sample]) -> Report:
    """A table for each kind of compute and number of ranks, a bar where it is slept."""
    ratios = ratios_in(samples)
    tables, bars = [], []
    for world_size in WORLD_SIZES:
        tables += [
            Table(
                title=f"Overlap, compute {kind}: {world_size} ranks, ms (p10-p90)",
                header=["compute", "system", "collectives alone", "step", "step / larger"],
                rows=[
                    _row(samples, Compute(world_size, kind), ratio, system)
                    for ratio in ratios
                    for system in (HET, FSDP2)
                ],
            )
            for kind in (SLEPT, BUSY)
        ]
        slept = Compute(world_size, SLEPT)
        bars.append(
            Bar(
                claim=f"overlap, slept, {world_size} ranks: {HET} step / larger of compute and "
                "collectives, the worst",
                measured=max(over_larger(samples, slept, ratio, HET) for ratio in ratios),
                at_most=MOST_OF_LARGER,
            )
        )
    return Report(tables=tables, bars=bars)


def _row(samples: Sequence[Sample], compute: Compute, ratio: float, system: str) -> list[str]:
    case = case_name(compute, ratio)
    return [
        ms(median(samples, case, PLAIN, QUANTITY)),
        system,
        ms(median(samples, case_name(compute, 0), system, QUANTITY)),
        ms_spread(spread(samples, case, system, QUANTITY)),
        f"{over_larger(samples, compute, ratio, system):.3f}",
    ]


PART = Part(name=NAME, measure=measure, report=report)
