"""How long ``shardhet plan`` takes from the shell, start-up included.

    python -m experiments.planner.shell

The plan alone in three runs, then everything: what limits the plan (by planning again for each
resource), simpler plans, parts of the cluster.  torch is not imported: a module that refuses to
be stands in its place.  The larger clusters are made up.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.common.machine import REPOSITORY, Environment
from experiments.common.results import write_csv
from experiments.planner.large_clusters import write_all_different, write_eight_kinds
from shardhet.config.compose import conf_dir
from shardhet.records.cluster import Cluster

HERE = Path(__file__).parent
NUM_RUNS = 3  # of the plan alone; of everything, one
MODEL = "llama_7b"
SAMPLES_PER_DEVICE = 4
PLAN_ALONE, EVERYTHING = ("what_if_s=0",), ("explain=true", "baselines=true")
NO_TORCH = 'raise ImportError("shardhet plan must not need torch")\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command."""

    cluster: str
    devices: int
    model: str
    batch: int
    run: int
    is_everything: bool  # else the plan alone
    wall_s: float
    cpu_s: float
    peak_mib: float


def timed(arguments: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Seconds of the clock and of the CPU, and MiB of memory, of one command."""
    started_s = time.perf_counter()
    command = [sys.executable, "-m", "shardhet.apps.main", "plan", *arguments]
    with tempfile.TemporaryFile() as output:
        done = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(done.pid, 0)
        wall_s = time.perf_counter() - started_s
        done.returncode = os.waitstatus_to_exitcode(status)
        if done.returncode not in (0, 1):  # 1: nothing fits
            output.seek(0)
            raise RuntimeError(output.read().decode())
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def cases(folder: Path) -> Iterator[tuple[str, int, str, int, list[str]]]:
    """Name, devices, model, batch and arguments: described clusters, then larger ones."""
    described = conf_dir() / "cluster" / "described"
    for path in sorted(described.glob("*.yaml")):
        size = Cluster.load(path).world_size
        model = MODEL if size > 8 else "llama_1b"  # the largest that fits on few devices
        yield path.stem, size, model, SAMPLES_PER_DEVICE * size, [f"cluster={path.stem}"]
    for size in (1024, 16384):
        path = folder / f"eight_kinds_{size}.yaml"
        write_eight_kinds(path, size)
        batch = SAMPLES_PER_DEVICE * size
        yield path.stem, size, MODEL, batch, [f"cluster_file={path}"]
    for size in (64, 256):
        path = folder / f"all_different_{size}.yaml"
        write_all_different(path, size)
        batch = SAMPLES_PER_DEVICE * size
        yield path.stem, size, MODEL, batch, [f"cluster_file={path}"]


def main() -> None:
    """All clusters; every run to shell.csv, medians to the screen."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torch.py").write_text(NO_TORCH)
        paths = [folder, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
        }
        for name, size, model, batch, arguments in cases(Path(folder)):
            arguments = [*arguments, f"model={model}", f"global_batch_size={batch}"]
            for run in range(NUM_RUNS + 1):
                is_everything = run == NUM_RUNS
                asked = [*arguments, *(EVERYTHING if is_everything else PLAN_ALONE)]
                wall_s, cpu_s, peak_mib = timed(asked, environment)
                rows.append(
                    Row(
                        cluster=name,
                        devices=size,
                        model=model,
                        batch=batch,
                        run=run,
                        is_everything=is_everything,
                        wall_s=wall_s,
                        cpu_s=cpu_s,
                        peak_mib=peak_mib,
                    )
                )
            alone = [row.cpu_s for row in rows[-NUM_RUNS - 1 : -1]]
            print(
                f"| {name} | {size:,} | {model} | {batch:,} | {median(alone):.2f} | "
                f"{max(alone):.2f} | {rows[-1].cpu_s:.2f} | {rows[-1].peak_mib:.0f} |",
                flush=True,
            )
            write_csv(HERE / "shell.csv", rows)
    print(Environment.here().as_markdown("start-up included"))


if __name__ == "__main__":
    main()
