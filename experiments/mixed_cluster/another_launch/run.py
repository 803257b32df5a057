"""Is a plan that was made from another launch's profile as good as one from this launch's own?

python -m experiments.mixed_cluster.another_launch.run            about half an hour
python -m experiments.mixed_cluster.another_launch.run --quick    one cluster; keeps nothing
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.launch import run_ranks
from experiments.common.results import (
    Bar,
    Page,
    console,
    parse_cases,
    parser_of,
    read_csv,
)
from experiments.common.unlike import USABLE_FRACTION, Slowness, slowness_of, why_no_groups
from experiments.mixed_cluster import contest
from experiments.mixed_cluster.clusters import CASES, MILD, STRONG, Case
from experiments.mixed_cluster.plans import Planned, demands_of, measured
from shardhet import Plan
from shardhet.planner import solve
from shardhet.planner.preference import TOLERANCE
from shardhet.profiler.measure import Measurement, MeasuringEffort

HERE = Path(__file__).parent
OWN, OTHER = "of its own profile", "of another launch's profile"
EFFORT = MeasuringEffort(time_limit_s=40.0)
NUM_LAUNCHES = 3  # besides the first, whose plan the second is given, and so on
NUM_ROUNDS, TURN_S = 10, 2.0
LEAST_THROUGHPUT = 0.97
HEADER = [
    "cluster",
    "launch",
    "samples: own; other",
    "step ms: own",
    "other",
    "other / own throughput",
    "rounds, lowest to highest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One turn of one plan."""

    case: str
    launch: int
    plan: str  # of whose profile
    samples: str  # of each rank
    shares: str
    predicted_s: float
    round: int
    step_s: float  # of the slowest rank


def planned(case: Case, measurement: Measurement, name: str) -> Planned:
    """The plan that ``shardhet plan measured=...`` makes of a measurement."""
    cluster = replace(measurement.setting.cluster, usable_memory_fraction=USABLE_FRACTION)
    setting = replace(measurement.setting, cluster=cluster)
    demands = demands_of(case, recomputes=False)
    chosen = solve(
        setting,
        global_batch_size=case.work.global_batch_size,
        demands=demands,
        tolerance=TOLERANCE,
    )
    return Planned(
        system=name, plan=chosen.plan, predicted_step_time_s=chosen.predicted.step_time_s
    )


def plan_of_launch(rank: int, case: Case, slownesses: Sequence[Slowness]) -> Planned:
    """What a launch finds out; the same on every rank."""
    with slownesses[rank].applied():
        return planned(case, measured(case, slownesses[rank].device, EFFORT), OWN)


def compare(
    rank: int, case: Case, slownesses: Sequence[Slowness], other: Planned, num_rounds: int
) -> tuple[Planned, list[contest.Turn]]:
    """A launch's own plan, and turns of it and of another's, in the same processes."""
    own = plan_of_launch(rank, case, slownesses)
    plans = [own, replace(other, system=OTHER)]
    turns = contest.take_turns(
        rank, case, slownesses, plans, [OWN, OTHER], num_rounds, TURN_S, beside_plain=False
    )
    return own, turns


def rows_of(case: Case, num_launches: int, num_rounds: int, *, has_groups: bool) -> list[Row]:
    """Each launch beside the plan of the one before it."""
    rows = []
    with slowness_of(case.cluster, has_groups=has_groups) as slownesses:

        def run(fn: Any, *args: Any) -> Any:
            return run_ranks(fn, case.cluster.world_size, case, slownesses, *args)[0]

        before: Planned = run(plan_of_launch)
        for launch in range(1, num_launches + 1):
            own, turns = run(compare, before, num_rounds)
            for turn in turns:
                each = own if turn.system == OWN else before
                assert each.plan is not None
                assert each.predicted_step_time_s is not None
                rows.append(
                    Row(
                        case=case.name,
                        launch=launch,
                        plan=turn.system,
                        samples=_samples(each.plan),
                        shares=" ".join(f"{rank.state_share:.3f}" for rank in each.plan.ranks),
                        predicted_s=each.predicted_step_time_s,
                        round=turn.round,
                        step_s=turn.step_time_s,
                    )
                )
            console.print(_cells(rows, case.name, launch))
            before = own
    return rows


def _samples(plan: Plan) -> str:
    return " ".join(str(rank.rank_batch_size) for rank in plan.ranks)


def _seconds(rows: Sequence[Row], case: str, launch: int, plan: str) -> list[float]:
    return [
        row.step_s for row in rows if (row.case, row.launch, row.plan) == (case, launch, plan)
    ]


def ratios(rows: Sequence[Row], case: str, launch: int) -> list[float]:
    """Throughput of the other launch's plan over that of the own, round by round."""
    own, other = (_seconds(rows, case, launch, plan) for plan in (OWN, OTHER))
    return [a / b for a, b in zip(own, other, strict=True)]


def _cells(rows: Sequence[Row], case: str, launch: int) -> list[str]:
    found = sorted(ratios(rows, case, launch))
    plans = {row.plan: row for row in rows if (row.case, row.launch) == (case, launch)}
    steps = [median(_seconds(rows, case, launch, plan)) for plan in (OWN, OTHER)]
    return [
        case,
        str(launch),
        f"{plans[OWN].samples}; {plans[OTHER].samples}",
        *(f"{1000 * each:.0f}" for each in steps),
        f"{median(found):.3f}",
        f"{found[0]:.2f}-{found[-1]:.2f}",
    ]


def report(rows: Sequence[Row], page: Page) -> None:
    """The table and the bars."""
    launches = list(dict.fromkeys((row.case, row.launch) for row in rows))
    page.table("Plans in turns", HEADER, [_cells(rows, *each) for each in launches])
    page.bars(
        [
            Bar(
                claim=f"{case}: throughput of the own plan's, the least of the launches",
                measured=min(
                    median(ratios(rows, *each)) for each in launches if each[0] == case
                ),
                at_least=LEAST_THROUGHPUT,
            )
            for case in dict.fromkeys(case for case, _ in launches)
        ]
    )


def main() -> None:
    """Every cluster, one launch after the other."""
    all_cases = [case for case in CASES if case.cluster in (STRONG, MILD)]
    options = parse_cases(parser_of(__doc__, "one cluster; keeps nothing"), all_cases)
    page = Page(HERE, is_kept=not options.quick)
    reason = why_no_groups()
    if reason is not None:
        page.tell(f"Emulated in the processes of HetFSDP: {reason}")
    rows: list[Row] = []
    for case in options.cases[:1] if options.quick else options.cases:
        size = (1, 2) if options.quick else (NUM_LAUNCHES, NUM_ROUNDS)
        rows += rows_of(case, *size, has_groups=reason is None)
    path = HERE / "results.csv"
    if path.exists() and not options.quick:
        names = [case.name for case in options.cases]
        rows = [row for row in read_csv(path, Row) if row.case not in names] + rows
    report(rows, page)
    page.keep({path.name: rows})


if __name__ == "__main__":
    main()
