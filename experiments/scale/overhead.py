"""The runtime's own time: what HetFSDP costs the processor where there is nothing to do.

One rank, so no collectives; units of 8 x 8 elements, so next to no compute.  What the
processor spends on a step beyond plain PyTorch with as many microbatches is fitted as

    seconds = per step + per unit * units + per pair * units * microbatches
"""

import time
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from experiments.common import systems
from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Table
from experiments.common.systems import HET, PLAIN, System
from experiments.scale.records import Effort, Part, Report, Sample, median, samples_of
from shardhet import HetFSDP, Plan

NAME = "overhead"
NUMS_UNITS = (4, 8, 16, 32, 64)
NUMS_MICROBATCHES = (1, 2, 4, 8, 16)
QUICK_NUMS = (4, 16)
WIDTH = 8
QUANTITY = "cpu_s"
MOST_MS_PER_PAIR = 0.3
NUM_TURNS = 5


class TinyModel(nn.Module):
    """Linear layers of ``WIDTH`` by ``WIDTH``; returns ``(loss_sum, num_tokens)``."""

    def __init__(self, num_units: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_units))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x``, [samples, WIDTH]."""
        for block in self.blocks:
            x = block(x)
        return x.sum(), torch.tensor(len(x))


def measure(effort: Effort) -> list[Sample]:
    """All numbers of units and microbatches in one process."""
    units, microbatches = (
        (QUICK_NUMS, QUICK_NUMS) if effort.is_quick else (NUMS_UNITS, NUMS_MICROBATCHES)
    )
    num_steps = 5 if effort.is_quick else 20
    return run_ranks(_measure_rank, 1, units, microbatches, num_steps)[0]


def _measure_rank(
    rank: int, nums_units: Sequence[int], nums_microbatches: Sequence[int], num_steps: int
) -> list[Sample]:
    samples = []
    for num_units, count in product(nums_units, nums_microbatches):
        batch = torch.randn(count, WIDTH)
        plan = Plan.even(1, microbatch_size=1, num_microbatches=count)
        contestants = [
            systems.het_fsdp(HetFSDP(TinyModel(num_units), plan), None),
            systems.stock(TinyModel(num_units), None, name=PLAIN, microbatch_size=1),
        ]
        seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
        for turn in range(-1, NUM_TURNS):  # the first one warms up
            for each in contestants:
                cpu_s = _cpu_seconds(each, batch, num_steps)
                if turn >= 0:
                    seconds[each.name].append(cpu_s)
        samples += samples_of(NAME, case_name(num_units, count), QUANTITY, seconds)
    return samples


def _cpu_seconds(contestant: System, batch: Tensor, num_steps: int) -> float:
    """Of one step, on the average; of all threads of the process."""
    start_s = time.process_time()
    for _ in range(num_steps):
        contestant.step(batch)
    return (time.process_time() - start_s) / num_steps


def case_name(num_units: int, num_microbatches: int) -> str:
    """In the file."""
    return f"{num_units} units, {num_microbatches} microbatches"


def beyond_plain_s(samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    """What HetFSDP costs more, by numbers of units and microbatches."""
    found = {sample.case for sample in samples}
    return {
        (units, count): median(samples, case, HET, QUANTITY)
        - median(samples, case, PLAIN, QUANTITY)
        for units, count in product(NUMS_UNITS, NUMS_MICROBATCHES)
        if (case := case_name(units, count)) in found
    }


def fit(seconds: dict[tuple[int, int], float]) -> tuple[float, float, float]:
    """Seconds per step, per unit, and per unit and microbatch: least squares of the
    relative errors, so that the smallest step counts as much as the largest.
    """
    rows = np.array([[1.0, units, units * count] for units, count in seconds])
    values = np.array(list(seconds.values()))
    weights = 1 / np.maximum(np.abs(values), 1e-6)
    found = np.linalg.lstsq(rows * weights[:, None], values * weights, rcond=None)[0]
    per_step, per_unit, per_pair = map(float, found)
    return per_step, per_unit, per_pair


def report(samples: Sequence[Sample]) -> Report:
    """Cost per pair in every case, the fit, and its bar."""
    seconds = beyond_plain_s(samples)
    counts = sorted({count for _, count in seconds})
    rows = [
        [str(units), *(f"{1000 * seconds[units, n]:.2f}" for n in counts)]
        for units in sorted({units for units, _ in seconds})
    ]
    per_step, per_unit, per_pair = (1000 * each for each in fit(seconds))
    tables = [
        Table(
            title="Overhead: CPU ms of a step beyond plain PyTorch, 1 rank, by microbatches",
            header=["units", *map(str, counts)],
            rows=rows,
        ),
        Table(
            title="Overhead, fitted: ms",
            header=["per step", "per unit", "per unit and microbatch"],
            rows=[[f"{per_step:.3f}", f"{per_unit:.3f}", f"{per_pair:.3f}"]],
        ),
    ]
    bar = Bar(
        claim="overhead: CPU ms per unit and microbatch",
        measured=per_pair,
        at_most=MOST_MS_PER_PAIR,
    )
    return Report(tables=tables, bars=[bar])


PART = Part(name=NAME, measure=measure, report=report)
