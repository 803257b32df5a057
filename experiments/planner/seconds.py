"""How long ``shardhet plan`` takes from the shell, start-up included.

    OMP_NUM_THREADS=1 python -m experiments.planner.seconds

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
from typing import NamedTuple

import numpy as np

from experiments.common.machine import REPOSITORY, Environment
from experiments.common.results import console, parser_of, write_csv
from shardhet.config.compose import conf_dir
from shardhet.records.cluster import Cluster

HERE = Path(__file__).parent
NUM_RUNS = 3  # of the plan alone; of everything, one
MODEL = "llama_7b"
SAMPLES_PER_DEVICE = 4
PLAN_ALONE, EVERYTHING = ("what_if_s=0",), ("explain=true", "baselines=true")
NO_TORCH = 'raise ImportError("shardhet plan must not need torch")\n'
EIGHT_KINDS = (
    *("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"),
    *("NVIDIA A10G", "NVIDIA L4", "NVIDIA RTX A6000"),
    *("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"),
)
PER_HOST = 8
LINK = '{latency_s: 2.0e-5, bandwidth_bytes_per_s: 20.0e+9, source: "made up"}'
BETWEEN = '{latency_s: 2.0e-5, bandwidth_bytes_per_s: 50.0e+9, source: "made up"}'


def write_eight_kinds(path: Path, num_devices: int) -> None:
    """As many devices of each of eight kinds, eight of them on a host."""
    hosts = num_devices // (PER_HOST * len(EIGHT_KINDS))
    lines = ["version: 1", "nodes:"]
    for i, kind in enumerate(EIGHT_KINDS):
        devices = f"[{{kind: {kind}, count: {PER_HOST}}}]"
        lines += [f"  - host: type{i}", f"    count: {hosts}", f"    link: {LINK}"]
        lines += [f"    devices: {devices}"]
    path.write_text("\n".join([*lines, f"between_nodes: {BETWEEN}"]) + "\n")


def write_all_different(path: Path, num_devices: int) -> None:
    """Every device is of a kind of its own: 40 to 400 TFLOP/s, 16 to 80 GiB."""
    rng = np.random.default_rng(0)
    kinds, lines = ["version: 1", "kinds:"], ["nodes:"]
    for i in range(num_devices):
        peak = float(np.exp(rng.uniform(np.log(40e12), np.log(400e12))))
        kinds += [
            f"- kind: kind {i}",
            f"  memory_capacity_bytes: {int(rng.uniform(16, 80) * 2**30)}",
            f"  memory_bandwidth_bytes_per_s: {peak / 150:.6e}",
            f"  peak_flops_per_s: {{float32: {peak / 4:.6e}, bfloat16: {peak:.6e}}}",
            '  source: "made up"',
        ]
        if i % PER_HOST == 0:
            lines += [f"  - host: h{i // PER_HOST}", f"    link: {LINK}", "    devices:"]
        lines.append(f"      - {{kind: kind {i}}}")
    path.write_text("\n".join([*kinds, *lines, f"between_nodes: {BETWEEN}"]) + "\n")


class Case(NamedTuple):
    """A cluster, and what is planned for it."""

    cluster: str
    devices: int
    model: str
    batch: int
    keys: tuple[str, ...]


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


def cases(folder: Path) -> Iterator[Case]:
    """Described clusters, then larger ones."""

    def case(name: str, size: int, model: str, key: str) -> Case:
        batch = SAMPLES_PER_DEVICE * size
        keys = (key, f"model={model}", f"global_batch_size={batch}")
        return Case(name, size, model, batch, keys)

    for path in sorted((conf_dir() / "cluster" / "described").glob("*.yaml")):
        size = Cluster.load(path).world_size
        model = MODEL if size > 8 else "llama_1b"  # the largest that fits on few devices
        yield case(path.stem, size, model, f"cluster={path.stem}")
    for write, name, sizes in (
        (write_eight_kinds, "eight_kinds", (1024, 16384)),
        (write_all_different, "all_different", (64, 256)),
    ):
        for size in sizes:
            path = folder / f"{name}_{size}.yaml"
            write(path, size)
            yield case(path.stem, size, MODEL, f"cluster_file={path}")


def timed(keys: tuple[str, ...], folder: Path) -> tuple[float, float, float]:
    """Seconds of the clock and of the CPU, and MiB, of one command without torch."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder / "no_torch"), str(REPOSITORY)]),
        "OMP_NUM_THREADS": "1",
    }
    started_s = time.perf_counter()
    command = [sys.executable, "-m", "shardhet.apps.main", "plan", *keys]
    with tempfile.TemporaryFile() as output:
        done = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(done.pid, 0)
        wall_s = time.perf_counter() - started_s
        done.returncode = os.waitstatus_to_exitcode(status)
        if done.returncode not in (0, 1):  # 1: nothing fits
            output.seek(0)
            raise RuntimeError(output.read().decode())
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(case: Case, folder: Path) -> list[Row]:
    """All runs of one case."""
    rows = []
    for run in range(NUM_RUNS + 1):
        is_everything = run == NUM_RUNS
        keys = (*case.keys, *(EVERYTHING if is_everything else PLAN_ALONE))
        wall_s, cpu_s, peak_mib = timed(keys, folder)
        rows.append(
            Row(
                **{name: getattr(case, name) for name in ("cluster", "devices", "model")},
                batch=case.batch,
                run=run,
                is_everything=is_everything,
                wall_s=wall_s,
                cpu_s=cpu_s,
                peak_mib=peak_mib,
            )
        )
    alone, last = [row.cpu_s for row in rows[:-1]], rows[-1]
    console.print(
        f"| {case.cluster} | {case.devices:,} | {case.model} | {case.batch:,} | "
        f"{median(alone):.2f} | {max(alone):.2f} | {last.cpu_s:.2f} | {last.peak_mib:.0f} |",
        soft_wrap=True,
    )
    return rows


def main() -> None:
    """All clusters; every run to shell.csv, medians to the screen."""
    parser = parser_of(__doc__, "the smallest cluster; keeps nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "no_torch").mkdir()
        (folder / "no_torch" / "torch.py").write_text(NO_TORCH)
        asked = [*cases(folder)]
        asked = [min(asked, key=lambda case: case.devices)] if options.quick else asked
        for case in asked:
            rows += measure(case, folder)
            if not options.quick:
                write_csv(HERE / "shell.csv", rows)
    console.print(Environment.here().as_markdown("start-up included"), soft_wrap=True)


if __name__ == "__main__":
    main()
