"""With nothing uneven, is HetFSDP as fast and as lean as what stock PyTorch offers?

python -m experiments.even_against_fsdp2.run            about 6 minutes
python -m experiments.even_against_fsdp2.run --quick    one or two minutes
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.common.systems import Rounds
from experiments.even_against_fsdp2.memory import (
    NUM_RANKS,
    STATE_MIB,
    SYSTEMS,
    MemorySample,
    measure_memory,
)
from experiments.even_against_fsdp2.speed import Contest, StepSample, measure_speed

HERE = Path(__file__).parent
LONG = Rounds(num_rounds=6, num_steps=5)
OF_LONG_STEPS = Rounds(num_rounds=4, num_steps=4)
SHORT = Rounds(num_rounds=4, num_steps=3)
CONTESTS = (
    Contest(num_ranks=2, rank_batch_size=8, microbatch_sizes=(8,), rounds=LONG),
    Contest(num_ranks=2, rank_batch_size=32, microbatch_sizes=(32, 8), rounds=OF_LONG_STEPS),
    Contest(num_ranks=1, rank_batch_size=8, microbatch_sizes=(8,), rounds=LONG),
    Contest(num_ranks=1, rank_batch_size=32, microbatch_sizes=(32,), rounds=OF_LONG_STEPS),
)
QUICK_CONTESTS = tuple(
    Contest(num_ranks=n, rank_batch_size=8, microbatch_sizes=(8,), rounds=SHORT) for n in (2, 1)
)
NUM_LAUNCHES = 3
LEAST_SPEEDUPS = {(2, 8): 1.10, (2, 32): 1.03, (1, 8): 0.97, (1, 32): 0.97}
SPEED_HEADER = ["system", "tokens/s", "step ms (p10-p90)", "n", "speed / opponent's"]
MEMORY_HEADER = ["system", "peak MiB (p10-p90)", "of the steps alone", "n"]


def main() -> None:
    """Measure, print, and keep."""
    options = parser_of(__doc__).parse_args()
    page = Page(HERE, is_kept=not options.quick)
    steps: list[StepSample] = []
    bars = []
    for contest in QUICK_CONTESTS if options.quick else CONTESTS:
        steps += run_ranks(measure_speed, contest.num_ranks, contest)[0]
        page.table(contest.title, SPEED_HEADER, speed_rows(contest, steps))
        bars.append(speed_bar(contest, steps))
    peaks = measure_peaks(1 if options.quick else NUM_LAUNCHES)
    title = f"Resident memory of a rank, 2 ranks, model state {STATE_MIB:.0f} MiB in all"
    page.table(title, MEMORY_HEADER, memory_rows(peaks))
    bars += memory_bars(peaks)
    page.bars(bars)
    page.keep({"results.csv": steps, "memory.csv": peaks})


def measure_peaks(num_launches: int) -> list[MemorySample]:
    """Both systems in turn, each in fresh processes."""
    return [
        sample
        for launch in range(num_launches)
        for system in SYSTEMS
        for sample in run_ranks(measure_memory, NUM_RANKS, system, launch)
    ]


def speed_rows(contest: Contest, steps: Sequence[StepSample]) -> list[list[str]]:
    """One row per system of ``contest``."""
    over_gloo = [contest.over_gloo] * (contest.num_ranks > 1)
    sizes = contest.microbatch_sizes
    names = [*map(contest.system_name, sizes), *over_gloo, contest.opponent]
    opponent = step_spread(contest, contest.opponent, steps)
    rows = []
    for name in names:
        spread = step_spread(contest, name, steps)
        rows.append(
            [
                name,
                f"{contest.tokens_per_step / spread.median:.0f}",
                spread.cell(0, scale=1000),
                str(spread.n),
                f"{opponent.median / spread.median:.3f}",
            ]
        )
    return rows


def speed_bar(contest: Contest, steps: Sequence[StepSample]) -> Bar:
    """Tokens per second with one microbatch, against the opponent's."""
    ours = step_spread(contest, contest.system_name(contest.microbatch_sizes[0]), steps)
    theirs = step_spread(contest, contest.opponent, steps)
    return Bar(
        claim=f"{contest.title}: tokens/s, HetFSDP / {contest.opponent}",
        measured=theirs.median / ours.median,
        at_least=LEAST_SPEEDUPS[contest.num_ranks, contest.rank_batch_size],
    )


def step_spread(contest: Contest, system: str, steps: Sequence[StepSample]) -> Spread:
    """Of one system's steps in ``contest``."""
    key = (contest.num_ranks, contest.rank_batch_size, system)
    return Spread.of(
        [s.slowest_rank_s for s in steps if (s.num_ranks, s.rank_batch_size, s.system) == key]
    )


def memory_rows(peaks: Sequence[MemorySample]) -> list[list[str]]:
    """One row per system; samples are ranks of launches."""
    rows = []
    for system in SYSTEMS:
        peak = Spread.of([s.peak_mib for s in peaks if s.system == system])
        steps = Spread.of([s.steps_peak_mib for s in peaks if s.system == system])
        rows.append([system, peak.cell(0), steps.cell(0), str(peak.n)])
    return rows


def memory_bars(peaks: Sequence[MemorySample]) -> list[Bar]:
    """Peaks above the level after ``init_process_group``, of everything and of the steps."""

    def ratio(attribute: str) -> float:
        ours, theirs = (
            Spread.of([getattr(s, attribute) for s in peaks if s.system == system]).median
            for system in SYSTEMS
        )
        return ours / theirs

    return [
        Bar(claim=f"{what}: HetFSDP / FSDP2", measured=ratio(attribute), at_most=1.0)
        for what, attribute in (
            ("peak resident memory", "peak_mib"),
            ("peak resident memory of the steps", "steps_peak_mib"),
        )
    ]


if __name__ == "__main__":
    main()
