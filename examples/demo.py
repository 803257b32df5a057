"""Measure, plan, simulate, train: all of shardhet on four emulated devices of this CPU.

    python examples/demo.py [--out DIR] [--steps N] [--quick]

It runs the commands that a user would type, one after the other, and shows each before it
runs.  The text is the interpreter's own standard library, so nothing is downloaded.  All
output is written to one folder.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from rich.console import Console

from shardhet.training.rebalancing import NUM_WARM_UP_STEPS

# Of emulated_unlike the fastest device has the least memory; the state of the model does not
# fit there, cut evenly.  Steps are traced once their times are steady.
TRAIN = "train experiment=demo model=small cluster=emulated_unlike plan=file plan.path={out}"
COMMANDS = f"""\
How fast is each device, for each part of the model and each microbatch size?
measure model=small cluster=emulated_unlike {{sizes}} out={{out}}/measured
What should each device compute, and what should it store?
plan measured={{out}}/measured global_batch_size={{batch}} out={{out}}/plan.json {{reasons}} \
{{plan_drawn}}
What will one step look like?
simulate {{out}}/plan.json measured={{out}}/measured trace={{out}}/simulated.json \
{{step_drawn}}
What is the best plan that treats all devices alike, as stock FSDP does?
plan measured={{out}}/measured global_batch_size={{batch}} out={{out}}/even.json what_if_s=0 \
equal=[[0,1,2,3]]
How long does its step take?
{TRAIN}/even.json plan.measured={{out}}/measured num_steps={{few}} eval_every=0 \
hydra.run.dir={{out}}/even
Does the model learn, and does a step take as long as predicted?
{TRAIN}/plan.json plan.measured={{out}}/measured num_steps={{steps}} eval_every={{often}} \
trace=true trace_steps.first_step={{traced}} trace_steps.num_steps=1 save_model=true \
data.num_eval_samples={{judged}} checkpoint.every={{steps}} hydra.run.dir={{out}}/run
"""
NEXT = """
To look at next:
  {out}/run/traces/rank0.json         a real step; open it at https://ui.perfetto.dev
  {out}/simulated.json                the simulated one, the same way
  {out}/plan.png, step.png            the plan and the simulated step as pictures
  {out}/run/model.safetensors         the trained model
  {out}/run/checkpoints               the whole state, for resume=PATH under any plan
  {out}/run/metrics.jsonl             every step, predicted and measured
  {shardhet} compare {out}/run   where a step was slower than predicted"""


def commands(out: Path, num_steps: int, *, is_quick: bool = False) -> list[tuple[str, str]]:
    """The question and the command of each part, in order."""
    here = shlex.quote(str(out))
    can_draw = find_spec("matplotlib") is not None
    lines = COMMANDS.format(
        out=here,
        plan_drawn=f"picture={here}/plan.png" if can_draw else "",
        step_drawn=f"picture={here}/step.png" if can_draw else "",
        sizes="max_microbatch_size=4 num_repeats=3" if is_quick else "max_microbatch_size=16",
        batch=8 if is_quick else 32,
        judged=20 if is_quick else 400,
        reasons="what_if_s=0" if is_quick else "baselines=true",
        steps=num_steps,
        few=min(10, num_steps),
        traced=min(20, num_steps),
        often=num_steps if is_quick else -(-num_steps // 4),
    ).splitlines()
    return list(zip(lines[::2], lines[1::2], strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Run all parts; if one fails, the demo ends with its exit status."""
    parser = argparse.ArgumentParser(
        prog="examples/demo.py",
        description=(__doc__ or "").partition("\n")[0],
    )
    usual = Path("runs") / f"demo_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    parser.add_argument(
        "--out", type=Path, default=usual, help="a folder; default: %(default)s"
    )
    parser.add_argument("--steps", type=int, help="of training; default: 60")
    parser.add_argument(
        "--quick", action="store_true", help="few sizes and steps, to see that it runs"
    )
    given = parser.parse_args(argv)
    num_steps = (4 if given.quick else 60) if given.steps is None else given.steps
    if num_steps < 1:
        parser.error(f"--steps: {num_steps} but there must be at least 1.")
    console = Console(highlight=False, soft_wrap=True)
    shardhet = _program()
    for question, command in commands(given.out, num_steps, is_quick=given.quick):
        console.print(f"\n{question}", style="bold")
        console.print(f"$ {shardhet} {command}\n", markup=False, style="cyan")
        arguments = [sys.executable, "-m", "shardhet.apps.main", *shlex.split(command)]
        if status := subprocess.run(arguments, check=False).returncode:
            raise SystemExit(status)
    console.print(f"\n{measured_ratio(given.out)}", markup=False)
    console.print(NEXT.format(out=given.out, shardhet=shardhet), markup=False)


def measured_ratio(out: Path) -> str:
    """How much faster the plan was than even sharding, beside the prediction."""
    (even_s, even_said_s), (run_s, said_s) = (_step_times_s(out / r) for r in ("even", "run"))
    return (
        f"Measured: {1000 * run_s:.0f} ms a step, and {1000 * even_s:.0f} ms with even "
        f"sharding: {even_s / run_s:.2f} times as fast. Predicted: "
        f"{even_said_s / said_s:.2f} times."
    )


def _program() -> Path:
    """What to type for ``shardhet``: of this environment, which nobody has to activate."""
    path, here = Path(sys.executable).with_name("shardhet"), Path.cwd()
    if not path.exists():
        return Path("shardhet")
    return path.relative_to(here) if path.is_relative_to(here) else path


def _step_times_s(run: Path) -> tuple[float, float]:
    """The median step time of a run after the first steps, and its prediction."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in entries if "step_time_s" in each]
    later = steps[NUM_WARM_UP_STEPS:] or steps
    return median(each["step_time_s"] for each in later), steps[0]["predicted_step_time_s"]


if __name__ == "__main__":
    main()
