"""Does a process grow from step to step?

python -m experiments.long_runs.run            about 6 minutes
python -m experiments.long_runs.run --quick    one minute, and writes nothing
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Page, parser_of
from experiments.long_runs.loops import NUM_RANKS, PLAIN, PLAN_BY_CASE, Sample, train

HERE = Path(__file__).parent
NUM_STEPS, EVERY = 5000, 500  # the first look comes after buffers and caches are made
QUICK_STEPS, QUICK_EVERY = 500, 100
MOST_GROWTH_MIB = 1.0
HEADER = ["case, largest growth of a rank", "resident KiB", "objects", "files", "steps"]


def main() -> None:
    """Train, print, and keep."""
    options = parser_of(__doc__).parse_args()
    page = Page(HERE, is_kept=not options.quick)
    steps = (QUICK_STEPS, QUICK_EVERY) if options.quick else (NUM_STEPS, EVERY)
    samples = []
    for case in PLAN_BY_CASE:
        samples += run_ranks(train, 1 if case == PLAIN else NUM_RANKS, case, *steps)[0]
    rows = [cells(samples, case) for case in PLAN_BY_CASE]
    page.table("From the first look to the last", HEADER, rows)
    page.bars([bar_of(samples, case) for case in PLAN_BY_CASE])
    page.keep({"results.csv": samples})


def growth(samples: Sequence[Sample], case: str, name: str) -> int:
    """Of the rank of ``case`` that grows most, from its first look to its last."""
    ranks = {s.rank for s in samples if s.case == case}
    of_ranks = (
        [getattr(s, name) for s in samples if (s.case, s.rank) == (case, rank)]
        for rank in ranks
    )
    return max(values[-1] - values[0] for values in of_ranks)


def cells(samples: Sequence[Sample], case: str) -> list[str]:
    """A row of the table."""
    steps = [s.step for s in samples if s.case == case]
    grown = [growth(samples, case, n) for n in ("resident_bytes", "num_objects", "num_files")]
    return [case, f"{grown[0] / 2**10:.0f}", *map(str, grown[1:]), f"{steps[0]}-{steps[-1]}"]


def bar_of(samples: Sequence[Sample], case: str) -> Bar:
    """That it does not grow."""
    return Bar(
        claim=f"{case}: MiB that a rank grows",
        measured=growth(samples, case, "resident_bytes") / 2**20,
        at_most=MOST_GROWTH_MIB,
    )


if __name__ == "__main__":
    main()
