"""Measure, plan, simulate, train: all of shardhet on four emulated devices of this CPU.

    python -m shardhet.apps.demo [--out DIR] [--steps N] [--quick]

It runs the commands that a user would type, one after the other, and shows each before it
runs.  The text is the interpreter's own standard library, so nothing is downloaded.  All
output is written to one folder.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

CLUSTER = "emulated_unlike"  # the fastest device has the least memory
MODEL = "small"  # whose state does not fit there, cut evenly
GLOBAL_BATCH_SIZE = 32
MEASURED_SIZES = "max_microbatch_size=16"  # as large as plans for this cluster use
NUM_STEPS = 60
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
    measured, plan = folder / "measured", folder / "plan.json"
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
                *_picture(folder / "plan.png"),
            ),
        ),
        Part(
            "What will one step look like?",
            (
                "simulate",
                str(plan),
                f"measured={measured}",
                f"trace={folder / 'simulated.json'}",
                *_picture(folder / "step.png"),
            ),
        ),
        Part(
            "Does the model learn, and does a step take as long as predicted?",
            (
                "train",
                "experiment=demo",
                f"model={MODEL}",
                f"cluster={CLUSTER}",
                "plan=file",
                f"plan.path={plan}",
                f"plan.measured={measured}",
                f"num_steps={num_steps}",
                f"eval_every={eval_every}",
                "trace=true",
                f"trace_steps.first_step={min(TRACE_FROM, num_steps)}",
                "trace_steps.num_steps=1",
                f"data.num_judged_samples={num_judged}",
                "save_model=true",
                f"checkpoint.every={num_steps}",
                f"hydra.run.dir={folder / 'run'}",
            ),
        ),
    ]


def _picture(path: Path) -> list[str]:
    """The override that draws a picture, if that is possible."""
    return [f"picture={path}"] if find_spec("matplotlib") else []


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
    for part in parts(folder, options.steps, is_quick=options.quick):
        console.print(f"\n{part.why}", style="bold")
        console.print(f"$ shardhet {' '.join(part.arguments)}\n", markup=False, style="cyan")
        command = [sys.executable, "-m", "shardhet.apps.main", *part.arguments]
        status = subprocess.run(command, check=False).returncode
        if status:
            raise SystemExit(status)
    console.print(f"\nThe demo took {time.monotonic() - started_s:.0f} s.")
    console.print(_where(folder), markup=False)


def _where(folder: Path) -> str:
    return f"""To look at next:
  {folder}/run/traces/rank0.json         a real step; open it at https://ui.perfetto.dev
  {folder}/simulated.json                the simulated one, the same way
  {folder}/plan.png, step.png            the plan and the simulated step as pictures
  {folder}/run/model.safetensors         the trained model
  {folder}/run/checkpoints               the whole state, for resume=PATH under any plan
  {folder}/run/metrics.jsonl             every step, predicted and measured
  shardhet compare {folder}/run          where a step was slower than predicted"""


if __name__ == "__main__":
    main()
