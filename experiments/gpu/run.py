"""What can be said of shardhet on one GPU: speed, memory, predictions, streams, NCCL.

python -m experiments.gpu.run --out FOLDER  under nine minutes, one GPU
python -m experiments.gpu.run --quick       small and short, one GPU
python -m experiments.gpu.run --rehearse    a few minutes, no GPU: every part
                                                            on a CPU, to see that it runs
python -m experiments.gpu.run --only memory --only reads

Every number is in FOLDER/results.csv before the next one is measured.  The folder gets at most
three files: that, README.md and failures.txt.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.common.machine import Environment
from experiments.common.results import (
    BAR_HEADER,
    BLOCK_BEGINS,
    BLOCK_ENDS,
    Page,
    console,
)
from experiments.gpu import (
    checks,
    machine,
    memory,
    nccl,
    overlap,
    prediction,
    speed,
    streams,
)
from experiments.gpu.launch import Outcome, run_limited
from experiments.gpu.machine import Machine
from experiments.gpu.results import FAILED, Ledger, Metric, Recorder, bars_of, table_of
from experiments.gpu.scale import REHEARSAL, Job, Scale, scale_for

HERE = Path(__file__).parent
STOPS_AFTER_S = 520  # since the beginning, whatever is running
TOTAL_S = 500.0  # of all parts; ending one takes seconds
MEASURING_PART = 0.6  # of the limits; the rest builds, compiles and warms up
QUICK_PART = 0.08  # of the limits, in a short run
LEAST_S = 5.0  # without which no part begins
REHEARSAL_LIMIT_S = 120.0  # of each part: none comes near, unless the machine is busy
REHEARSAL_BUDGET_S = 2.0
NO_GPU = 2  # exit code
REHEARSAL_LABEL = "REHEARSAL on a CPU: these numbers mean nothing."


@dataclass(frozen=True, slots=True)
class Part:
    """One question."""

    name: str
    run: Callable[[Job, Recorder], None]
    metrics: tuple[Metric, ...]
    limit_s: float
    is_timed: bool = True  # False: it is right or wrong, also beside others


PARTS = (
    # What must be right comes before what should be fast, and what is short before the rest.
    Part(checks.CONTROL, checks.controls, checks.CONTROL_METRICS, 110, is_timed=False),
    Part(overlap.NAME, overlap.run, overlap.METRICS, 30),
    Part(checks.READS, checks.reads, checks.READ_METRICS, 60, is_timed=False),
    Part(checks.PINS, checks.pins, checks.GUARD_METRICS, 60, is_timed=False),
    Part(checks.GUARDS, checks.guards, checks.GUARD_METRICS, 60, is_timed=False),
    Part(checks.FIRST_STEPS, checks.first_steps, checks.FIRST_METRICS, 110, is_timed=False),
    Part(streams.NAME, streams.run, streams.METRICS, 120, is_timed=False),
    Part(nccl.NAME, nccl.run, nccl.METRICS, 120, is_timed=False),
    Part(speed.NAME, speed.run, speed.METRICS, 110),
    Part(memory.NAME, memory.run, memory.METRICS, 50),
    Part(prediction.NAME, prediction.run, prediction.METRICS, 60),
    Part(checks.COMPILE, checks.compiled, checks.COMPILE_METRICS, 60),
)


def main() -> int:
    """Run the parts, whatever becomes of each; returns the exit code."""
    options = parse()
    # Leaving ends the running part too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(STOPS_AFTER_S)
    if options.rehearse:
        console.print(REHEARSAL_LABEL, style="bold")
    elif not torch.cuda.is_available():
        console.print(
            "No GPU was found (torch.cuda.is_available() is false), and this experiment is "
            "about one; --rehearse runs its parts on the CPU."
        )
        return NO_GPU
    device = torch.device("cpu") if options.rehearse else torch.device("cuda", 0)
    here = look(device)
    if not here.has_bfloat16:
        console.print(f"{here.name} does not compute in bfloat16; take a GPU that does.")
        return NO_GPU
    report = run_parts(options, device, here)
    if not report.page.is_kept:
        console.print("Only a part was measured: nothing was written.")
    return 1 if report.has_failures else 0


def _stop(*_: Any) -> None:
    console.print(f"{STOPS_AFTER_S} s are over: it stops here. What was measured is written.")
    sys.exit(1)


def run_parts(options: argparse.Namespace, device: torch.device, here: Machine) -> "Report":
    """All that were asked for, in their order, within the time that there is."""
    scale = REHEARSAL
    if not options.rehearse:
        scale = scale_for(here.free_bytes, is_short=options.quick)
    is_whole = not (options.rehearse or options.quick or options.only)
    out = prepared(options.out) if options.out else HERE if is_whole else None
    heading = here.as_markdown(Environment.here())
    page = Page(out or HERE, is_kept=out is not None, heading=heading)
    if options.rehearse:
        page.tell(REHEARSAL_LABEL)
    page.tell(describe_scale(scale))
    report = Report(page, Ledger(out and out / "results.csv"), out)
    deadline_s = time.monotonic() + TOTAL_S
    asked = [part for part in PARTS if not options.only or part.name in options.only]
    together = [part for part in asked if not (part.is_timed or options.rehearse)]
    limits_s = [part.limit_s for part in together]
    jobs = [job_of(options, device, scale, limit_s) for limit_s in limits_s]
    # Starting takes longer than most of their cases.
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        num_beside = [len(together) - 1] * len(together)
        outcomes = list(pool.map(report.run, together, jobs, limits_s, num_beside))
    for part, job, outcome in zip(together, jobs, outcomes, strict=True):
        report.add(part, job, outcome)
    for part in asked:
        if part in together:
            continue
        left_s = deadline_s - time.monotonic()
        if left_s < LEAST_S:
            report.leave_out(part)
            continue
        limit_s = min(REHEARSAL_LIMIT_S if options.rehearse else part.limit_s, left_s)
        job = job_of(options, device, scale, limit_s)
        report.add(part, job, report.run(part, job, limit_s))
    report.close()
    return report


def prepared(out: Path) -> Path:
    """The folder, with a page that results can be written into."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(f"# One GPU\n\n{BLOCK_BEGINS}\n{BLOCK_ENDS}\n")
    return out


def parse() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--quick", action="store_true", help="small and short; keeps nothing")
    ways.add_argument("--rehearse", action="store_true", help="on a CPU; keeps nothing")
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, help="write everything into this folder")
    only = "some parts; without --out it keeps nothing"
    parser.add_argument("--only", action="append", choices=names, help=only)
    return parser.parse_args()


def look(device: torch.device) -> Machine:
    """Ask in a process of its own: a context in this one would take memory from the parts."""
    outcome = run_limited(
        machine.look,
        device,
        part="machine",
        limit_s=60.0,
        is_cuda=device.type == "cuda",
        on_row=lambda row: None,
    )
    if outcome.failure is not None:
        raise RuntimeError(f"the device does not answer: {outcome.failure}")
    found: Machine = outcome.result
    return found


def job_of(
    options: argparse.Namespace, device: torch.device, scale: Scale, limit_s: float
) -> Job:
    """A part's share of the time."""
    budget_s = (QUICK_PART if options.quick else MEASURING_PART) * limit_s
    return Job(
        device=device,
        scale=scale,
        budget_s=REHEARSAL_BUDGET_S if options.rehearse else budget_s,
        is_short=options.quick or options.rehearse,
        is_rehearsal=options.rehearse,
    )


def describe_scale(scale: Scale) -> str:
    """One line for a README."""
    config = scale.config
    return (
        f"GPT of {scale.name}: {config.num_layers} blocks of width {config.width}, "
        f"{config.seq_len} tokens a sample, {config.vocab_size} words; float32 state, "
        "bfloat16 in flight, one rank."
    )


class Report:
    """What was found so far, on the terminal and in the files."""

    def __init__(self, page: Page, ledger: Ledger, out: Path | None = None) -> None:
        self.page = page
        self.has_failures = False
        self._ledger = ledger
        self._out = out
        self._bar_cells: list[list[str]] = []

    def run(self, part: Part, job: Job, limit_s: float, num_beside: int = 0) -> Outcome:
        """Run a part, beside others; what it records is kept at once."""
        console.print(f"{part.name} (at most {limit_s:.0f} s)")
        return run_limited(
            part.run,
            job,
            part=part.name,
            limit_s=limit_s,
            is_cuda=job.is_cuda,
            on_row=self._ledger.add,
            num_beside=num_beside,
        )

    def add(self, part: Part, job: Job, outcome: Outcome) -> None:
        """Take what a part has recorded, whether it finished or not."""
        rows = [row for row in self._ledger.rows if row.part == part.name]
        console.print(f"{part.name}: {len(rows)} numbers in {outcome.seconds:.0f} s")
        for row in rows:
            if row.metric == FAILED:
                self._note(f"**{part.name}**, a case failed: {row.case}")
        if outcome.failure is not None:
            console.print(outcome.failure, markup=False)
            self._note(f"**{part.name} did not finish**: {outcome.cause}", outcome.failure)
        self.page.tables([table_of(part.name, part.metrics, rows)])
        verdict = ["", "not judged"]
        self._bar_cells += [
            [*bar.cells[:2], *(verdict if job.is_rehearsal else bar.cells[2:])]
            for bar in bars_of(part.name, part.metrics, rows)
        ]
        self.page.write_block()

    def leave_out(self, part: Part) -> None:
        """Say that there was no time for it."""
        self._note(f"**{part.name}** was left out: the time is over.")

    def _note(self, said: str, more: str = "") -> None:
        self.has_failures = True
        self.page.tell(said)
        if self._out is not None:
            with (self._out / "failures.txt").open("a") as file:
                file.write(f"{said}\n{more}\n")

    def close(self) -> None:
        """All bars."""
        self.page.table("Bars", BAR_HEADER, self._bar_cells)
        self.page.write_block()


if __name__ == "__main__":
    sys.exit(main())
