"""Does HiGHS alone find what the search finds, and how long does each take?

Writes highs.csv (400 problems, none of those that are compared with exhaustive search) and
assignment.csv (the last word of HiGHS within the limits found, on large problems).
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.common.results import Spread, console, write_csv
from shardhet.planner.certificate import certify
from shardhet.planner.search.assignment import assign
from shardhet.planner.search.search import Effort, NothingFitsError, search
from tests.planning_problems import random_problem
from tests.test_planner_highs import random_medium

HERE = Path(__file__).parent
NUM_PROBLEMS = 400
SIZES = ((64, 3, 128), (256, 8, 512), (1024, 8, 2048))  # devices, kinds, batch
SEEDS_PER_SIZE = 10


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """HiGHS within the limits of a search."""

    num_devices: int
    num_kinds: int
    seed: int
    num_variables: int
    search_s: float
    highs_s: float
    is_by_highs: bool
    compute_after_before: float


def compare() -> list[Comparison]:
    """Both on every problem."""
    rows = []
    for i in range(NUM_PROBLEMS):
        problem = random_medium(i)
        started_at_s = time.process_time()
        try:
            objective_s = search(problem).value.objective_s
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


def last_words() -> list[LastWord]:
    """HiGHS's assignment of large problems."""
    rows = []
    for num_devices, num_kinds, batch in SIZES:
        for seed in range(SEEDS_PER_SIZE):
            problem = random_problem(
                np.random.default_rng([seed, num_devices]),
                num_groups=num_kinds,
                num_devices=num_devices,
                global_batch_size=batch,
                memory_binds=seed % 2 == 0,
            )
            started_at_s = time.process_time()
            found = search(problem, Effort(relative_gap=1e-4))
            searched_at_s = time.process_time()
            assigned = assign(problem, found.choices, found.value)
            ended_at_s = time.process_time()
            total_s = np.sum(problem.costs, axis=0)
            before, after = (
                sum(c.count * total_s[c.group, c.candidate] for c in choices)
                for choices in (found.choices, assigned.choices)
            )
            rows.append(
                LastWord(
                    num_devices=num_devices,
                    num_kinds=num_kinds,
                    seed=seed,
                    num_variables=assigned.num_variables,
                    search_s=searched_at_s - started_at_s,
                    highs_s=ended_at_s - searched_at_s,
                    is_by_highs=assigned.is_by_highs,
                    compute_after_before=float(after / before),
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
    words = last_words()
    write_csv(HERE / "assignment.csv", words)
    for num_devices, num_kinds, batch in SIZES:
        of_size = [word for word in words if word.num_devices == num_devices]
        console.print(
            f"{num_devices} devices of {num_kinds} kinds, batch {batch}: HiGHS chose "
            f"{sum(w.is_by_highs for w in of_size)} of {len(of_size)}, variables "
            f"{max(w.num_variables for w in of_size)}, search "
            f"{Spread.of([w.search_s for w in of_size]).cell(0, scale=1e3)} ms, HiGHS "
            f"{Spread.of([w.highs_s for w in of_size]).cell(0, scale=1e3)} ms, worst "
            f"{max(w.highs_s for w in of_size):.2f} s; compute "
            f"{Spread.of([w.compute_after_before for w in of_size]).cell(3)} of the search's"
        )


if __name__ == "__main__":
    main()
