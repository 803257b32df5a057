"""A campaign over random graphs of units: which cases are exact, refused, or at fault.

    python -m experiments.fuzz.run                    # all, and the README
    python -m experiments.fuzz.run --seeds 100 200    # some; writes nothing
    python -m experiments.fuzz.run --show 17          # one, in full
    python -m experiments.fuzz.run --shrink 17        # as small as it gets

Cases are drawn and judged by tests/fuzzing, of which the tests run a small part.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.common.machine import Environment
from experiments.common.results import console, write_csv, write_results_block
from experiments.fuzz.report import FAULTS, as_markdown, without_names
from tests.fuzzing.campaign import Court, shrink
from tests.fuzzing.drawing import draw_case
from tests.fuzzing.judge import Judgement, Verdict
from tests.fuzzing.shapes import FuzzCase

HERE = Path(__file__).parent
NUM_CASES = 2400
LONGEST_REASON = 240
BLOCK = 50  # cases that one process judges before it tells


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    seed: int
    world_size: int
    kind: str  # "legal": nothing in it that may be refused; else "other"
    verdict: str
    phase: str  # of the error
    seconds: float
    reason: str
    traits: str


def main() -> None:
    """The campaign, or a look at one case."""
    arguments = _arguments()
    if arguments.show is None and arguments.shrink is None:
        _campaign(arguments.seeds, arguments.to, arguments.jobs)
        return
    court = Court()
    try:
        if arguments.show is not None:
            _show(court, draw_case(arguments.show))
        else:
            _shrink(court, draw_case(arguments.shrink))
    finally:
        court.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--to", type=Path, help="file for the rows of --seeds")
    parser.add_argument("--jobs", type=int, default=2, help="worlds of ranks side by side")
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    return parser.parse_args()


def _campaign(seeds: Sequence[int] | None, path: Path | None, num_jobs: int) -> None:
    environment = Environment.here()
    started_at_s = time.monotonic()
    first, stop = seeds or (0, NUM_CASES)
    blocks = [range(i, min(i + BLOCK, stop)) for i in range(first, stop, BLOCK)]
    rows: list[Row] = []
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_judge_block, block) for block in blocks]):
            rows = sorted([*rows, *done.result()], key=lambda row: row.seed)
            for row in done.result():
                if row.verdict in FAULTS:
                    console.print(f"seed {row.seed}: {row.verdict}: {row.reason}", markup=False)
            minutes = (time.monotonic() - started_at_s) / 60
            console.print(f"{len(rows)} cases, {minutes:.1f} min: {_counts(rows)}")
            if path is not None:
                write_csv(path, rows)
    if seeds is None:
        write_csv(HERE / "results.csv", rows)
        heading = f"{environment.as_markdown()} {minutes:.0f} minutes."
        write_results_block(HERE / "README.md", f"{heading}\n\n{as_markdown(rows)}")


def _judge_block(seeds: Iterable[int]) -> list[Row]:
    torch.set_num_threads(1)
    court = Court()
    try:
        cases = [draw_case(seed) for seed in seeds]
        return [_row(case, *court.judge(case)) for case in cases]
    finally:
        court.close()


def _row(case: FuzzCase, judgement: Judgement, seconds: float) -> Row:
    return Row(
        seed=case.seed,
        world_size=case.world_size,
        kind="other" if case.may_be_refused else "legal",
        verdict=judgement.verdict.value,
        phase=judgement.phase,
        seconds=round(seconds, 2),
        reason=" ".join(judgement.reason.split())[:LONGEST_REASON],
        traits="; ".join(sorted(case.traits())),
    )


def _counts(rows: Iterable[Row]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        name = row.verdict
        if row.kind == "legal" and row.verdict == Verdict.REFUSED.value:
            name = "refused without need"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _show(court: Court, case: FuzzCase) -> None:
    console.print(str(case), markup=False)
    console.print(", ".join(sorted(case.traits())), markup=False)
    judgement, seconds = court.judge(case)
    console.print(
        f"{judgement.verdict.value} in {judgement.phase}, {seconds:.1f} s", markup=False
    )
    console.print(judgement.reason, markup=False)


def _shrink(court: Court, case: FuzzCase) -> None:
    first, _ = court.judge(case)

    def is_same(candidate: FuzzCase) -> bool:
        judgement, _ = court.judge(candidate)
        if judgement.verdict is not first.verdict:
            return False
        if first.verdict is Verdict.WRONG:
            return True
        is_legal = first.is_fault or not candidate.may_be_refused
        return is_legal and without_names(judgement.reason) == without_names(first.reason)

    _show(court, shrink(case, is_same))


if __name__ == "__main__":
    main()
