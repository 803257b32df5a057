"""The search against exhaustive search on 1,000 random small problems.

    python -m experiments.planner.optimality

Two to four kinds of device, up to six devices, batch up to 24, memory binding in half; the
exhaustive search shares no code with ours, and the objective is computed again from the
integers.  The test suite runs a part of this (tests/test_planner_search.py).
"""

import csv
import time
from pathlib import Path

import numpy as np

from shardhet.planner.search import NothingFitsError, search
from tests.planning_problems import BruteForce, recomputed_objective
from tests.test_planner_search import random_small

HERE = Path(__file__).parent
NUM_BLOCKS, PROBLEMS_PER_BLOCK = 11, 100


def main() -> None:
    """One row per problem; the worst difference to the screen."""
    rows, num_infeasible = [], 0
    for block in range(NUM_BLOCKS):
        rng = np.random.default_rng(block)
        for i in range(PROBLEMS_PER_BLOCK):
            problem = random_small(rng, i)
            start_s = time.process_time()
            try:
                found = search(problem)
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
            difference = abs(brute.best / objective - 1)
            sizes = [group.count for group in problem.groups]
            rows.append(
                [
                    block,
                    i,
                    len(sizes),
                    sum(sizes),
                    problem.global_batch_size,
                    objective,
                    difference,
                    found.relative_gap,
                    spent_s,
                ]
            )
    with (HERE / "optimality.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "block",
                "problem",
                "kinds",
                "devices",
                "batch",
                "objective_s",
                "relative_difference",
                "relative_gap",
                "cpu_s",
            ]
        )
        writer.writerows(rows)
    differences, gaps, seconds = (np.array([row[c] for row in rows]) for c in (6, 7, 8))
    print(
        f"{len(rows)} problems solved, {num_infeasible} proven impossible; worst relative "
        f"difference {differences.max():.1e}, worst stated gap {gaps.max():.1e}; median "
        f"{np.median(seconds):.4f} s, worst {seconds.max():.4f} s"
    )


if __name__ == "__main__":
    main()
