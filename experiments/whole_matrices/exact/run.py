"""Owners of whole matrices train as one process does, over drawn plans.

    python -m experiments.whole_matrices.exact.run                  # goes on with results.csv
    python -m experiments.whole_matrices.exact.run --seeds 0 50     # a part of it
    python -m experiments.whole_matrices.exact.run --seeds 0 4 --only-show   # writes nothing

Needs pytorch_optimizer, which shardhet does not: pip install pytorch_optimizer.
"""

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from experiments.common import by_seed
from experiments.common.results import BAR_HEADER, Bar, markdown_table
from shardhet import Plan
from tests.test_whole_matrices import KINDS, NUM_STEPS, draw_plan, train
from tests.test_whole_matrices_checkpoints import begin, go_on
from tests.worlds import TRANSFORMERS, preload, preload_tests, run_ranks

HERE = Path(__file__).parent
NUM_CASES = 200
OPTIMIZERS = (*KINDS, "transformers adafactor", "shampoo")
TIMEOUT_S = 120.0
LONGEST_REASON = 240

preload(*TRANSFORMERS)
preload_tests(["tests.test_whole_matrices", "tests.test_whole_matrices_checkpoints"])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan, and a second one that goes on from its checkpoint."""

    seed: int
    optimizer: str  # of the blocks' matrices, beside AdamW
    ranks: int
    stages: int
    rounds: int
    store_nothing: int  # ranks
    compute_nothing: int
    clips: bool
    is_exact: bool
    is_repeated: bool  # to the bit
    loads: bool  # under the second plan, and in one process, and both go on as one process
    loaded_by: str
    seconds: float
    reason: str


def row_of(seed: int) -> Row:
    """The row of a seed."""
    draw = random.Random(f"exact {seed}")
    kind = OPTIMIZERS[seed % len(OPTIMIZERS)]
    plans = [draw_plan(draw, has_stages=draw.random() < 0.3) for _ in range(2)]
    clip_at, plan = draw.choice([None, 0.05]), plans[0]
    reasons, begin_s = list[str](), time.monotonic()

    def repeats() -> bool:
        first, again = (
            run_ranks(train, plan.world_size, plan, kind, clip_at, False, timeout_s=TIMEOUT_S)
            for _ in range(2)
        )
        both = [zip(*each, strict=True) for each in zip(first, again, strict=True)]
        return all(torch.equal(*pair) for each in both for pair in each)

    def loads() -> bool:
        with tempfile.TemporaryDirectory() as folder:
            for what, each in zip((begin, go_on), plans, strict=True):
                run_ranks(what, each.world_size, each, kind, folder, timeout_s=TIMEOUT_S)
        return True

    def tried(what: Callable[[], bool]) -> bool | None:
        try:
            return what()
        except (Exception, pytest.fail.Exception) as error:
            reasons.append(" ".join(str(error).split())[-LONGEST_REASON:])
            return None

    is_repeated = tried(repeats)
    return Row(
        seed=seed,
        optimizer=kind,
        ranks=plan.world_size,
        stages=len(plan.stages or ("all",)),
        rounds=plan.num_rounds,
        store_nothing=sum(not rank.state_share for rank in plan.ranks),
        compute_nothing=sum(not rank.rank_batch_size for rank in plan.ranks),
        clips=clip_at is not None,
        is_exact=is_repeated is not None,
        is_repeated=bool(is_repeated),
        loads=bool(tried(loads)),
        loaded_by=_in_short(plans[1]),
        seconds=round(time.monotonic() - begin_s, 2),
        reason="; ".join(reasons),
    )


def _in_short(plan: Plan) -> str:
    stages = f" in {len(plan.stages)} stages" if plan.stages else ""
    return f"{plan.world_size} ranks{stages}, {plan.num_rounds} rounds"


def as_markdown(rows: list[Row]) -> str:
    """The bars, and what each optimizer had."""
    faults = {
        "not as one process after each step": "is_exact",
        "repeats that are not equal to the bit": "is_repeated",
        "checkpoints that do not go on as one process": "loads",
    }
    bars = [Bar(claim="plans", measured=len(rows), at_least=NUM_CASES)]
    for claim, name in faults.items():
        bars.append(
            Bar(claim=claim, measured=sum(not getattr(r, name) for r in rows), at_most=0)
        )
    table = []
    for kind in OPTIMIZERS:
        mine = [row for row in rows if row.optimizer == kind]
        exact = [all(getattr(row, name) for name in faults.values()) for row in mine]
        counts = [sum(bool(is_one(row)) for row in mine) for is_one in SORTS]
        table.append((kind, *map(str, counts), str(sum(exact))))
    header = ("optimizer", *SORTS.values(), "exact in all")
    failed = [f"- seed {r.seed}, {r.optimizer}: {r.reason}" for r in rows if r.reason]
    return "\n\n".join(
        [
            markdown_table(BAR_HEADER, [bar.cells for bar in bars]),
            markdown_table(header, table),
            *(["\n".join(failed)] if failed else []),
        ]
    )


SORTS: dict[Callable[[Row], object], str] = {
    lambda row: True: "plans",
    lambda row: row.rounds > 1: "of rounds",
    lambda row: row.stages > 1: "of stages",
    lambda row: row.store_nothing: "with ranks that own nothing",
    lambda row: row.compute_nothing: "that compute nothing",
    lambda row: row.clips: "clipped",
}


if __name__ == "__main__":
    packages = ("torch", "transformers", "pytorch_optimizer")
    by_seed.run(
        HERE,
        Row,
        row_of,
        as_markdown,
        range(NUM_CASES),
        doc=__doc__,
        how=", ".join(f"{name} {version(name)}" for name in packages)
        + f", gloo over loopback, {NUM_STEPS} steps in float64",
    )
