"""Owners of llama_7b's matrices on 256 unlike cards: seconds of a core, and the bound.

    python -m experiments.whole_matrices.many_cards.run                # goes on
    python -m experiments.whole_matrices.many_cards.run --seeds 0 2    # a part of it

Times are derived from data sheets; nothing is trained.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from experiments.common import by_seed
from experiments.common.results import BAR_HEADER, Bar, markdown_table
from experiments.whole_matrices.drawn_clusters.run import CARDS, workload_of
from shardhet.planner import Demands, solve
from shardhet.planner.owners import with_owners
from shardhet.planner.search.search import Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster
from shardhet.records.plan import EVERY_BLOCK

HERE = Path(__file__).parent
NUM_SEEDS = 8
NUM_HOSTS, CARDS_OF_HOST = 32, 8
EFFORT = Effort(relative_gap=1e-2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cluster."""

    seed: int
    cards: str
    batches_s: float  # processor time of planning batches, before
    owners_s: float  # of the assignment, with what it predicts
    is_within: bool  # every budget, as predicted
    optimizer_s: float  # on the slowest device
    bound_s: float

    @property
    def over(self) -> float:
        """The slowest device's optimizer, of the bound."""
        return self.optimizer_s / self.bound_s


def row_of(seed: int) -> Row:
    """The row of a seed."""
    rng = np.random.default_rng(seed)
    kinds = [str(kind) for kind in rng.choice(CARDS, int(rng.integers(4, 9)), replace=False)]
    hosts = sorted(str(rng.choice(kinds)) for _ in range(NUM_HOSTS))
    cluster = Cluster.of_cards(
        " | ".join("+".join([kind] * CARDS_OF_HOST) for kind in hosts), network="100GbE"
    )
    workload = workload_of("llama_7b")
    setting = Setting(cluster, workload, derive_profile(cluster, workload))
    demands, begin_s = Demands(max_rounds=1), time.process_time()
    rows = solve(
        setting,
        global_batch_size=4 * cluster.world_size,
        demands=demands,
        effort=EFFORT,
        is_bounded=False,
    )
    middle_s = time.process_time()
    demands = replace(demands, whole_matrices=EVERY_BLOCK)
    found = with_owners(rows, CostModel(setting), demands)
    end_s = time.process_time()
    return Row(
        seed=seed,
        cards=" ".join(f"{hosts.count(kind) * CARDS_OF_HOST}x{kind}" for kind in kinds),
        batches_s=round(middle_s - begin_s, 2),
        owners_s=round(end_s - middle_s, 2),
        is_within=all(cost.fits for cost in found.predicted.ranks),
        optimizer_s=found.predicted.optimizer_s,
        bound_s=found.optimizer_bound_s,
    )


def as_markdown(rows: list[Row]) -> str:
    """The bars."""
    bars = [
        Bar(claim="clusters", measured=len(rows), at_least=NUM_SEEDS),
        Bar(claim="processor seconds of the owners (largest)",
            measured=max(row.owners_s for row in rows), at_most=5),
        Bar(claim="assignments over a budget",
            measured=sum(not row.is_within for row in rows), at_most=0),
        Bar(claim="optimizer on the slowest device, of the bound (median)",
            measured=median(row.over for row in rows)),
        Bar(claim="processor seconds of the batches (median)",
            measured=median(row.batches_s for row in rows)),
    ]  # fmt: skip
    return markdown_table(BAR_HEADER, [bar.cells for bar in bars])


if __name__ == "__main__":
    by_seed.run(HERE, Row, row_of, as_markdown, range(NUM_SEEDS), doc=__doc__)
