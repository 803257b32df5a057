"""Does a step take as long as the simulator says, and do ranks wait as it says?

python -m experiments.predicted_and_measured.run            about 45 minutes
python -m experiments.predicted_and_measured.run --quick    about three minutes
python -m experiments.predicted_and_measured.run --only "quota 0.9"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from experiments.common.launch import run_ranks
from experiments.common.machine import Environment
from experiments.common.results import (
    Bar,
    Page,
    Spread,
    console,
    parse_cases,
    parser_of,
    print_table,
    replace_cases,
)
from experiments.common.unlike import slowness_of, why_no_groups
from experiments.predicted_and_measured.cases import CASES, MAX_MICROBATCH_SIZE, Case
from experiments.predicted_and_measured.ranks import Extent, Sitting, sit
from shardhet.profiler.measure import MeasuringEffort

HERE = Path(__file__).parent
HEADER = [
    "cluster and model",
    "plan",
    "samples of each rank",
    "predicted ms, each launch",
    "measured ms (p10-p90)",
    "error",
    "waits predicted",
    "waits measured",
]
PREDICTED, MEASURED = "predicted", "measured"
FULL = Extent(
    effort=MeasuringEffort(
        max_microbatch_size=MAX_MICROBATCH_SIZE, time_limit_s=30.0, num_repeats=12
    ),
    num_sittings=2,
    num_steps=3,
)
QUICK = Extent(
    effort=MeasuringEffort(
        max_microbatch_size=MAX_MICROBATCH_SIZE, time_limit_s=15.0, num_repeats=5
    ),
    num_sittings=1,
    num_steps=4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step, predicted or measured."""

    case: str
    plan: str
    what: str
    sitting: int
    samples: str  # of each rank
    step_time_s: float
    waits: str  # of each rank, as fractions of the step
    cpu: str  # of the machine
    commit: str
    date: str
    load_before: float

    @property
    def wait_fractions(self) -> list[float]:
        """``waits`` as numbers."""
        return [float(each) for each in self.waits.split()]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was predicted, with the profile of each sitting, beside what was measured."""

    predictions: list[Row]
    steps: list[Row]

    @property
    def predicted_s(self) -> float:
        """Seconds of a step, mean of the sittings."""
        return mean(row.step_time_s for row in self.predictions)

    @property
    def measured(self) -> Spread:
        """Seconds of a step."""
        return Spread.of([step.step_time_s for step in self.steps])

    @property
    def error(self) -> float:
        """Of the step time, relative; above zero where the step was faster than predicted."""
        return self.predicted_s / self.measured.median - 1

    @property
    def first_error(self) -> float:
        """As ``error``, of the first profile alone, which the plans were made from."""
        return self.predictions[0].step_time_s / self.measured.median - 1

    @property
    def wait_error(self) -> float:
        """The largest of any rank, in fractions of the step."""
        pairs = zip(_waits(self.predictions), _waits(self.steps), strict=True)
        return max(abs(predicted - measured) for predicted, measured in pairs)

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        first = self.predictions[0]
        each = " ".join(f"{1000 * row.step_time_s:.0f}" for row in self.predictions)
        return [
            first.case,
            first.plan,
            first.samples.replace(" ", " / "),
            each,
            self.measured.cell(0, scale=1000),
            f"{self.error:+.1%}",
            _percents(_waits(self.predictions)),
            _percents(_waits(self.steps)),
        ]


def _waits(rows: Sequence[Row]) -> list[float]:
    """Median of each rank."""
    by_rank = zip(*(row.wait_fractions for row in rows), strict=True)
    return [Spread.of(of_rank).median for of_rank in by_rank]


def _percents(fractions: Sequence[float]) -> str:
    return " / ".join(f"{each:.0%}" for each in fractions)


def main() -> None:
    """Measure, print, and keep."""
    options = parse_cases(parser_of(__doc__, "three cases; keeps nothing"), CASES)
    cases = options.cases
    reason = why_no_groups()
    if reason is not None:
        console.print(f"Cases that are slowed from outside are left out: {reason}")
        cases = [case for case in cases if not case.is_slowed_from_outside]
    if options.quick:
        cases = cases[:: max(1, len(cases) // 3)][:3]
    page = Page(HERE, is_kept=not options.quick)
    results = HERE / "results.csv"
    if not (options.quick or options.only):
        results.unlink(missing_ok=True)
    rows: list[Row] = []
    for case in cases:
        found = measure_case(case, QUICK if options.quick else FULL)
        of_case = rows_of(case, found, page.environment)
        print_table(case.name, HEADER, [each.cells for each in verdicts_of(of_case)])
        if options.quick:
            rows += of_case
        else:  # at once: what comes next may fail
            rows = replace_cases(results, of_case, Row, [case.name for case in CASES])
    verdicts = verdicts_of(rows)
    page.bars(bars_of(verdicts))
    page.table("Steps", HEADER, [verdict.cells for verdict in verdicts])
    page.tell(when(rows))
    page.keep({})


def when(rows: Sequence[Row]) -> str:
    """Which cases were measured where, with which commit, and how busy it was before."""
    cases_by_run: dict[str, list[str]] = {}
    for row in rows:
        run = f"{row.date}, commit `{row.commit}`, {row.cpu}, load before {row.load_before:.2f}"
        cases = cases_by_run.setdefault(run, [])
        if row.case not in cases:
            cases.append(row.case)
    return "\n".join(f"- {run}: {'; '.join(cases)}" for run, cases in cases_by_run.items())


def measure_case(case: Case, extent: Extent) -> list[Sitting]:
    """Launches, in each of which the ranks are measured and train with the same plans."""
    sittings: list[Sitting] = []
    with slowness_of(case.cluster, has_groups=case.is_slowed_from_outside) as slownesses:
        for number in range(extent.num_sittings):
            plans = sittings[0].plans if sittings else {}
            world_size = case.cluster.world_size
            sittings += run_ranks(sit, world_size, case, slownesses, extent, number, plans)[:1]
    return sittings


def rows_of(case: Case, found: Sequence[Sitting], environment: Environment) -> list[Row]:
    """For the file."""
    samples = {
        name: " ".join(str(rank.rank_batch_size) for rank in plan.ranks)
        for name, plan in found[0].plans.items()
    }
    predicted = [(each, PREDICTED) for sitting in found for each in sitting.predictions]
    measured = [(each, MEASURED) for sitting in found for each in sitting.steps]
    return [
        Row(
            case=case.name,
            plan=each.plan_name,
            what=what,
            sitting=each.sitting,
            samples=samples[each.plan_name],
            step_time_s=round(each.step_time_s, 5),
            waits=" ".join(f"{waits:.3f}" for waits in each.waits),
            **environment.stamp,
        )
        for each, what in (*predicted, *measured)
    ]


def verdicts_of(rows: Sequence[Row]) -> list[Verdict]:
    """One per case and plan."""
    found: dict[tuple[str, str], Verdict] = {}
    for row in rows:
        verdict = found.setdefault((row.case, row.plan), Verdict([], []))
        (verdict.predictions if row.what == PREDICTED else verdict.steps).append(row)
    return list(found.values())


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
    firsts = [abs(verdict.first_error) for verdict in verdicts]
    shown = (
        (f"mean error, {signs}", mean(errors)),
        ("p90 - p10 of the steps, mean", mean(spreads)),
        ("largest / smallest of a plan's predictions - 1, mean", mean(map(_range, verdicts))),
        ("first profile alone: mean of the absolute errors", mean(firsts)),
        ("first profile alone: largest absolute error", max(firsts)),
    )
    return [*bars, *(Bar(claim=f"(no bar: {what})", measured=value) for what, value in shown)]


def _range(verdict: Verdict) -> float:
    seconds = [row.step_time_s for row in verdict.predictions]
    return max(seconds) / min(seconds) - 1


if __name__ == "__main__":
    main()
