"""Devices that share samples by tokens train as one process does, over drawn plans.

python -m experiments.long_samples.groups.run                  # goes on with results.csv
python -m experiments.long_samples.groups.run --seeds 0 50     # a part of it
python -m experiments.long_samples.groups.run --seeds 0 4 --only-show   # writes nothing
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.common import by_seed
from experiments.common.results import BAR_HEADER, Bar, markdown_table
from tests.context_cases import MODELS, NUM_STEPS, Case
from tests.worlds import TRANSFORMERS, preload, preload_tests, run_ranks

HERE = Path(__file__).parent
NUM_CASES = 200
TIMEOUT_S = 120.0
LONGEST_REASON = 400

preload(*TRANSFORMERS)
preload_tests(["tests.context_cases"])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan."""

    seed: int
    model: str
    tokens: int  # of the longest sample
    ranks: int
    groups: str  # the number of members of each
    alone: int  # ranks that compute samples of their own
    store_only: int  # ranks
    rounds: int
    is_layered: bool  # whether a member has several microbatches
    recomputing: str  # groups: all, some or none of the members
    in_tiles: str
    is_exact: bool
    is_repeated: bool  # to the bit
    seconds: float
    reason: str


def run_twice(rank: int, seed: int) -> bool:
    """Whether a repeat has the same bits; raises if a step is not that of one process."""
    case = Case.drawn(seed)
    first, second = (
        [p.detach().as_subclass(Tensor).clone() for p in case.run().parameters()]
        for _ in range(2)
    )
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def row_of(seed: int) -> Row:
    """The row of a seed."""
    case, began_s, reason = Case.drawn(seed), time.monotonic(), ""
    plan, repeats = case.plan, list[bool]()
    try:
        repeats = run_ranks(run_twice, plan.world_size, seed, timeout_s=TIMEOUT_S)
    except (Exception, pytest.fail.Exception) as error:
        reason = " ".join(str(error).split())[-LONGEST_REASON:]
    groups = plan.context_groups or ()
    members = [[plan.ranks[i] for i in group] for group in groups]
    return Row(
        seed=seed,
        model=case.model,
        tokens=case.num_tokens,
        ranks=plan.world_size,
        groups=" ".join(str(len(each)) for each in groups),
        alone=sum(bool(r.microbatch_sizes and r.token_share is None) for r in plan.ranks),
        store_only=sum(not r.microbatch_sizes for r in plan.ranks),
        rounds=plan.num_rounds,
        is_layered=any(len(each[0].microbatch_sizes) > 1 for each in members),
        recomputing=" ".join(_part([bool(r.recomputed_units) for r in g]) for g in members),
        in_tiles=" ".join(_part([bool(r.tiled_units) for r in g]) for g in members),
        is_exact=not reason,
        is_repeated=bool(repeats) and all(repeats),
        seconds=round(time.monotonic() - began_s, 2),
        reason=reason,
    )


def _part(claims: list[bool]) -> str:
    return "all" if all(claims) else "some" if any(claims) else "none"


SORTS: dict[str, Callable[[Row], object]] = {
    "plans": lambda row: True,
    "of several groups": lambda row: " " in row.groups,
    "a group of 3 or 4": lambda row: "3" in row.groups or "4" in row.groups,
    "with ranks alone": lambda row: row.alone,
    "that only store": lambda row: row.store_only,
    "of rounds": lambda row: row.rounds > 1,
    "layered": lambda row: row.is_layered,
    "some members recompute": lambda row: "some" in row.recomputing,
    "members in tiles": lambda row: {"some", "all"} & set(row.in_tiles.split()),
}


def as_markdown(rows: list[Row]) -> str:
    """The bars, and what each model had."""
    faults = {
        "not as one process after each step": "is_exact",
        "repeats that are not equal to the bit": "is_repeated",
    }
    bars = [Bar(claim="plans", measured=len(rows), at_least=NUM_CASES)]
    for claim, name in faults.items():
        wrong = sum(not getattr(row, name) for row in rows)
        bars.append(Bar(claim=claim, measured=wrong, at_most=0))
    table = []
    for kind in (*MODELS, "all"):
        mine = [row for row in rows if kind in (row.model, "all")]
        exact = sum(row.is_exact and row.is_repeated for row in mine)
        counts = (sum(bool(is_one(row)) for row in mine) for is_one in SORTS.values())
        table.append((kind, *map(str, counts), str(exact)))
    failed = [f"- seed {r.seed}, {r.model}: {r.reason}" for r in rows if r.reason]
    return "\n\n".join(
        [
            markdown_table(BAR_HEADER, [bar.cells for bar in bars]),
            markdown_table(("model", *SORTS, "exact"), table),
            *(["\n".join(failed)] if failed else []),
        ]
    )


if __name__ == "__main__":
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    by_seed.run(
        HERE,
        Row,
        row_of,
        as_markdown,
        range(NUM_CASES),
        doc=__doc__,
        how=f"{packages}, gloo over loopback, {NUM_STEPS} steps in float64",
    )
