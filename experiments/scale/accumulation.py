"""Microbatches: what a step takes beyond its compute, as their number grows.

Layered accumulation gathers and reduces each unit as often for sixteen microbatches as for
one, so this must stay where it is.  Ordinary accumulation under FSDP2 gathers each unit
twice per microbatch.  Compute is what plain PyTorch takes in the same processes for forward
and backward of as many microbatches.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Table
from experiments.common.systems import FSDP2, HET, PLAIN, Rounds, System
from experiments.decoders import Batch, decoder_config, make_decoder, random_batches, units_of
from experiments.scale import records
from experiments.scale.paced import PacedModel, Sleeper
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

NAME = "accumulation"
NUM_RANKS = 2
COUNTS = (1, 2, 4, 8, 16)
QUICK_COUNTS = (1, 4)
MOST_GROWTH = 1.10
REAL = "real compute"
# Compute that is slept, by the elements of a unit.
UNIT_NUMEL_BY_SLEPT = {
    "slept compute, units of 4 MiB": 2**20,
    "slept compute, units of 16 MiB": 2**22,
}
COMPUTES = (*UNIT_NUMEL_BY_SLEPT, REAL)
QUANTITY = "step_s"

CONFIG = decoder_config(width=256, num_layers=4, seq_len=64)
MICROBATCH_SIZE = 2

NUM_UNITS = 6
FORWARD_S = 2e-3  # of a unit and microbatch, slept


def measure(effort: Effort) -> list[Sample]:
    """All kinds of compute in one launch."""
    counts = QUICK_COUNTS if effort.is_quick else COUNTS
    rounds = effort.rounds(4, 3)
    return run_ranks(_measure_rank, NUM_RANKS, counts, rounds)[0]


def _measure_rank(rank: int, counts: Sequence[int], rounds: Rounds) -> list[Sample]:
    return [
        sample
        for compute in COMPUTES
        for count in counts
        for sample in _measure_case(compute, count, rounds)
    ]


def _measure_case(compute: str, count: int, rounds: Rounds) -> list[Sample]:
    contestants, batch = _real(count) if compute == REAL else _slept(compute, count)
    seconds = records.step_seconds(contestants, batch, rounds)
    return records.samples_of(NAME, case_name(compute, count), QUANTITY, seconds)


def case_name(compute: str, count: int) -> str:
    """In the file."""
    return f"{compute}, {count} microbatches"


def _real(count: int) -> tuple[list[System], Batch]:
    [batch] = random_batches(CONFIG, count * MICROBATCH_SIZE, seed=dist.get_rank())
    plan = Plan.even(NUM_RANKS, microbatch_size=MICROBATCH_SIZE, num_microbatches=count)
    models = [make_decoder(CONFIG) for _ in range(3)]
    return records.trio(models, units_of, plan, MICROBATCH_SIZE), batch


def _slept(compute: str, count: int) -> tuple[list[System], tuple[torch.Tensor]]:
    plan = Plan.even(NUM_RANKS, microbatch_size=1, num_microbatches=count)
    models = [PacedModel(NUM_UNITS, UNIT_NUMEL_BY_SLEPT[compute], Sleeper()) for _ in range(3)]
    for model in models:
        model.set_pace(FORWARD_S)
    return records.trio(models, PacedModel.units, plan, 1), (torch.randn(count, 1),)


def beyond_compute_s(samples: Sequence[Sample], compute: str, count: int, system: str) -> float:
    """Median step time less that of plain PyTorch."""
    case = case_name(compute, count)
    alone_s = median(samples, case, PLAIN, QUANTITY)
    return median(samples, case, system, QUANTITY) - alone_s


def counts_in(samples: Sequence[Sample]) -> list[int]:
    """Numbers of microbatches that were measured."""
    found = {sample.case for sample in samples}
    return [count for count in COUNTS if case_name(REAL, count) in found]


def growth(first: float, last: float) -> float:
    """How many times the first the last is; without a first there is nothing to grow."""
    return last / first if first > 0 else float("inf") if last > 0 else 0.0


def report(samples: Sequence[Sample]) -> Report:
    """A table and a bar for each kind of compute."""
    counts = counts_in(samples)
    tables, bars = [], []
    for compute in COMPUTES:
        tables.append(
            Table(
                title=f"Accumulation, {compute}: ms beyond compute, {NUM_RANKS} ranks",
                header=["microbatches", "compute", f"{HET} step", HET, f"{FSDP2} step", FSDP2],
                rows=[_row(samples, compute, count) for count in counts],
            )
        )
        ends_s = [beyond_compute_s(samples, compute, n, HET) for n in (counts[0], counts[-1])]
        bars.append(
            Bar(
                claim=f"accumulation, {compute}: {HET} beyond compute, "
                f"{counts[-1]} microbatches / {counts[0]}",
                measured=growth(*ends_s),
                at_most=MOST_GROWTH,
            )
        )
    return Report(tables=tables, bars=bars)


def _row(samples: Sequence[Sample], compute: str, count: int) -> list[str]:
    case = case_name(compute, count)
    row = [str(count), ms_spread(spread(samples, case, PLAIN, QUANTITY))]
    for system in (HET, FSDP2):
        row.append(ms_spread(spread(samples, case, system, QUANTITY)))
        row.append(ms(beyond_compute_s(samples, compute, count, system)))
    return row


PART = Part(name=NAME, measure=measure, report=report)
