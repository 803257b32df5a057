"""What the demo shows, and writes if asked to: tables before and after, lines in between.

Only rank zero shows anything.  On a terminal a bar stands below the lines.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardhet import Plan, RankPlan
from shardhet.data import TableScores

EMULATED = "emulated "  # how the kind of every device of the demo begins


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One finished optimizer step, the same on every rank but for the clock."""

    step: int  # counts from 1
    train_bits_per_byte: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """What one rank did in the whole run."""

    num_samples: int  # trained on
    compute_s: float  # evaluations included, as in the next
    wait_s: float  # for parameters and gradients of other ranks
    state_bytes: int


class Reporter:
    """Shows a run as it goes; silent on all ranks but rank zero."""

    def __init__(
        self, *, num_steps: int, steps_per_line: int, out_dir: Path | None, is_rank_zero: bool
    ) -> None:
        self.console = Console(quiet=not is_rank_zero, highlight=False)
        self._num_steps = num_steps
        self._steps_per_line = steps_per_line
        self._out_dir = out_dir if is_rank_zero else None
        self._started_at_s = time.perf_counter()
        self._train_s = 0.0
        self._held_out: list[float] = []  # bits per byte
        self._since_line: list[StepMetrics] = []
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("step {task.completed} of {task.total}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self.bar.add_task("training", total=num_steps)

    def show_plan(self, plan: Plan, table: Table) -> None:
        """The table; and the plan goes where it was asked for."""
        if self._out_dir is not None:
            self._out_dir.mkdir(parents=True, exist_ok=True)
            plan.save(self._out_dir / "plan.json")
            (self._out_dir / "metrics.jsonl").write_text("")
        self.console.print(table)

    def show_step(self, metrics: StepMetrics) -> None:
        """A line every some steps; every step goes into the metrics."""
        self._write(asdict(metrics))
        self.bar.advance(self._task)
        self._train_s += metrics.step_time_s
        self._since_line.append(metrics)
        if metrics.step % self._steps_per_line == 0:
            self._print_line(self._since_line)
            self._since_line = []

    def _print_line(self, steps: Sequence[StepMetrics]) -> None:
        last = steps[-1]
        bits = sum(each.train_bits_per_byte for each in steps) / len(steps)
        tokens_per_s = sum(s.num_tokens for s in steps) / sum(s.step_time_s for s in steps)
        left_s = (self._num_steps - last.step) * self._train_s / last.step
        self.console.print(
            f"step {last.step:3d}/{self._num_steps}  train {bits:.3f} bits/byte  grad norm "
            f"{last.grad_norm:.2f}  {tokens_per_s:6,.0f} tokens/s  {left_s:3.0f} s left"
        )

    def show_held_out(self, step: int, bits_per_byte: float, tables: TableScores) -> None:
        """How well the model does on text it has not seen, beside what counting does."""
        self._write({"step": step, "held_out_bits_per_byte": bits_per_byte, **asdict(tables)})
        self._held_out.append(bits_per_byte)
        self.console.print(
            f"step {step:3d}  held-out {bits_per_byte:.3f} bits/byte  "
            f"(unigram table {tables.unigram_bits_per_byte:.3f}, "
            f"bigram table {tables.bigram_bits_per_byte:.3f})",
            style="bold",
        )

    def show_end(self, table: Table) -> None:
        """What came of it."""
        elapsed_s = time.perf_counter() - self._started_at_s
        self.console.print(
            f"\nheld-out text: {self._held_out[0]:.3f} bits/byte before, "
            f"{self._held_out[-1]:.3f} after {self._num_steps} steps and {elapsed_s:.0f} s\n",
            style="bold",
        )
        self.console.print(table)
        if self._out_dir is not None:
            self.console.print(
                f"written: {self._out_dir}/metrics.jsonl, {self._out_dir}/plan.json"
            )

    def _write(self, entry: dict[str, Any]) -> None:
        if self._out_dir is not None:
            with (self._out_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")


def plan_table(plan: Plan, state_bytes: Sequence[int], *, title: str) -> Table:
    """Per device its compute and its state; in the last two columns an even split."""
    num_samples, num_bytes = plan.global_batch_size, sum(state_bytes)
    table = Table(
        title=title,
        caption="Stored: parameters, gradients, two AdamW moments. Emulated in name only:\n"
        "like processes on this CPU play the devices, none slowed or capped.",
    )
    _add_columns(
        table,
        "micro-\nbatches",
        "samples\na step",
        "recom-\nputes",
        "MiB\nstored",
        "even\nsamples",
        "even\nMiB",
    )
    for i, (rank, nbytes) in enumerate(zip(plan.ranks, state_bytes, strict=True)):
        table.add_row(
            _device(i, rank),
            _microbatches(rank),
            f"{rank.rank_batch_size} ({rank.rank_batch_size / num_samples:.0%})",
            "yes" if rank.recomputed_units else "no",
            f"{nbytes / 2**20:.2f} ({nbytes / num_bytes:.0%})",
            f"{num_samples / plan.world_size:g}",
            f"{num_bytes / plan.world_size / 2**20:.2f}",
        )
    return table


def work_table(plan: Plan, work_done: Sequence[WorkDone]) -> Table:
    """Per device what it did in the whole run, as measured."""
    table = Table(title="what each device did (as measured; all of them share this CPU)")
    _add_columns(table, "samples", "computed", "waited for others", "MiB stored")
    for i, (rank, work) in enumerate(zip(plan.ranks, work_done, strict=True)):
        table.add_row(
            _device(i, rank),
            f"{work.num_samples:,}",
            f"{work.compute_s:.1f} s",
            f"{work.wait_s:.1f} s",
            f"{work.state_bytes / 2**20:.2f}",
        )
    return table


def _add_columns(table: Table, *headers: str) -> None:
    table.add_column("emulated\ndevice", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)


def _device(position: int, rank: RankPlan) -> str:
    return f"{position} {(rank.device.kind or '?').removeprefix(EMULATED)}"


def _microbatches(rank: RankPlan) -> str:
    whole = rank.microbatch_sizes.count(max(rank.microbatch_sizes, default=0))
    rest = rank.microbatch_sizes[whole:]
    parts = [f"{whole} x {rank.microbatch_sizes[0]}"] if whole else ["none"]
    return " + ".join([*parts, *map(str, rest)])
