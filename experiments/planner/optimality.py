"""The search against exhaustive search on 1,000 random small problems.

    python -m experiments.planner.optimality

Two to four kinds of device, up to six devices, batch up to 24, memory binding in half; the
exhaustive search shares no code with ours, and the objective is computed again from the
integers.  The test suite runs a part of this (tests/test_planner_search.py).
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.common.results import write_csv
from shardhet.planner.search.search import NothingFitsError, search
from tests.planning_problems import SEARCHED, BruteForce, recomputed_objective
from tests.test_planner_search import random_small

HERE = Path(__file__).parent
NUM_BLOCKS, PROBLEMS_PER_BLOCK = 11, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem that has a plan."""

    block: int
    problem: int
    kinds: int
    devices: int
    batch: int
    objective_s: float
    relative_difference: float
    relative_gap: float
    cpu_s: float


def main() -> None:
    """One row per problem; the worst difference to the screen."""
    rows, num_infeasible = [], 0
    for block in range(NUM_BLOCKS):
        rng = np.random.default_rng(block)
        for i in range(PROBLEMS_PER_BLOCK):
            problem = random_small(rng, i)
            start_s = time.process_time()
            try:
                found = search(problem, SEARCHED)
            except NothingFitsError:
                assert not BruteForce(problem, np.inf).was_reached
                num_infeasible += 1
                continue
            spent_s = time.process_time() - start_s
            choices = [(each.group, each.candidate, each.count) for each in found.choices]
            objective = recomputed_objective(problem, choices)
            assert objective is not None
            brute = BruteForce(problem, objective * (1 + 1e-7))
            assert brute.was_reached
            sizes = [group.count for group in problem.groups]
            rows.append(
                Row(
                    block=block,
                    problem=i,
                    kinds=len(sizes),
                    devices=sum(sizes),
                    batch=problem.global_batch_size,
                    objective_s=objective,
                    relative_difference=abs(brute.best / objective - 1),
                    relative_gap=found.relative_gap,
                    cpu_s=spent_s,
                )
            )
    write_csv(HERE / "optimality.csv", rows)
    seconds = [row.cpu_s for row in rows]
    print(
        f"{len(rows)} problems solved, {num_infeasible} proven impossible; worst relative "
        f"difference {max(row.relative_difference for row in rows):.1e}, worst stated gap "
        f"{max(row.relative_gap for row in rows):.1e}; median "
        f"{np.median(seconds):.4f} s, worst {max(seconds):.4f} s"
    )


if __name__ == "__main__":
    main()
