"""A device that becomes half as fast: how soon is there a new plan, and how good is it?

python -m experiments.recovery.slow_down.run             three clusters, about ten minutes
python -m experiments.recovery.slow_down.run --quick     one of them; keeps nothing
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.launch import FORKED, run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.recovery.slow_down.ranks import BATCH, Case, Course, measure_case, run_case

HERE = Path(__file__).parent
# Far below what the machine has, so that other programs on it change little.
CASES = (
    Case(name="two alike", speeds=(0.2, 0.2), slowed=1, after=11),
    Case(name="three alike", speeds=(0.16, 0.16, 0.16), slowed=0, after=9),
    Case(name="four unlike", speeds=(0.3, 0.15, 0.15, 0.08), slowed=1, after=13),
)
MOST_STEPS = 10
LEAST_THROUGHPUT = 0.9  # of the fresh plan's
LOSS_ROUNDING = 1e-4  # float32, over all steps
HEADER = [
    "cluster",
    "samples: planned; anew; fresh",
    "new plan after steps",
    "planned and moved, s",
    "ms a step before",
    "slowed",
    "planned anew",
    "fresh plan",
    "throughput of fresh",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case."""

    case: str
    speeds: str
    slowed: int
    samples: str
    found_after: int  # steps; -1: never
    moved_in_s: float
    before_s: float  # medians of steps
    slowed_s: float
    rebalanced_s: float
    fresh_s: float
    throughput_of_fresh: float
    loss_error: float

    @classmethod
    def of(cls, case: Case, course: Course) -> "Row":
        """The medians of a course."""
        medians = {
            name: round(Spread.of(getattr(course, name)).median, 5)
            for name in ("before_s", "slowed_s", "rebalanced_s", "fresh_s")
        }
        return cls(
            case=case.name,
            speeds=" ".join(f"{each:g}" for each in case.speeds),
            slowed=case.slowed,
            samples=course.samples,
            found_after=course.found_after or -1,
            moved_in_s=round(course.moved_in_s, 3),
            **medians,
            throughput_of_fresh=round(medians["fresh_s"] / medians["rebalanced_s"], 4),
            loss_error=course.loss_error,
        )

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        times = (self.before_s, self.slowed_s, self.rebalanced_s, self.fresh_s)
        return [
            f"{self.case} ({self.speeds} of a core; rank {self.slowed} slows down)",
            self.samples,
            str(self.found_after),
            f"{self.moved_in_s:.2f}",
            *(f"{1000 * each:.0f}" for each in times),
            f"{self.throughput_of_fresh:.2f}",
        ]


def report(rows: Sequence[Row], page: Page) -> None:
    """The table and the bars."""
    page.table(f"a global batch of {BATCH} samples", HEADER, [row.cells for row in rows])
    worst = max(row.found_after if row.found_after > 0 else 10**6 for row in rows)
    page.bars(
        [
            Bar(claim="steps until there is a new plan", measured=worst, at_most=MOST_STEPS),
            Bar(
                claim="throughput of the fresh plan's, the least",
                measured=min(row.throughput_of_fresh for row in rows),
                at_least=LEAST_THROUGHPUT,
            ),
            Bar(
                claim="relative difference of a loss from the undisturbed run's, the most",
                measured=max(row.loss_error for row in rows),
                at_most=LOSS_ROUNDING,
            ),
        ]
    )


def main() -> None:
    """Run the cases, show and keep."""
    options = parser_of(__doc__, "one cluster; keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    rows = []
    for case in CASES[:1] if options.quick else CASES:
        size = len(case.speeds)
        settings = [
            run_ranks(measure_case, size, case, is_slowed, context=FORKED)[0]
            for is_slowed in (False, True)
        ]
        courses = run_ranks(run_case, size, case, settings, context=FORKED)
        rows.append(Row.of(case, courses[0]))
        print(rows[-1], flush=True)
    report(rows, page)
    page.keep({"results.csv": rows})


if __name__ == "__main__":
    main()
