"""Drawn steps of several rounds: each is that of one process, and repeats bit by bit.

    python -m experiments.rounds.run                    # all, results.csv and the README
    python -m experiments.rounds.run --seeds 100 200    # some; writes nothing
    python -m experiments.rounds.run --on-host optimizer_on_host

Cases are drawn and judged by tests/rounds_cases.py, of which the tests run twelve.
"""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.common.machine import Environment
from experiments.common.results import console, markdown_table, write_csv, write_results_block
from tests.parity import check_covered_once
from tests.rounds_cases import ON_HOST, PRECISIONS, RoundsCase, check, draw, excess
from tests.test_parity_low_precision import ALLOWED_FACTOR
from tests.worlds import Outcome, World

HERE = Path(__file__).parent
NUM_CASES = 400
CASE_TIMEOUT_S = 120.0
VERDICTS = ("exact", "refused", "wrong", "crash", "hang")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    seed: int
    world_size: int
    precision: str
    num_rounds: int
    verdict: str  # of VERDICTS
    excess: float  # in low precision: the largest error, as a multiple of plain PyTorch's
    seconds: float
    reason: str
    traits: str


def main() -> None:
    """Run them and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--on-host", nargs="+", choices=ON_HOST, default=())
    given = parser.parse_args()
    torch.set_num_threads(1)
    environment = Environment.here()
    started_at_s = time.monotonic()
    seeds = range(*(given.seeds or (0, NUM_CASES)))
    worlds: dict[int, World] = {}
    rows: list[Row] = []
    for seed in seeds:
        case = draw(seed, on_host=given.on_host)
        rows.append(row := _tried(worlds, seed, case))
        if row.verdict != "exact":
            console.print(str(row), markup=False, soft_wrap=True)
    for world in worlds.values():
        world.close()
    minutes = (time.monotonic() - started_at_s) / 60
    console.print(f"{len(rows)} cases, {minutes:.1f} min: {Counter(r.verdict for r in rows)}")
    if given.seeds is None:
        write_csv(HERE / "results.csv", rows)
        heading = f"{environment.as_markdown()} {minutes:.0f} minutes."
        write_results_block(HERE / "README.md", f"{heading}\n\n{as_markdown(rows)}")


def _tried(worlds: dict[int, World], seed: int, case: RoundsCase) -> Row:
    started_at_s = time.monotonic()
    world = worlds.pop(case.world_size, None) or World(case.world_size)
    outcomes = world.run(check, (case,), timeout_s=CASE_TIMEOUT_S, grace_s=10.0)
    if all(outcome.has_returned for outcome in outcomes):
        worlds[case.world_size] = world
    else:
        world.kill()
    verdict, more, reason = _judged(case, outcomes)
    return Row(
        seed=seed,
        world_size=case.world_size,
        precision=case.precision,
        num_rounds=case.case.plan.num_rounds,
        verdict=verdict,
        excess=round(more, 3),
        seconds=round(time.monotonic() - started_at_s, 2),
        reason=" ".join(reason.split())[:240],
        traits="; ".join(case.traits()),
    )


def _judged(case: RoundsCase, outcomes: Sequence[Outcome]) -> tuple[str, float, str]:
    """The verdict, the excess in low precision, and what is wrong."""
    for outcome in outcomes:
        if outcome.hung_at is not None:
            return "hang", 0.0, outcome.hung_at
    failed = [each for each in outcomes if not each.has_returned]
    wrong = [each for each in failed if each.exception_name == "AssertionError"]
    if wrong:
        return "wrong", 0.0, wrong[0].message
    if failed:
        is_refused = all(each.exception_name in ("ValueError", "PeerError") for each in failed)
        verdict = "refused" if is_refused and len(failed) == len(outcomes) else "crash"
        return verdict, 0.0, f"{failed[0].exception_name}: {failed[0].message}"
    reports = [outcome.value for outcome in outcomes]
    if case.is_exact:
        try:
            check_covered_once([report.covers for report in reports])
        except AssertionError as error:
            return "wrong", 0.0, str(error)
        return "exact", 0.0, ""
    more = excess(reports)
    return ("exact" if more <= ALLOWED_FACTOR else "wrong"), more, ""


def as_markdown(rows: Sequence[Row]) -> str:
    """Verdicts by precision, and by trait."""
    by_precision = [
        [each, *_counts([row for row in rows if row.precision == each]), _largest(rows, each)]
        for each in dict.fromkeys(PRECISIONS)
    ]
    traits = sorted({trait for row in rows for trait in row.traits.split("; ")})
    by_trait = [
        [trait, *_counts([row for row in rows if trait in row.traits.split("; ")])]
        for trait in traits
    ]
    by_size = [
        [f"{size} ranks", *_counts([row for row in rows if row.world_size == size])]
        for size in sorted({row.world_size for row in rows})
    ]
    header = ["cases", *VERDICTS]
    return "\n\n".join(
        [
            markdown_table(
                ["precision", *header, "largest error, of plain PyTorch's"], by_precision
            ),
            markdown_table(["trait", *header], [*by_size, *by_trait]),
        ]
    )


def _counts(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row.verdict for row in rows)
    return [str(len(rows)), *(str(counts[each]) for each in VERDICTS)]


def _largest(rows: Sequence[Row], precision: str) -> str:
    found = [row.excess for row in rows if row.precision == precision]
    return "" if precision == "float64" or not found else f"{max(found):.2f}"


if __name__ == "__main__":
    main()
