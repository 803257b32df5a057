"""How long ``shardhet plan`` takes from the shell, start-up included: five runs a cluster.

    python -m experiments.planner.shell

Everything is on: the plan, what limits it (by planning again for each resource), simpler
plans, and the simulated step.  torch is not imported: a module that refuses to be stands in
its place.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.common.machine import REPOSITORY, Environment
from experiments.common.results import write_csv
from shardhet.config.compose import conf_dir
from shardhet.records.cluster import Cluster

HERE = Path(__file__).parent
NUM_RUNS = 5
MODEL = "llama_7b"
SAMPLES_PER_DEVICE = 4
BAR_S = 5.0  # of the largest
NO_TORCH = 'raise ImportError("shardhet plan must not need torch")\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command."""

    cluster: str
    devices: int
    model: str
    batch: int
    run: int
    wall_s: float
    cpu_s: float


def timed(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds of the clock and of the CPU for one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_s = time.perf_counter()
    command = [sys.executable, "-m", "shardhet.apps.main", "plan", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: nothing fits
        raise RuntimeError(done.stderr)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s


def main() -> None:
    """All described clusters; every run to shell.csv, medians to the screen."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torch.py").write_text(NO_TORCH)
        paths = [folder, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
        }
        for path in sorted((conf_dir() / "cluster" / "described").glob("*.yaml")):
            size = Cluster.load(path).world_size
            model = MODEL if size > 8 else "llama_1b"  # the largest that fits on few devices
            batch = SAMPLES_PER_DEVICE * size
            arguments = [f"cluster={path.stem}", f"model={model}", f"global_batch_size={batch}"]
            walls, cpus = zip(
                *(timed(arguments, environment) for _ in range(NUM_RUNS)), strict=True
            )
            rows += [
                Row(
                    cluster=path.stem,
                    devices=size,
                    model=model,
                    batch=batch,
                    run=i,
                    wall_s=wall_s,
                    cpu_s=cpu_s,
                )
                for i, (wall_s, cpu_s) in enumerate(zip(walls, cpus, strict=True))
            ]
            print(
                f"{path.stem:22} {size:4} devices {model}: median {median(walls):.2f} s, worst "
                f"{max(walls):.2f} s; CPU median {median(cpus):.2f} s"
            )
    write_csv(HERE / "shell.csv", rows)
    largest = max(row.devices for row in rows)
    worst_s = max(row.wall_s for row in rows if row.devices == largest)
    print(f"{largest} devices: {'met' if worst_s <= BAR_S else 'NOT MET'} (bar {BAR_S} s)")
    print(Environment.here().as_markdown("start-up included"))


if __name__ == "__main__":
    main()
