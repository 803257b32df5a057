"""A campaign over random graphs of units: which cases are exact, refused, or at fault.

    python -m experiments.fuzz.run                    # goes on with results.csv
    python -m experiments.fuzz.run --seeds 100 200    # a part, beside another process
    python -m experiments.fuzz.run --seeds 0 4 --only-show    # writes nothing
    python -m experiments.fuzz.run --show 17          # one, in full
    python -m experiments.fuzz.run --shrink 17        # as small as it gets

Cases are drawn and judged by tests/fuzzing, of which the tests run a small part.
"""

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from experiments.common import by_seed
from experiments.common.results import console
from experiments.fuzz.report import FAULTS, as_markdown, without_names
from tests.fuzzing.campaign import Court, shrink
from tests.fuzzing.drawing import draw_case
from tests.fuzzing.judge import Judgement, Verdict
from tests.fuzzing.shapes import FuzzCase

HERE = Path(__file__).parent
NUM_CASES = 2400
LONGEST_REASON = 240


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


@cache
def _court() -> Court:
    torch.set_num_threads(1)
    return Court()


def judged(seed: int) -> Row:
    """The row of a seed."""
    case = draw_case(seed)
    return _row(case, *_court().judge(case))


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


def told(row: Row) -> str:
    """One case, in a line."""
    return f"{row.seed:>4} {row.verdict} {row.reason if row.verdict in FAULTS else ''}"


if __name__ == "__main__":
    looks = {"--show": _show, "--shrink": _shrink}
    try:
        if sys.argv[1:2] and sys.argv[1] in looks:
            looks[sys.argv[1]](_court(), draw_case(int(sys.argv[2])))
        else:
            by_seed.run(
                HERE,
                Row,
                judged,
                as_markdown,
                range(NUM_CASES),
                doc=__doc__,
                told=told,
                how=f"torch {torch.__version__}, gloo over loopback, one thread a rank",
            )
    finally:
        _court().close()
