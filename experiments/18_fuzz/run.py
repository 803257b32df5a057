"""A campaign over random graphs of units: which cases are exact, refused, or at fault.

    PYTHONPATH=. python experiments/18_fuzz/run.py                    # all, and the README
    PYTHONPATH=. python experiments/18_fuzz/run.py --seeds 100 200    # some; writes nothing
    PYTHONPATH=. python experiments/18_fuzz/run.py --show 17          # one, in full
    PYTHONPATH=. python experiments/18_fuzz/run.py --shrink 17        # as small as it gets

Cases are drawn and judged by tests/fuzzing, of which the tests run a small part.
"""

import argparse
import csv
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from report import as_markdown, without_names

from experiments.common import Environment, console, write_results_block
from tests.fuzzing.campaign import Court, shrink
from tests.fuzzing.drawing import draw_case
from tests.fuzzing.judge import Judgement, Verdict
from tests.fuzzing.shapes import FuzzCase

HERE = Path(__file__).parent
NUM_CASES = 2400
LONGEST_REASON = 240
CASES_PER_LINE = 50  # of progress


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    seed: int
    world_size: int
    legal: bool  # nothing in it that may be refused
    verdict: str
    phase: str  # of the error
    seconds: float
    reason: str
    traits: str


def main() -> None:
    """The campaign, or a look at one case."""
    arguments = _arguments()
    court = Court()
    try:
        if arguments.show is not None:
            _show(court, draw_case(arguments.show))
        elif arguments.shrink is not None:
            _shrink(court, draw_case(arguments.shrink))
        else:
            _campaign(court, arguments.seeds, arguments.to)
    finally:
        court.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--to", type=Path, help="file for the rows of --seeds")
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    return parser.parse_args()


def _campaign(court: Court, seeds: Sequence[int] | None, path: Path | None) -> None:
    environment = Environment.here()
    started_at_s = time.monotonic()
    rows: list[Row] = []
    for seed in range(*(seeds or (0, NUM_CASES))):
        case = draw_case(seed)
        judgement, seconds = court.judge(case)
        rows.append(_row(case, judgement, seconds))
        if judgement.is_fault:
            console.print(f"seed {seed}: {rows[-1].verdict}: {rows[-1].reason}", markup=False)
        if len(rows) % CASES_PER_LINE == 0:
            minutes = (time.monotonic() - started_at_s) / 60
            console.print(f"{len(rows)} cases, {minutes:.1f} min: {_counts(rows)}")
            if path is not None:
                _write(path, rows)
    minutes = (time.monotonic() - started_at_s) / 60
    console.print(f"{len(rows)} cases, {minutes:.1f} min: {_counts(rows)}")
    if seeds is None:
        _write(HERE / "results.csv", rows)
        text = f"{environment.as_markdown()} {minutes:.0f} minutes.\n\n{as_markdown(rows)}"
        write_results_block(HERE / "README.md", text)
    elif path is not None:
        _write(path, rows)


def _row(case: FuzzCase, judgement: Judgement, seconds: float) -> Row:
    return Row(
        seed=case.seed,
        world_size=case.world_size,
        legal=not case.may_be_refused,
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
        if row.legal and row.verdict == Verdict.REFUSED.value:
            name = "refused without need"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        names = [each.name for each in fields(Row)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


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
