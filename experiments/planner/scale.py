"""How far from the optimum, and how long, on large clusters: one thread, 30 seeds a row.

    OMP_NUM_THREADS=1 python -m experiments.planner.scale

Every kind of device has its own speed, latency, memory and optimizer, a curve that is not
straight, and at least 200 candidates: batches in microbatches of 1 to 8, recomputing or not.
In every second seed the state takes 80 to 95 % of all memory, so that memory binds.
Seconds are of the search, with ``time.process_time``: the machine is shared.
"""

import csv
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from experiments.common.figure import draw_lines
from experiments.common.machine import Environment
from experiments.common.results import parser_of, write_csv
from shardhet.planner.problem.problem import Group, Problem
from shardhet.planner.search.search import Effort, search

HERE = Path(__file__).parent
SEEDS = range(30)
LARGEST_MICROBATCH = 8
LEAST_CANDIDATES = 200


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    num_devices: int
    num_kinds: int
    global_batch_size: int
    wanted_gap: float  # the search stops once this is proven
    bar_gap: float
    bar_s: float


CASES = (
    Case(64, 3, 512, 0.0, 1e-9, 0.3),
    Case(1024, 8, 8192, 1e-4, 1e-3, 2.0),
    Case(16384, 8, 65536, 1e-4, 1e-3, 10.0),
    Case(256, 256, 2048, 2e-3, 5e-3, 10.0),
    # for scale.png: time against the number of devices
    Case(256, 8, 2048, 1e-4, 1e-3, 2.0),
    Case(4096, 8, 32768, 1e-4, 1e-3, 10.0),
)


def random_case(case: Case, seed: int) -> Problem:
    """Kinds as numerous as chance has it; memory binds in even seeds."""
    rng = np.random.default_rng(seed)
    extra = case.num_devices - case.num_kinds
    counts = rng.multinomial(extra, np.full(case.num_kinds, 1 / case.num_kinds)) + 1
    slowness = np.exp(rng.normal(0, 0.6, case.num_kinds))
    rate = float((counts / slowness).sum())
    groups, capacity = [], 0.0
    for count, slow in zip(counts, slowness, strict=True):
        fair = case.global_batch_size / rate / slow
        group, memory = random_group(rng, int(count), slow, fair, case.global_batch_size)
        groups.append(group)
        capacity += count * memory
    part = rng.uniform(0.8, 0.95) if seed % 2 == 0 else rng.uniform(0.02, 0.2)
    return Problem(tuple(groups), case.global_batch_size, capacity * part)


def random_group(
    rng: np.random.Generator, count: int, slow: float, fair: float, largest_batch: int
) -> tuple[Group, float]:
    """One kind of device whose fair part of the batch is ``fair``, and its memory."""
    sizes = np.arange(LARGEST_MICROBATCH + 1)
    noise = 1 + 0.03 * rng.normal(size=len(sizes))
    forward = np.maximum.accumulate(slow * (sizes + rng.uniform(0, 0.6)) * noise)
    forward[0] = 0.0
    backward = forward * rng.uniform(1.7, 2.3)
    memory = rng.uniform(12, 80)
    per_sample = rng.uniform(0.3, 1) * 30 / max(fair, 4)
    last = min(largest_batch, int(3 * fair) + 24)
    while True:
        b, m, r = np.meshgrid(np.arange(last + 1), sizes[1:], [0, 1], indexing="ij")
        used = per_sample * (0.05 * b + np.where(r, np.minimum(m, b), b))
        is_idle = (b == 0) & (m == 1) & (r == 1)
        kept = (used <= memory) & ((m <= b) | is_idle)
        if kept.sum() >= LEAST_CANDIDATES or last >= largest_batch:
            break
        per_sample *= 0.8
    b, m, r, used = b[kept], m[kept], r[kept], used[kept]
    f = b // m * forward[m] + forward[b % m]
    costs = np.stack([f, b // m * backward[m] + backward[b % m] + r * f])
    optimizer = float(rng.uniform(1e-4, 1e-3) * slow)
    return Group(count, b, costs, memory - used, optimizer).sorted()[0], memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One seed of a case."""

    devices: int
    kinds: int
    batch: int
    seed: int
    fewest_candidates: int
    memory_binds: int
    cpu_s: float
    relative_gap: float
    objective_s: float
    lower_bound_s: float


def run(case: Case, seed: int) -> Row:
    """Search, and search once more with memory enough for anything."""
    problem = random_case(case, seed)
    fewest = min(len(group.batch) for group in problem.groups)
    assert fewest >= LEAST_CANDIDATES
    start_s = time.process_time()
    found = search(problem, Effort(relative_gap=case.wanted_gap))
    cpu_s = time.process_time() - start_s
    free = search(
        Problem(problem.groups, problem.global_batch_size, 0.0), Effort(relative_gap=1e-3)
    )
    return Row(
        devices=case.num_devices,
        kinds=case.num_kinds,
        batch=case.global_batch_size,
        seed=seed,
        fewest_candidates=fewest,
        memory_binds=int(sum(free.value.phases_s) < sum(found.value.phases_s) * 0.99),
        cpu_s=cpu_s,
        relative_gap=found.relative_gap,
        objective_s=found.value.objective_s,
        lower_bound_s=found.lower_bound_s,
    )


def points(name: str, **wanted: str) -> list[tuple[float, float]]:
    """Median CPU seconds by number of devices, of the rows that have the wanted values."""
    by_devices: dict[int, list[float]] = {}
    with (HERE / name).open(newline="") as file:
        for row in csv.DictReader(file):
            if all(row[key] == value for key, value in wanted.items()):
                by_devices.setdefault(int(row["devices"]), []).append(float(row["cpu_s"]))
    return [(devices, median(values)) for devices, values in sorted(by_devices.items())]


def main() -> None:
    """All cases; the table to the screen, every seed to scale.csv, and scale.png."""
    options = parser_of(__doc__, "two seeds of the first case; keeps nothing").parse_args()
    rows = []
    for case in CASES[:1] if options.quick else CASES:
        of_case = [run(case, seed) for seed in (SEEDS[:2] if options.quick else SEEDS)]
        rows += of_case
        seconds, gap = [row.cpu_s for row in of_case], max(row.relative_gap for row in of_case)
        is_met = gap <= case.bar_gap and max(seconds) <= case.bar_s
        print(
            f"{case.num_devices:6} devices {case.num_kinds:4} kinds batch "
            f"{case.global_batch_size:6}: median {np.median(seconds):.3f} s, worst "
            f"{max(seconds):.3f} s (bar {case.bar_s}), worst gap {gap:.1e} (bar "
            f"{case.bar_gap:.0e}), memory binds in {sum(row.memory_binds for row in of_case)}/"
            f"{len(of_case)}: {'met' if is_met else 'NOT MET'}"
        )
    if options.quick:
        return
    write_csv(HERE / "scale.csv", rows)
    lines = {
        "shardhet plan, everything on": points("shell.csv", is_everything="True"),
        "the search alone, 8 kinds": points("scale.csv", kinds="8"),
    }
    draw_lines(lines, HERE / "scale.png", x_label="devices", y_label="CPU seconds, median")
    print(Environment.here().as_markdown(f"numpy {np.__version__}"))


if __name__ == "__main__":
    main()
