"""After the demo: the same training, stopped half-way, goes on with one device fewer.

    python -m experiments.recovery.goes_on DEMO

DEMO is the folder that ``shardhet.apps.demo`` has written.  Its training is started again and
told to end after half of its steps, as a spot instance is.  A plan for the devices without one
of them is made from what the demo has measured, and the run goes on from its checkpoint under
that plan.  At the end its losses stand beside those of the demo, which was not stopped.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from shardhet.apps.launch.run_folder import RunFolder
from shardhet.config.compose import load_resolved
from shardhet.config.training import ClusterConf
from shardhet.planner import PlanError, find_plan
from shardhet.pricing.part import part_of
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan

SECONDS_BETWEEN_LOOKS = 0.1
# What the demo's own command line says about outputs and the plan.
REPLACED = (
    "hydra.run.dir",
    "plan.path",
    "plan.measured",
    "checkpoint.every",
    "save_model",
    "trace",
    "trace_steps.first_step",
    "trace_steps.num_steps",
)


def train_arguments(run: RunFolder) -> list[str]:
    """The command line of the demo's training, without its outputs and its plan."""
    document = json.loads((run.path / "run.json").read_text(encoding="utf-8"))
    given: list[str] = document["command_line"][1:]
    return [each for each in given if each.partition("=")[0] not in REPLACED]


def fewer_devices(measured: Setting, global_batch_size: int) -> tuple[int, Setting]:
    """The last device that the others can do without, and the setting of the others.

    Raises ``PlanError`` if all are needed.
    """
    positions = range(measured.cluster.world_size)
    missed = PlanError("plan: there is one device only.")
    for left_out in reversed(positions):
        others = [each for each in positions if each != left_out]
        try:
            setting = part_of(measured, others)
            find_plan(setting, global_batch_size=global_batch_size)
        except PlanError as error:
            missed = error
        else:
            return left_out, setting
    raise missed


def cluster_without(cluster: ClusterConf, left_out: int) -> list[str]:
    """The overrides that describe the demo's cluster without a device."""
    lists: dict[str, Sequence[object]] = {
        "kinds": [f'"{kind}"' for kind in cluster.kinds],
        "speeds": cluster.speeds,
        "memory_mib": cluster.memory_mib,
    }
    overrides = []
    for name, values in lists.items():
        kept = [str(each) for i, each in enumerate(values) if i != left_out]
        if values:
            overrides.append(f"cluster.{name}=[{','.join(kept)}]")
            overrides.append(f"cluster.num_ranks={len(kept)}")
    return list(dict.fromkeys(overrides))


def losses_of(run: RunFolder) -> dict[int, float]:
    """The loss of every step."""
    lines = run.metrics_path.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return {each["step"]: each["loss"] for each in entries if "loss" in each}


class Story:
    """The parts of it, shown and run one after the other."""

    def __init__(self, demo: Path, console: Console) -> None:
        self._demo = demo
        self._console = console
        self._whole, self._stopped, self._goes_on = (
            RunFolder(demo / name) for name in ("run", "stopped", "goes_on")
        )
        self._conf = load_resolved(self._whole.config_path)

    def tell(self) -> None:
        """Stop the training half-way, plan for fewer devices, go on, compare."""
        demo, stop = self._demo, max(1, self._conf.num_steps // 2)
        measured = Setting.load(demo / "measured")
        batch = Plan.load(demo / "plan.json").global_batch_size
        self._say(f"The training is stopped after {stop} steps.")
        plan = (f"plan.path={demo / 'plan.json'}", f"plan.measured={demo / 'measured'}")
        self._train(self._stopped, plan, stop_after=stop)
        left_out, fewer = fewer_devices(measured, batch)
        fewer.save(demo / "fewer")
        name = measured.cluster.devices[left_out].kind
        self._say(
            f"Device {left_out} ({name}) is removed. What does each of the others do now?"
        )
        new_plan = demo / "fewer" / "plan.json"
        request = (f"measured={demo / 'fewer'}", f"global_batch_size={batch}")
        quick = ("what_if_s=0",)
        self._run("plan", *request, f"out={new_plan}", *quick)
        self._say("The others continue from the checkpoint.")
        plan = (f"plan.path={new_plan}", f"plan.measured={demo / 'fewer'}")
        resume = f"resume={self._stopped.checkpoints_dir}"
        self._train(
            self._goes_on, (*plan, resume, *cluster_without(self._conf.cluster, left_out))
        )
        self._compare()

    def _train(
        self, run: RunFolder, arguments: Sequence[str], *, stop_after: int | None = None
    ) -> None:
        common = (f"checkpoint.every={self._conf.num_steps}", f"hydra.run.dir={run.path}")
        self._run(
            "train",
            *train_arguments(self._whole),
            *arguments,
            *common,
            stops=None if stop_after is None else (run, stop_after),
        )

    def _run(self, *arguments: str, stops: tuple[RunFolder, int] | None = None) -> None:
        """Run a command of shardhet, and tell it to end after a step."""
        self._console.print(f"$ shardhet {' '.join(arguments)}\n", markup=False, style="cyan")
        process = subprocess.Popen([sys.executable, "-m", "shardhet.apps.main", *arguments])
        while stops is not None and process.poll() is None:
            run, step = stops
            with suppress(OSError, ValueError):  # there is no file yet, or half a line
                if step in losses_of(run):
                    run.end_notice_path.touch()
                    break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if process.wait():
            raise SystemExit(process.returncode)

    def _compare(self) -> None:
        """Print the losses of both runs after the stop, and how far apart they are."""
        whole, after = losses_of(self._whole), losses_of(self._goes_on)
        stopped = losses_of(self._stopped)
        differences = [abs(loss / whole[step] - 1) for step, loss in after.items()]
        first, last, stop = min(after), max(after), max(stopped)
        self._say(
            f"Stopped after step {stop} with a loss of {stopped[stop]:.4f}; on fewer devices "
            f"from {after[first]:.4f} in step {first} to {after[last]:.4f} in step {last}. The "
            f"demo, which was not stopped, had {whole[first]:.4f} and {whole[last]:.4f}; the "
            f"losses of a step are at most {max(differences):.1e} apart."
        )

    def _say(self, text: str) -> None:
        self._console.print(f"\n{text}", style="bold", markup=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Tell it; if a command fails, this ends with its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.recovery.goes_on",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("demo", type=Path, help="the folder that the demo has written")
    options = parser.parse_args(argv)
    if not (options.demo / "run" / "metrics.jsonl").is_file():
        parser.error(
            f"{options.demo} does not contain a demo. Run python -m shardhet.apps.demo first."
        )
    for name in ("stopped", "goes_on"):
        if (options.demo / name).exists():
            parser.error(f"{options.demo / name} exists. Remove it.")
    Story(options.demo, Console(highlight=False, soft_wrap=True)).tell()


if __name__ == "__main__":
    main()
