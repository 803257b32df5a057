"""Does HiGHS alone find what the search finds, and how long does each take?

Writes highs.csv (400 problems, none of those that are compared with exhaustive search).
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.common.results import Spread, console, write_csv
from experiments.planner.certificate import certify
from shardhet.planner.search.search import NothingFitsError, search
from tests.planning_problems import SEARCHED
from tests.test_planner_highs import random_medium

HERE = Path(__file__).parent
NUM_PROBLEMS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One problem, by both."""

    problem: int
    num_devices: int
    num_choices: int  # variables of HiGHS that are whole
    search_s: float
    highs_s: float
    search_objective_s: float
    highs_objective_s: float
    highs_is_solved: bool


def compare() -> list[Comparison]:
    """Both on every problem."""
    rows = []
    for i in range(NUM_PROBLEMS):
        problem = random_medium(i)
        started_at_s = time.process_time()
        try:
            objective_s = search(problem, SEARCHED).value.objective_s
        except NothingFitsError:
            objective_s = np.inf
        searched_at_s = time.process_time()
        certified = certify(problem)
        ended_at_s = time.process_time()
        found_s = certified.objective_s
        rows.append(
            Comparison(
                problem=i,
                num_devices=int(problem.counts.sum()),
                num_choices=certified.num_variables,
                search_s=searched_at_s - started_at_s,
                highs_s=ended_at_s - searched_at_s,
                search_objective_s=objective_s,
                highs_objective_s=np.inf if found_s is None else found_s,
                highs_is_solved=certified.is_solved or found_s is None,
            )
        )
    return rows


def main() -> None:
    """Run, print and keep."""
    rows = compare()
    write_csv(HERE / "highs.csv", rows)
    solved = [row for row in rows if np.isfinite(row.search_objective_s)]
    worst = max(abs(r.highs_objective_s / r.search_objective_s - 1) for r in solved)
    none = [r for r in rows if r not in solved]
    agree = all(np.isinf(r.highs_objective_s) for r in none)
    searched, certified = ([r.search_s for r in rows], [r.highs_s for r in rows])
    console.print(
        f"{len(rows)} problems, {len(solved)} with a plan; of the others HiGHS finds none "
        f"either: {agree}; HiGHS ended on {sum(r.highs_is_solved for r in rows)}; worst "
        f"relative difference {worst:.1e}; search {Spread.of(searched).cell(2, scale=1e3)} ms, "
        f"HiGHS {Spread.of(certified).cell(1, scale=1e3)} ms, worst {max(certified):.2f} s, "
        f"most choices {max(r.num_choices for r in rows)}"
    )


if __name__ == "__main__":
    main()
