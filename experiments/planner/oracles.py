"""The search beside exhaustive search on 1,100 small problems, and HiGHS on 400 others.

    python -m experiments.planner.oracles

Small: two to four kinds of device, up to six devices, batch up to 24, memory binding in half;
the exhaustive search shares no code with ours, and the objective is computed again from the
integers.  HiGHS alone solves the others (certificate.py).  The tests run a part of both.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.common.results import Spread, console, parser_of, write_csv
from experiments.planner.certificate import certify
from shardhet.planner.search.search import NothingFitsError, search
from tests.planning_problems import SEARCHED, BruteForce, recomputed_objective
from tests.test_planner_highs import random_medium
from tests.test_planner_search import random_small

HERE = Path(__file__).parent
NUM_BLOCKS, PROBLEMS_PER_BLOCK = 11, 100
NUM_MEDIUM = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """One problem that has a plan, beside exhaustive search."""

    block: int
    problem: int
    kinds: int
    devices: int
    batch: int
    objective_s: float
    relative_difference: float
    relative_gap: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One problem, by the search and by HiGHS."""

    problem: int
    num_devices: int
    num_choices: int  # variables of HiGHS that are whole
    search_s: float
    highs_s: float
    search_objective_s: float
    highs_objective_s: float
    highs_is_solved: bool


def small(block: int, i: int, rng: np.random.Generator) -> Small | None:
    """One problem, by both; None where both say that there is no plan."""
    problem, start_s = random_small(rng, i), time.process_time()
    try:
        found = search(problem, SEARCHED)
    except NothingFitsError:
        assert not BruteForce(problem, np.inf).was_reached
        return None
    cpu_s = time.process_time() - start_s
    choices = [(each.group, each.candidate, each.count) for each in found.choices]
    objective = recomputed_objective(problem, choices)
    assert objective is not None
    brute = BruteForce(problem, objective * (1 + 1e-7))
    assert brute.was_reached
    sizes = [group.count for group in problem.groups]
    return Small(
        block=block,
        problem=i,
        kinds=len(sizes),
        devices=sum(sizes),
        batch=problem.global_batch_size,
        objective_s=objective,
        relative_difference=abs(brute.best / objective - 1),
        relative_gap=found.relative_gap,
        cpu_s=cpu_s,
    )


def medium(i: int) -> Comparison:
    """One problem, by both."""
    problem, started_at_s = random_medium(i), time.process_time()
    try:
        objective_s = search(problem, SEARCHED).value.objective_s
    except NothingFitsError:
        objective_s = np.inf
    searched_at_s = time.process_time()
    certified = certify(problem)
    found_s = certified.objective_s
    return Comparison(
        problem=i,
        num_devices=int(problem.counts.sum()),
        num_choices=certified.num_variables,
        search_s=searched_at_s - started_at_s,
        highs_s=time.process_time() - searched_at_s,
        search_objective_s=objective_s,
        highs_objective_s=np.inf if found_s is None else found_s,
        highs_is_solved=certified.is_solved or found_s is None,
    )


def main() -> None:
    """optimality.csv and highs.csv; the worst differences to the screen."""
    options = parser_of(__doc__, "ten of each; keeps nothing").parse_args()
    blocks, number = (1, 10) if options.quick else (NUM_BLOCKS, PROBLEMS_PER_BLOCK)
    found = []
    for block in range(blocks):
        rng = np.random.default_rng(block)
        found += [small(block, i, rng) for i in range(number)]
    rows = [row for row in found if row is not None]
    console.print(
        f"{len(rows)} problems solved, {len(found) - len(rows)} proven impossible; worst "
        f"relative difference {max(row.relative_difference for row in rows):.1e}, worst stated "
        f"gap {max(row.relative_gap for row in rows):.1e}; CPU s "
        f"{Spread.of([row.cpu_s for row in rows]).cell(4)}"
    )
    others = [medium(i) for i in range(10 if options.quick else NUM_MEDIUM)]
    solved = [row for row in others if np.isfinite(row.search_objective_s)]
    worst = max(abs(r.highs_objective_s / r.search_objective_s - 1) for r in solved)
    agree = all(np.isinf(r.highs_objective_s) for r in others if r not in solved)
    console.print(
        f"{len(others)} problems, {len(solved)} with a plan; of the others HiGHS finds none "
        f"either: {agree}; HiGHS ended on {sum(r.highs_is_solved for r in others)}; worst "
        f"relative difference {worst:.1e}; ms of the search "
        f"{Spread.of([r.search_s for r in others]).cell(2, scale=1e3)}, of HiGHS "
        f"{Spread.of([r.highs_s for r in others]).cell(1, scale=1e3)}"
    )
    if not options.quick:
        write_csv(HERE / "optimality.csv", rows)
        write_csv(HERE / "highs.csv", others)


if __name__ == "__main__":
    main()
