"""Does a step take as long as the simulator says, and do ranks wait as it says?

PYTHONPATH=. python experiments/03_predicted_and_measured/run.py            about 25 minutes
PYTHONPATH=. python experiments/03_predicted_and_measured/run.py --quick    about three minutes
PYTHONPATH=. python experiments/03_predicted_and_measured/run.py --only "quota 0.9"
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from cases import CASES, MAX_MICROBATCH_SIZE, Case
from ranks import Comparison, compare

from experiments.common import (
    BAR_HEADER,
    Bar,
    Environment,
    Spread,
    console,
    markdown_table,
    print_table,
    replace_cases,
    run_ranks,
    write_results_block,
)
from experiments.unlike import slowness_of, why_no_groups
from shardhet.profiler.measure import Effort

HERE = Path(__file__).parent
HEADER = [
    "cluster and model",
    "plan",
    "samples of each rank",
    "predicted ms",
    "measured ms (p10-p90)",
    "error",
    "waits predicted",
    "waits measured",
]
PREDICTED, MEASURED = "predicted", "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step, predicted or measured."""

    case: str
    plan: str
    what: str
    round: int
    samples: str  # of each rank
    step_time_s: float
    waits: str  # of each rank, as fractions of the step
    commit: str
    date: str
    load_before: float

    @property
    def wait_fractions(self) -> list[float]:
        """``waits`` as numbers."""
        return [float(each) for each in self.waits.split()]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A prediction beside what was measured."""

    predicted: Row
    steps: Sequence[Row]

    @property
    def measured(self) -> Spread:
        """Seconds of a step."""
        return Spread.of([step.step_time_s for step in self.steps])

    @property
    def measured_waits(self) -> list[float]:
        """Median of each rank."""
        by_rank = zip(*(step.wait_fractions for step in self.steps), strict=True)
        return [Spread.of(of_rank).median for of_rank in by_rank]

    @property
    def error(self) -> float:
        """Of the step time, relative; above zero where the step was faster than predicted."""
        return self.predicted.step_time_s / self.measured.median - 1

    @property
    def wait_error(self) -> float:
        """The largest of any rank, in fractions of the step."""
        pairs = zip(self.predicted.wait_fractions, self.measured_waits, strict=True)
        return max(abs(predicted - measured) for predicted, measured in pairs)

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        return [
            self.predicted.case,
            self.predicted.plan,
            self.predicted.samples.replace(" ", " / "),
            f"{1000 * self.predicted.step_time_s:.0f}",
            self.measured.cell(0, scale=1000),
            f"{self.error:+.1%}",
            _percents(self.predicted.wait_fractions),
            _percents(self.measured_waits),
        ]


def _percents(fractions: Sequence[float]) -> str:
    return " / ".join(f"{each:.0%}" for each in fractions)


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three cases; keeps nothing")
    parser.add_argument(
        "--only",
        metavar="WORDS",
        help="cases whose name has these words; they replace those in results.csv",
    )
    options = parser.parse_args()
    cases = [case for case in CASES if (options.only or "") in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r}: {[case.name for case in CASES]}")
    reason = why_no_groups()
    if reason is not None:
        console.print(f"Cases that are slowed from outside are left out: {reason}")
        cases = [case for case in cases if not case.is_slowed_from_outside]
    if options.quick:
        cases = cases[:: max(1, len(cases) // 3)][:3]
    environment = Environment.here()
    console.print(environment.as_markdown())
    results = HERE / "results.csv"
    if not (options.quick or options.only):
        results.unlink(missing_ok=True)
    rows: list[Row] = []
    for case in cases:
        found = measure_case(case, is_quick=options.quick)
        of_case = rows_of(case, found, environment)
        print_table(case.name, HEADER, [each.cells for each in verdicts_of(of_case)])
        if options.quick:
            rows += of_case
        else:  # at once: what comes next may fail
            rows = replace_cases(results, of_case, Row, [case.name for case in CASES])
    verdicts = verdicts_of(rows)
    bars = bars_of(verdicts)
    print_table("Bars", BAR_HEADER, [bar.cells for bar in bars])
    if options.quick:
        console.print("Only a little was measured: nothing was written.")
        return
    tables = [
        environment.as_markdown(),
        markdown_table(BAR_HEADER, [bar.cells for bar in bars]),
        markdown_table(HEADER, [verdict.cells for verdict in verdicts]),
        when(rows),
    ]
    write_results_block(HERE / "README.md", "\n\n".join(tables))


def when(rows: Sequence[Row]) -> str:
    """Which cases were measured with which commit, and how busy the machine was before."""
    cases_by_run: dict[tuple[str, str, float], list[str]] = {}
    for row in rows:
        cases = cases_by_run.setdefault((row.date, row.commit, row.load_before), [])
        if row.case not in cases:
            cases.append(row.case)
    return "\n".join(
        f"- {date}, commit `{commit}`, load before {load:.2f}: {'; '.join(cases)}"
        for (date, commit, load), cases in cases_by_run.items()
    )


def measure_case(case: Case, *, is_quick: bool) -> Comparison:
    """One launch: the ranks are measured, and train with what follows from it."""
    effort = Effort(
        max_microbatch_size=MAX_MICROBATCH_SIZE,
        time_limit_s=15.0 if is_quick else 30.0,
        num_repeats=5 if is_quick else 12,
    )
    has_groups = case.is_slowed_from_outside
    with slowness_of(case.cluster, has_groups=has_groups) as slownesses:
        found: list[Comparison] = run_ranks(
            compare,
            case.cluster.world_size,
            case,
            slownesses,
            effort,
            5 if is_quick else 10,
        )
    return found[0]


def rows_of(case: Case, found: Comparison, environment: Environment) -> list[Row]:
    """For the file."""
    samples = {
        each.plan_name: " ".join(str(rank.rank_batch_size) for rank in each.plan.ranks)
        for each in found.predictions
    }
    predicted = [(each, PREDICTED, 0) for each in found.predictions]
    measured = [(each, MEASURED, each.round) for each in found.steps]
    return [
        Row(
            case=case.name,
            plan=each.plan_name,
            what=what,
            round=number,
            samples=samples[each.plan_name],
            step_time_s=round(each.step_time_s, 5),
            waits=" ".join(f"{waits:.3f}" for waits in each.waits),
            commit=environment.commit,
            date=environment.date,
            load_before=environment.load_before,
        )
        for each, what, number in (*predicted, *measured)
    ]


def verdicts_of(rows: Sequence[Row]) -> list[Verdict]:
    """One per case and plan."""
    return [
        Verdict(
            predicted,
            [
                row
                for row in rows
                if (row.case, row.plan, row.what) == (predicted.case, predicted.plan, MEASURED)
            ],
        )
        for predicted in rows
        if predicted.what == PREDICTED
    ]


def bars_of(verdicts: Sequence[Verdict]) -> list[Bar]:
    """The claims made before the measurement."""
    errors = [verdict.error for verdict in verdicts]
    spreads = [(v.measured.p90 - v.measured.p10) / v.measured.median for v in verdicts]
    claims = (
        ("step time: mean of the absolute errors", mean(map(abs, errors)), 0.05),
        ("step time: largest absolute error", max(map(abs, errors)), 0.10),
        ("time waited: largest error of any rank", max(v.wait_error for v in verdicts), 0.10),
    )
    bars = [Bar(claim=claim, measured=value, at_most=most) for claim, value, most in claims]
    signs = f"{sum(error > 0 for error in errors)} of {len(errors)} predicted too slow"
    shown = f"mean error {mean(errors):+.3f}, {signs}; p90 - p10 of the steps is"
    return [*bars, Bar(claim=f"(no bar: {shown})", measured=mean(spreads))]


if __name__ == "__main__":
    main()
