"""What it costs to go through a batch in l microbatches: layer by layer, or pass by pass.

    layered   (HetFSDP)   every unit is gathered twice a step and reduced once, whatever l is
    ordinary  (FSDP2)     l forward and backward passes: every unit is gathered 2 l times

The overhead of a step is what it takes beyond l times the compute of one microbatch, which
is timed by itself on a bfloat16 model that nobody shards.  It includes the optimizer.  Blocks
are recomputed in all systems: layered accumulation keeps the inputs of a whole batch, and
with every graph kept it would need the memory of a batch in one go.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from experiments.common.figure import draw_lines
from experiments.common.results import Bar, Table
from experiments.common.systems import FSDP2, HET
from experiments.gpu import systems
from experiments.gpu.clock import free_everything, seconds_per_call, take_turns
from experiments.gpu.results import (
    GIB,
    Recorder,
    Row,
    cases_of,
    median_of,
    ratio_bar,
    shown,
    spread_cell,
    values_of,
)
from experiments.gpu.scale import RECOMPUTED, Job

NAME = "accumulation"
COUNTS = (1, 4, 16)
MAX_STEPS_OF_A_TURN = 6
COMPUTE_CASE = "one microbatch"
STEP, COMPUTE, PEAK = "step", "compute", "peak memory"


def run(job: Job, record: Recorder) -> None:
    """All counts, both systems in turn."""
    with systems.one_rank_group(job.device):
        size = max(1, job.scale.microbatch_size // 4)
        counts = COUNTS[:2] if job.is_rehearsal else COUNTS
        tokens, targets = systems.random_batch(job.scale.config, counts[-1] * size, job.device)
        measure_compute(job, record, tokens[:size], targets[:size])
        free_everything(job.device)
        measure_steps(job, record, counts, tokens, targets)


def measure_compute(
    job: Job, record: Recorder, tokens: torch.Tensor, targets: torch.Tensor
) -> None:
    """Seconds of one microbatch, many in a row."""
    compute = systems.compute_alone(job.scale.config, job.device, recompute=True)
    for _ in range(3):
        compute(tokens, targets)
    count = job.pick(full=16, short=2)
    for repeat in range(job.pick(full=5, short=2)):
        seconds = seconds_per_call(lambda: compute(tokens, targets), count, job.device)
        record(COMPUTE_CASE, COMPUTE, seconds, "s", repeat)


def measure_steps(
    job: Job,
    record: Recorder,
    counts: Sequence[int],
    tokens: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Steps of l microbatches for every l, the largest first: it is what the plan is for."""
    size, config = len(tokens) // counts[-1], job.scale.config
    plan = systems.one_rank_plan(size, counts[-1], recompute=RECOMPUTED)
    contestants = [
        systems.het_fsdp(config, plan, job.device),
        systems.fsdp2(config, job.device, recompute=True, microbatch_size=size),
    ]
    for count in reversed(counts):
        batch = tokens[: count * size], targets[: count * size]
        steps = {
            f"{each.name}, l = {count}": partial(each.step, *batch) for each in contestants
        }
        for step in steps.values():
            step()
        turns = take_turns(
            steps,
            job.device,
            num_rounds=job.pick(full=5, short=2),
            budget_s=job.budget_s / len(counts),
            at_most=MAX_STEPS_OF_A_TURN,
        )
        for turn in turns:
            record(turn.case, STEP, turn.seconds, "s", turn.number)
            if job.is_cuda:  # above what both hold between steps
                record(turn.case, PEAK, turn.peak_bytes / GIB, "GiB", turn.number)


# Tables


def overhead_s(rows: Sequence[Row], case: str) -> float | None:
    """Median step less l times the median microbatch; ``case`` ends in l."""
    step, compute = (median_of(rows, case, STEP), median_of(rows, COMPUTE_CASE, COMPUTE))
    if step is None or compute is None:
        return None
    return step - int(case.rpartition(" ")[2]) * compute


def tables(rows: Sequence[Row]) -> list[Table]:
    """One line per system and l."""
    lines = []
    for case in sorted(cases_of(rows, STEP)):
        overhead = shown(overhead_s(rows, case), "{:.1f}", scale=1000)
        step = spread_cell(values_of(rows, case, STEP), 1, scale=1000)
        lines.append([case, step, overhead, shown(median_of(rows, case, PEAK))])
    lines.sort(key=lambda line: (line[0].partition(",")[0], int(line[0].rpartition(" ")[2])))
    compute = median_of(rows, COMPUTE_CASE, COMPUTE)
    alone = "" if compute is None else f"; one microbatch alone {1000 * compute:.1f} ms"
    header = ["system", "step ms (p10-p90)", "beyond l microbatches, ms", "peak GiB of steps"]
    return [Table(f"Accumulation over l microbatches{alone}", header, lines)]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """At the largest l, layered accumulation is no slower than ordinary one."""
    counts = [int(case.rpartition(" ")[2]) for case in cases_of(rows, STEP)]
    if not counts:
        return []
    most = max(counts)
    ours, theirs = [median_of(rows, f"{name}, l = {most}", STEP) for name in (HET, FSDP2)]
    claim = f"l = {most}: step time, {FSDP2} / {HET}"
    return ratio_bar(claim, theirs, ours, at_least=1.0)


def draw(rows: Sequence[Row], path: Path) -> None:
    """What is paid beyond compute against l; nothing where it was not measured."""
    lines: dict[str, list[tuple[float, float]]] = {HET: [], FSDP2: []}
    for name, points in lines.items():
        for count in COUNTS:
            overhead = overhead_s(rows, f"{name}, l = {count}")
            if overhead is not None and overhead > 0:  # the axes are logarithmic
                points.append((count, 1000 * overhead))
    found = {name: points for name, points in lines.items() if points}
    if found:
        draw_lines(
            found, path, x_label="microbatches of a step", y_label="ms beyond their compute"
        )
