"""What do the trainer, its display, metrics and data cost, against a bare loop?

python -m experiments.trainer_overhead.run            about 6 minutes
python -m experiments.trainer_overhead.run --quick    one minute
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.common.systems import Rounds
from experiments.trainer_overhead.loops import (
    BARE,
    OVERRIDES_BY_SETTING,
    TRAIN,
    StepSample,
    measure,
    write_config,
)

HERE = Path(__file__).parent
ROUNDS = Rounds(num_rounds=20, num_steps=40)
QUICK_ROUNDS = Rounds(num_rounds=4, num_steps=10)
MOST_OVERHEAD = 1.01  # step time of shardhet train over the bare loop's
HEADER = ["loop", "step ms (p10-p90)", "n", "step time / bare"]
ROUND_HEADER = ["step time / bare, per round", "p10", "p90", "n"]


def main() -> None:
    """Measure, print, and keep."""
    options = parser_of(__doc__).parse_args()
    page = Page(HERE, is_kept=not options.quick)
    steps: list[StepSample] = []
    bars = []
    for setting in OVERRIDES_BY_SETTING:
        found = measure_setting(setting, QUICK_ROUNDS if options.quick else ROUNDS)
        ratios = ratio_by_round(found)
        page.table(f"Steps, {setting}", HEADER, loop_rows(found))
        page.table("Medians of one round", ROUND_HEADER, [ratio_cells(ratios)])
        bars.append(overhead_bar(setting, ratios))
        steps += found
    page.bars(bars)
    page.keep({"results.csv": steps})


def measure_setting(setting: str, rounds: Rounds) -> list[StepSample]:
    """Both loops in turn, in one launch."""
    with TemporaryDirectory() as folder:
        num_ranks = write_config(Path(folder), setting)
        return run_ranks(measure, num_ranks, folder, setting, rounds)[0]


def overhead_bar(setting: str, ratios: Spread) -> Bar:
    """The median over rounds."""
    return Bar(
        claim=f"{setting}: step time, shardhet train / bare loop",
        measured=ratios.median,
        at_most=MOST_OVERHEAD,
    )


def ratio_by_round(steps: Sequence[StepSample]) -> Spread:
    """Median step time over the bare loop's, round by round: neighbours in time."""
    rounds = sorted({step.round for step in steps})
    return Spread.of(
        [median_s(steps, TRAIN, turn) / median_s(steps, BARE, turn) for turn in rounds]
    )


def median_s(steps: Sequence[StepSample], loop: str, turn: int) -> float:
    """Of one loop's steps in one round."""
    return Spread.of(
        [s.slowest_rank_s for s in steps if s.loop == loop and s.round == turn]
    ).median


def loop_rows(steps: Sequence[StepSample]) -> list[list[str]]:
    """One row per loop."""
    spreads = {
        loop: Spread.of([s.slowest_rank_s for s in steps if s.loop == loop])
        for loop in (TRAIN, BARE)
    }
    return [
        [
            loop,
            each.cell(1, scale=1000),
            str(each.n),
            f"{each.median / spreads[BARE].median:.3f}",
        ]
        for loop, each in spreads.items()
    ]


def ratio_cells(ratios: Spread) -> list[str]:
    """A row for the ratios of all rounds."""
    return [f"{ratios.median:.3f}", f"{ratios.p10:.3f}", f"{ratios.p90:.3f}", str(ratios.n)]


if __name__ == "__main__":
    main()
