"""Assignments of matrices to drawn devices: within memory, and how near to their bound.

python -m experiments.whole_matrices.assignments.run                  # goes on
python -m experiments.whole_matrices.assignments.run --seeds 0 250    # a part of it
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from experiments.common import by_seed
from experiments.common.results import BAR_HEADER, Bar, Spread, markdown_table
from shardhet.planner.owners import assigned
from tests.test_owners import drawn

HERE = Path(__file__).parent
NUM_PROBLEMS = 1000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem."""

    seed: int
    devices: int
    filled: float  # of all room
    is_within: bool  # every device's room
    optimizer_s: float  # on the slowest device
    bound_s: float
    cpu_s: float

    @property
    def over(self) -> float:
        """The slowest device, of the bound."""
        return self.optimizer_s / self.bound_s


def row_of(seed: int) -> Row:
    """The row of a seed."""
    rng = np.random.default_rng(seed)
    problem = drawn(rng, int(rng.integers(2, 9)), [12, 12, 12])
    begin_s = time.process_time()
    found = assigned(problem)
    cpu_s = time.process_time() - begin_s
    assert found is not None
    stored = problem.numels @ found.numbers + found.cut
    busy = (problem.seconds * found.numbers).sum(0) + found.cut * problem.seconds_per_numel
    return Row(
        seed=seed,
        devices=len(problem.room),
        filled=round(float(stored.sum() / problem.room.sum()), 3),
        is_within=bool((stored <= problem.room * (1 + 1e-6)).all()),
        optimizer_s=float(busy.max()),
        bound_s=found.bound_s,
        cpu_s=round(cpu_s, 3),
    )


def as_markdown(rows: list[Row]) -> str:
    """The bars."""
    over = [row.over for row in rows]
    bars = [
        Bar(claim="problems", measured=len(rows), at_least=NUM_PROBLEMS),
        Bar(claim="over a device's room",
            measured=sum(not row.is_within for row in rows), at_most=0),
        Bar(claim="slowest device, of the bound (median)", measured=median(over), at_most=1.02),
        Bar(claim="the same (largest)", measured=max(over)),
    ]  # fmt: skip
    seconds = Spread.of([row.cpu_s for row in rows]).cell(3)
    table = markdown_table(BAR_HEADER, [bar.cells for bar in bars])
    return f"{table}\n\nProcessor seconds (median, 10th and 90th percentile): {seconds}"


if __name__ == "__main__":
    by_seed.run(HERE, Row, row_of, as_markdown, range(NUM_PROBLEMS), doc=__doc__)
