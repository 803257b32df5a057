"""Measure, plan, simulate, train: all of shardhet on four emulated devices of this CPU.

    python -m shardhet.apps.demo [--out DIR] [--steps N] [--quick]

It runs the commands that a user would type, one after the other, and shows each before it
runs.  The text is the interpreter's own standard library, so nothing is downloaded.  All
output is written to one folder.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from rich.console import Console

from shardhet.training.hooks.predicted import NUM_WARM_UP_STEPS

CLUSTER = "emulated_unlike"  # the fastest device has the least memory
MODEL = "small"  # whose state does not fit there, cut evenly
GLOBAL_BATCH_SIZE = 32
BUSY_SHARE = 0.5  # of the cores, by the load of the last minute
MEASURED_SIZES = "max_microbatch_size=16"  # as large as plans for this cluster use
NUM_STEPS = 60
NUM_EVEN_STEPS = 10
RUN, EVEN = "run", "even"  # folders of the runs
QUICK_NUM_STEPS = 4
TRACE_FROM = 20  # the first traced step; by then step times are steady


@dataclass(frozen=True, slots=True)
class Part:
    """One command of the demo."""

    why: str
    arguments: tuple[str, ...]  # of `shardhet`


def parts(folder: Path, num_steps: int, *, is_quick: bool = False) -> list[Part]:
    """The parts of the demo, in order."""
    sizes = ("max_microbatch_size=4", "num_repeats=3") if is_quick else (MEASURED_SIZES,)
    batch_size, num_judged = (8, 20) if is_quick else (GLOBAL_BATCH_SIZE, 400)
    reasons = ("what_if_s=0",) if is_quick else ("baselines=true",)
    eval_every = num_steps if is_quick else -(-num_steps // 4)
    measured, plan, even = (folder / each for each in ("measured", "plan.json", "even.json"))

    def training(path: Path, num_steps: int, run: str, *more: str) -> tuple[str, ...]:
        return (
            "train",
            "experiment=demo",
            f"model={MODEL}",
            f"cluster={CLUSTER}",
            "plan=file",
            f"plan.path={path}",
            f"plan.measured={measured}",
            f"num_steps={num_steps}",
            *more,
            f"hydra.run.dir={folder / run}",
        )

    return [
        Part(
            "How fast is each device, for each part of the model and each microbatch size?",
            ("measure", f"model={MODEL}", f"cluster={CLUSTER}", *sizes, f"out={measured}"),
        ),
        Part(
            "What should each device compute, and what should it store?",
            (
                "plan",
                f"measured={measured}",
                f"global_batch_size={batch_size}",
                f"out={plan}",
                *reasons,
            ),
        ),
        Part(
            "What will one step look like?",
            (
                "simulate",
                str(plan),
                f"measured={measured}",
                f"trace={folder / 'simulated.json'}",
            ),
        ),
        Part(
            "What is the best plan that treats all devices alike, as stock FSDP does?",
            (
                "plan",
                f"measured={measured}",
                f"global_batch_size={batch_size}",
                "equal=[[0,1,2,3]]",
                "what_if_s=0",
                f"out={even}",
            ),
        ),
        Part(
            "How long does its step take?",
            training(even, min(num_steps, NUM_EVEN_STEPS), EVEN, "eval_every=0"),
        ),
        Part(
            "Does the model learn, and does a step take as long as predicted?",
            training(
                plan,
                num_steps,
                RUN,
                f"eval_every={eval_every}",
                "trace=true",
                f"trace_steps.first_step={min(TRACE_FROM, num_steps)}",
                "trace_steps.num_steps=1",
                f"data.num_judged_samples={num_judged}",
                "save_model=true",
                f"checkpoint.every={num_steps}",
            ),
        ),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run all parts; if one fails, the demo ends with its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shardhet.apps.demo",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--out", type=Path, help="a folder; default: runs/demo_<date>")
    parser.add_argument("--steps", type=int, help=f"of training; default: {NUM_STEPS}")
    parser.add_argument(
        "--quick", action="store_true", help="few sizes and steps, to see that it runs"
    )
    options = parser.parse_args(argv)
    if options.steps is None:
        options.steps = QUICK_NUM_STEPS if options.quick else NUM_STEPS
    if options.steps < 1:
        parser.error(f"--steps: {options.steps} but there must be at least 1.")
    folder = options.out or Path("runs") / f"demo_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    console = Console(highlight=False, soft_wrap=True)
    started_s = time.monotonic()
    if busy := _busy():
        console.print(busy, style="yellow")
    for part in parts(folder, options.steps, is_quick=options.quick):
        console.print(f"\n{part.why}", style="bold")
        console.print(
            f"$ {_program()} {' '.join(part.arguments)}\n", markup=False, style="cyan"
        )
        command = [sys.executable, "-m", "shardhet.apps.main", *part.arguments]
        status = subprocess.run(command, check=False).returncode
        if status:
            raise SystemExit(status)
    console.print(f"\n{_measured_ratio(folder)}")
    console.print(f"The demo took {time.monotonic() - started_s:.0f} s.")
    console.print(_where(folder), markup=False)


def _measured_ratio(folder: Path) -> str:
    """How much faster the plan was than even sharding, beside the prediction."""
    (even_s, even_said_s), (run_s, said_s) = (_step_times_s(folder / r) for r in (EVEN, RUN))
    return (
        f"Measured: {1000 * run_s:.0f} ms a step, and {1000 * even_s:.0f} ms with even "
        f"sharding: {even_s / run_s:.2f} times as fast. Predicted: "
        f"{even_said_s / said_s:.2f} times."
    )


def _step_times_s(run: Path) -> tuple[float, float]:
    """The median step time of a run after the first steps, and its prediction."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in entries if "step_time_s" in each]
    later = steps[NUM_WARM_UP_STEPS:] or steps
    return median(each["step_time_s"] for each in later), steps[0]["predicted_step_time_s"]


def _busy() -> str:
    """A line if other programs compute here."""
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    return (
        f"\nOther programs want {load:.1f} of {num_cores} cores: times will be longer than "
        "predicted, and differ from run to run."
        if load > BUSY_SHARE * num_cores
        else ""
    )


def _program() -> Path:
    """What to type for ``shardhet``: of this environment, which nobody has to activate."""
    path, here = Path(sys.executable).with_name("shardhet"), Path.cwd()
    if not path.exists():
        return Path("shardhet")
    return path.relative_to(here) if path.is_relative_to(here) else path


def _where(folder: Path) -> str:
    return f"""To look at next:
  {folder}/run/traces/rank0.json         a real step; open it at https://ui.perfetto.dev
  {folder}/simulated.json                the simulated one, the same way
  {folder}/run/model.safetensors         the trained model
  {folder}/run/checkpoints               the whole state, for resume=PATH under any plan
  {folder}/run/metrics.jsonl             every step, predicted and measured
  {_program()} compare {folder}/run   where a step was slower than predicted"""


if __name__ == "__main__":
    main()
