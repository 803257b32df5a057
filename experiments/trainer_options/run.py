"""Every option of transformers' Trainer that is tried: the history it logs, by plan and plain.

    python -m experiments.trainer_options.run                  # all, results.csv and the README
    python -m experiments.trainer_options.run --only long sgd  # some; writes nothing

Each is trained twice with each of two losses: by HetTrainer on three ranks that get 4, 3 and 0
of 7 samples, and by a plain Trainer in this process.  Cases are those of tests/trainer_options.
"""

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from experiments.common.results import Page, console, markdown_table
from tests.trainer_options import (
    LOGGED_BAR,
    OPTIONS,
    PARAM_BAR,
    PLAN,
    difference,
    train_by_plan,
    with_option,
)
from tests.worlds import TRANSFORMERS, World, preload

HERE = Path(__file__).parent
CASE_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One option with one loss."""

    option: str
    loss: str  # "float64", or the model's "own"
    verdict: str  # exact, refused, wrong, crash; absent: plain Trainer does not run it here
    logged_error: float  # the largest of anything logged, relative
    param_error: float  # the largest of a parameter, absolute
    seconds: float
    reason: str


def main() -> None:
    """Try them and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="OPTION")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    preload(*TRANSFORMERS)
    page, rows = Page(HERE, is_kept=only is None), list[Row]()
    world = World(PLAN.world_size)
    for option in only or OPTIONS:
        for loss in LOGGED_BAR:
            rows.append(row := _tried(world, option, loss))
            console.print(str(row), markup=False, soft_wrap=True)
            if row.verdict == "crash":
                world.kill()
                world = World(PLAN.world_size)
    world.close()
    page.tell(as_markdown(rows))
    page.keep({"results.csv": rows})


def _tried(world: World, option: str, loss: str) -> Row:
    started_at_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        expected = _plain(folder, option, loss)
        outcomes = world.run(
            train_by_plan, (folder, [(option, loss)]), timeout_s=CASE_TIMEOUT_S, grace_s=10.0
        )
    first = outcomes[0]
    found = first.value[0] if first.has_returned else f"crash: {first.message}"
    errors = (float("nan"), float("nan"))
    reason = ""
    if isinstance(found, str):
        verdict, reason = ("refused" if first.has_returned else "crash"), found
    elif isinstance(expected, str):
        verdict, reason = "absent", f"plain Trainer: {expected}"
    else:
        errors = difference(found, expected)
        bars = LOGGED_BAR[loss], PARAM_BAR if loss == "float64" else LOGGED_BAR[loss]
        is_exact = all(e <= bar for e, bar in zip(errors, bars, strict=True))
        verdict = "exact" if is_exact else "wrong"
    return Row(
        option=option,
        loss=loss,
        verdict=verdict,
        logged_error=errors[0],
        param_error=errors[1],
        seconds=round(time.monotonic() - started_at_s, 1),
        reason=" ".join(reason.split())[:240],
    )


def _plain(folder: str, option: str, loss: str) -> dict[str, Any] | str:
    try:
        return with_option(transformers.Trainer, folder, option, loss)
    except (ImportError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def as_markdown(rows: list[Row]) -> str:
    """Verdicts by loss, and every case."""
    counts = Counter((row.loss, row.verdict) for row in rows)
    verdicts = ("exact", "refused", "wrong", "crash", "absent")
    by_loss = [[loss, *(str(counts[loss, each]) for each in verdicts)] for loss in LOGGED_BAR]
    cases = [
        [
            row.option,
            row.loss,
            row.verdict,
            f"{row.logged_error:.1e}" if row.verdict in ("exact", "wrong") else row.reason,
        ]
        for row in rows
    ]
    header = ["option", "loss", "verdict", "largest relative difference, or why"]
    return f"{markdown_table(['loss', *verdicts], by_loss)}\n\n{markdown_table(header, cases)}"


if __name__ == "__main__":
    main()
