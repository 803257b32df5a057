"""What does a mixed cluster train under each system, and how much of it is used?

python -m experiments.mixed_cluster.run            about two hours
python -m experiments.mixed_cluster.run --quick    about six minutes
python -m experiments.mixed_cluster.run --only strong
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from experiments.common.launch import run_ranks
from experiments.common.machine import Environment
from experiments.common.results import (
    BAR_HEADER,
    console,
    parse_cases,
    parser_of,
    print_table,
    replace_cases,
    write_results_block,
)
from experiments.common.unlike import slowness_of, why_no_groups
from experiments.mixed_cluster import contest, report
from experiments.mixed_cluster.clusters import CASES, STRONG, Case
from shardhet.profiler.measure import MeasuringEffort

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much to measure."""

    profile: MeasuringEffort
    num_rounds: int  # of all systems in turn
    turn_s: float  # about how long a turn takes, in whole steps


FULL = Extent(profile=MeasuringEffort(time_limit_s=60.0), num_rounds=5, turn_s=3.0)
BRIEF = Extent(profile=MeasuringEffort(time_limit_s=30.0), num_rounds=3, turn_s=2.0)
QUICK = Extent(
    profile=MeasuringEffort(time_limit_s=20.0, num_repeats=4), num_rounds=2, turn_s=1.0
)


def main() -> None:
    """Measure, print, and keep."""
    options = parse_cases(parser_of(__doc__), CASES)
    cases = options.cases
    if options.quick and not options.only:
        cases = [case for case in cases if case.cluster is STRONG]
    environment = Environment.here()
    console.print(environment.as_markdown())
    if (reason := why_no_groups()) is not None:
        sys.exit(reason)
    results = HERE / "results.csv"
    rows: list[report.Row] = []
    for case in cases:
        console.rule(case.name)
        extent = QUICK if options.quick else FULL if case.has_bars else BRIEF
        found = measure(case, extent, environment)
        of_case = report.CaseRows.of(case, found)
        print_table(of_case.title, report.HEADER, of_case.table())
        rows += found
        if not options.quick:  # at once: what comes next may fail
            kept = replace_cases(results, found, report.Row, [case.name for case in CASES])
            write_results_block(HERE / "README.md", report.as_markdown(kept))
    print_table("Bars", BAR_HEADER, [bar.cells for bar in report.bars(rows)])
    if options.quick:
        console.print("Only a little was measured: nothing was written.")


def measure(case: Case, extent: Extent, environment: Environment) -> list[report.Row]:
    """Everything about one case."""
    with slowness_of(case.cluster, has_groups=True) as slownesses:

        def run(fn: Callable[..., Any], *args: Any) -> Any:
            return run_ranks(fn, case.cluster.world_size, case, slownesses, *args)[0]

        plans = run(contest.survey, extent.profile)
        report.show_plans(plans)
        results = report.Results(case, environment, plans)
        results.add(run(contest.take_turns, plans, extent.num_rounds, extent.turn_s))
        num_weighed = case.num_weighed if extent is FULL else 1
        names = list(contest.makers(0, case, slownesses[0], plans))
        for number, name in product(range(num_weighed), names):
            turn = run(contest.train_by_itself, plans, name, 1)
            results.add_peaks(replace(turn, round=number))
    return results.rows


if __name__ == "__main__":
    main()
