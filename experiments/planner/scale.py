"""How far from the optimum, and how long, on large clusters: one thread, 30 seeds a row.

    OMP_NUM_THREADS=1 python -m experiments.planner.scale

Every kind of device has its own speed, latency, memory and optimizer, a curve that is not
straight, and at least 200 candidates: batches in microbatches of 1 to 8, recomputing or not.
In every second seed the state takes 80 to 95 % of all memory, so that memory binds.
Seconds are of the search, with ``time.process_time``: the machine is shared.
"""

import csv
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardhet.planner.problem import Group, Problem
from shardhet.planner.search import Effort, search

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
    # for the figure: time against the number of devices
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


def main() -> None:
    """All cases; the table to the screen, every seed to results.csv."""
    rows = []
    for case in CASES:
        seconds, gaps, num_binding = [], [], 0
        for seed in SEEDS:
            problem = random_case(case, seed)
            fewest = min(len(group.batch) for group in problem.groups)
            assert fewest >= LEAST_CANDIDATES
            start_s = time.process_time()
            found = search(problem, Effort(relative_gap=case.wanted_gap))
            spent_s = time.process_time() - start_s
            free = Problem(problem.groups, problem.global_batch_size, 0.0)
            phases_s = sum(found.value.phases_s)
            binds = (
                sum(search(free, Effort(relative_gap=1e-3)).value.phases_s) < phases_s * 0.99
            )
            num_binding += binds
            seconds.append(spent_s)
            gaps.append(found.relative_gap)
            rows.append(
                [
                    case.num_devices,
                    case.num_kinds,
                    case.global_batch_size,
                    seed,
                    fewest,
                    int(binds),
                    spent_s,
                    found.relative_gap,
                    found.value.objective_s,
                    found.lower_bound_s,
                ]
            )
        is_met = max(gaps) <= case.bar_gap and max(seconds) <= case.bar_s
        print(
            f"{case.num_devices:6} devices {case.num_kinds:4} kinds batch "
            f"{case.global_batch_size:6}: median {np.median(seconds):.3f} s, worst "
            f"{max(seconds):.3f} s (bar {case.bar_s}), worst gap {max(gaps):.1e} (bar "
            f"{case.bar_gap:.0e}), memory binds in {num_binding}/{len(SEEDS)}: "
            f"{'met' if is_met else 'NOT MET'}"
        )
    with (HERE / "scale.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "devices",
                "kinds",
                "batch",
                "seed",
                "fewest_candidates",
                "memory_binds",
                "cpu_s",
                "relative_gap",
                "objective_s",
                "lower_bound_s",
            ]
        )
        writer.writerows(rows)
    print(
        platform.platform(),
        "python",
        sys.version.split()[0],
        "numpy",
        np.__version__,
        "cores",
        os.cpu_count(),
    )


if __name__ == "__main__":
    main()
