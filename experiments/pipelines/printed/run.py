"""What does shardhet predict for what Sailor and Zorse have published?

    python -m experiments.pipelines.printed.run

No clock is read, and nothing was fitted to these figures.  steps.csv, layers.csv, links.csv and
blocks.csv hold what was published; README.md says where.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from experiments.common.machine import Environment
from experiments.common.results import Page
from experiments.pipelines.printed.sailor import (
    Step,
    predicted,
    read_layers,
    read_links,
    read_steps,
)
from experiments.pipelines.printed.zorse import REPOSITORY, SEQ_LEN, block_rows, planned_rows

HERE = Path(__file__).parent
NETWORKS = {"clariden": "GH200", "fast": "RTX, fast links", "sockets": "RTX, 1 Gbit/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A step as it was measured and as it is predicted."""

    cluster: str
    model: str
    hosts: int
    tensor_parallel: int
    stages: int
    replicas: int
    microbatch: int
    batch: int
    measured_s: float
    measured_again_s: float | None
    other_program_s: float | None
    predicted_stages_s: float
    predicted_reduction_s: float
    predicted_s: float
    error: float  # predicted over measured, less one
    blocking_error: float  # nothing is computed while messages are sent
    full_bandwidth_error: float  # of rings
    source: str
    commit: str


def step_rows() -> Iterator[StepRow]:
    """All of steps.csv."""
    layers_of, links = read_layers(), read_links()
    for step in read_steps():
        seconds = predicted(step, layers_of, links)
        off = partial(_error, step)
        yield StepRow(
            cluster=NETWORKS[step.network],
            model=step.model,
            hosts=step.hosts,
            tensor_parallel=step.tensor_parallel,
            stages=len(step.layers),
            replicas=step.replicas,
            microbatch=step.microbatch,
            batch=step.batch,
            measured_s=step.measured_s,
            measured_again_s=step.again_s,
            other_program_s=step.other_program_s,
            predicted_stages_s=round(seconds.stages_s, 4),
            predicted_reduction_s=round(seconds.reduction_s, 4),
            predicted_s=round(seconds.step_s, 4),
            error=off(seconds.step_s),
            blocking_error=off(seconds.blocking_step_s),
            full_bandwidth_error=off(seconds.full_step_s),
            source=step.source,
            commit=step.commit,
        )


def _error(step: Step, seconds: float) -> float:
    return round(seconds / step.measured_s - 1, 4)


def _percent(error: float) -> str:
    return f"{100 * error:+.0f} %"


def _spread(errors: Sequence[float]) -> str:
    low, high = min(errors), max(errors)
    return f"{_percent(median(errors))} ({_percent(low)} to {_percent(high)})"


def summary(rows: Sequence[StepRow]) -> list[tuple[str, ...]]:
    """Errors of all rows, then by cluster and model, without stages and with."""
    parts = {"all": [*rows]}
    for row in rows:
        which = "in stages" if row.stages > 1 else "one stage"
        parts.setdefault(f"{row.cluster}, {row.model}, {which}", []).append(row)
    return [
        (
            part,
            str(len(some)),
            f"{100 * median(abs(row.error) for row in some):.0f} %",
            _spread([row.error for row in some]),
            _spread([row.blocking_error for row in some]),
            _spread([row.full_bandwidth_error for row in some]),
        )
        for part, some in parts.items()
    ]


def _seconds_cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def _step_line(row: StepRow) -> tuple[str, ...]:
    return (
        f"{row.cluster}, {row.model}",
        f"{row.hosts} x {row.tensor_parallel}",
        *map(str, (row.stages, row.replicas, row.microbatch, row.batch)),
        _seconds_cell(row.measured_s),
        _seconds_cell(row.measured_again_s),
        _seconds_cell(row.other_program_s),
        _seconds_cell(row.predicted_stages_s),
        _seconds_cell(row.predicted_reduction_s),
        _percent(row.error),
        _percent(row.blocking_error),
        _percent(row.full_bandwidth_error),
    )


def main() -> None:
    """results.csv and the block of README.md."""
    environment = Environment.here()
    heading = f"{environment.date}, commit `{environment.commit}`; no clock was read."
    page = Page(HERE, is_kept=True, heading=heading)
    steps, blocks, plans = [*step_rows()], [*block_rows()], [*planned_rows()]
    errors = ("error", "nothing overlaps", "rings at full bandwidth")
    page.table(
        "Errors of predicted steps (predicted over measured, less one), median and range",
        ("Sailor's runs", "rows", "off, median", *errors),
        summary(steps),
    )
    page.table(
        "Sailor's runs, seconds of a step",
        ("cluster, model", "hosts x cards", "stages", "replicas", "microbatch", "batch")
        + ("measured", "again", "other program", "predicted: stages", "reduction", *errors),
        [_step_line(row) for row in steps],
    )
    page.table(
        f"One block of Llama 3B, float16, {SEQ_LEN} tokens (ms; {REPOSITORY})",
        ("GPU", "microbatch", "forward, printed", "derived", "backward, printed", "derived")
        + ("error of both",),
        [
            (
                row.kind,
                str(row.microbatch),
                f"{row.printed_forward_ms:.2f}",
                f"{row.derived_forward_ms:.2f}",
                f"{row.printed_backward_ms:.2f}",
                f"{row.derived_backward_ms:.2f}",
                _percent(row.error),
            )
            for row in blocks
        ],
    )
    page.table(
        "What Zorse's planner printed, predictions all (seconds of a step)",
        ("cluster", "its plan", "its seconds", "its formulation by our prices", "ours")
        + ("source",),
        [
            (
                row.cluster,
                row.plan,
                f"{row.printed_s:.3f}",
                f"{row.its_formulation_s:.3f} in {row.its_stages}",
                f"{row.ours_s:.3f} in {row.our_stages}",
                row.source,
            )
            for row in plans
        ],
    )
    page.keep({"results.csv": steps, "results_blocks.csv": blocks, "results_plans.csv": plans})


if __name__ == "__main__":
    main()
