"""Owners of whole matrices on drawn clusters of unlike cards: memory, bounds, and what is left.

    python -m experiments.whole_matrices.drawn_clusters.run                # goes on
    python -m experiments.whole_matrices.drawn_clusters.run --seeds 0 50   # a part of it
    python -m experiments.whole_matrices.drawn_clusters.run --seeds 0 4 --only-show

Times are derived from data sheets; nothing is trained.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np

from experiments.common import by_seed
from experiments.common.results import BAR_HEADER, Bar, Spread, markdown_table
from shardhet.planner import Demands, PlanError, PlanSolution, owners, solve
from shardhet.planner.owners import with_owners
from shardhet.planner.search.search import Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster
from shardhet.records.plan import EVERY_BLOCK
from shardhet.records.workload import Workload

HERE = Path(__file__).parent
NUM_CLUSTERS = 1000
LEFT_BYTES = 2**30  # of each device, for its process and a little more
EFFORT = Effort(relative_gap=1e-3)
CARDS = (
    "NVIDIA H100 PCIe",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-40GB",
    "A6000",
    "NVIDIA L4",
    "NVIDIA A10G",
    "4090",
    "3090",
    "3060",
)
NETWORKS = ("1GbE", "10GbE", "25GbE", "100GbE")
# Layers, width, heads, heads of keys, hidden width, tokens.
MODELS = {
    "gpt_125m": (12, 768, 12, 12, 2048, 1024),
    "llama_1b": (22, 2048, 32, 4, 5632, 2048),
    "llama_3b": (28, 3072, 24, 8, 8192, 2048),
    "llama_7b": (32, 4096, 32, 32, 11008, 2048),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cluster."""

    seed: int
    model: str
    cards: str
    batch: int
    fits: bool  # cut by rows; without it nothing else is known
    owns_beside: bool  # so do whole matrices, beside the same batches
    owns: bool  # beside any that are tried
    rows_s: float  # the step without the optimizer, if matrices are cut
    is_within: bool  # every budget, as predicted
    step_s: float
    optimizer_s: float  # on the slowest device
    bound_s: float  # of it, beside these batches
    free_bound_s: float  # the same if memory did not bind
    idle_s: float  # of the step, in which the optimizer could hide if it began in backward
    search_s: float  # of owners beside given batches, processor time

    @property
    def over(self) -> float:
        """The slowest device's optimizer, of the bound."""
        return self.optimizer_s / self.bound_s

    @property
    def by_batches(self) -> float:
        """The step, of one with the fastest batches and owners that have room for all."""
        return self.step_s / (self.rows_s + self.free_bound_s)

    @property
    def by_overlap(self) -> float:
        """The step, of one whose optimizer hides in whatever is idle."""
        return self.step_s / (self.step_s - min(self.idle_s, self.optimizer_s))


def workload_of(model: str) -> Workload:
    """One of ``MODELS``, in bfloat16."""
    layers, width, heads, kv_heads, hidden, tokens = MODELS[model]
    return Workload.transformer(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        hidden_width=hidden,
        vocab_size=32000,
        seq_len=tokens,
        param_dtype="bfloat16",
    )


def drawn(seed: int) -> tuple[str, str, Setting, int]:
    """The model, the cards, the setting and the batch."""
    rng = np.random.default_rng(seed)
    model = str(rng.choice([*MODELS]))
    workload = workload_of(model)
    kinds = [str(kind) for kind in rng.choice(CARDS, int(rng.integers(2, 5)), replace=False)]
    hosts = ["+".join([kind] * int(rng.integers(1, 4))) for kind in kinds]
    cards = " | ".join(hosts)
    cluster = Cluster.of_cards(cards, network=str(rng.choice(NETWORKS)))
    # The state takes a fifth to three quarters of what is left of the memory, or all has room.
    state = workload.numel * workload.state_bytes_per_element / rng.uniform(0.2, 0.75)
    memory = [each.memory_capacity_bytes or 0 for each in cluster.devices]
    part = (state + len(memory) * LEFT_BYTES) / sum(memory)
    part = min(cluster.usable_memory_fraction, max(part, LEFT_BYTES / min(memory)))
    cluster = replace(cluster, usable_memory_fraction=float(part))
    batch = cluster.world_size * int(rng.integers(1, 9))
    setting = Setting(cluster, workload, derive_profile(cluster, workload))
    return model, cards, setting, batch


@dataclass
class _Try:
    """A plan cut by rows, of which owners are asked."""

    rows: PlanSolution
    prices: CostModel
    seconds: float = 0.0


def row_of(seed: int) -> Row:
    """The row of a seed."""
    model, cards, setting, batch = drawn(seed)
    known = Row(
        seed=seed, model=model, cards=cards, batch=batch, fits=False, owns_beside=False,
        owns=False, rows_s=0.0, is_within=True, step_s=0.0, optimizer_s=0.0, bound_s=0.0,
        free_bound_s=0.0, idle_s=0.0, search_s=0.0,
    )  # fmt: skip
    demands = Demands(max_rounds=4, whole_matrices=EVERY_BLOCK)
    tries = list[_Try]()

    def noted(rows: PlanSolution, prices: CostModel, of: Demands) -> PlanSolution:
        begin_s = time.process_time()
        tries.append(_Try(rows, prices))
        try:
            return with_owners(rows, prices, of)
        finally:
            tries[-1].seconds = time.process_time() - begin_s

    found = None
    with mock.patch.object(owners, "with_owners", noted), suppress(PlanError):
        found = solve(
            setting, global_batch_size=batch, demands=demands, effort=EFFORT, is_bounded=False
        )
    if not tries:
        return known
    cost = tries[0].rows.predicted
    known = replace(
        known,
        fits=True,
        rows_s=cost.step_time_s - cost.optimizer_s,
        search_s=round(max(each.seconds for each in tries), 2),
    )
    if found is None:
        return known
    costs = found.predicted.ranks
    return replace(
        known,
        owns=True,
        is_within=all(cost.fits for cost in costs),
        step_s=found.predicted.step_time_s,
        optimizer_s=found.predicted.optimizer_s,
        bound_s=found.optimizer_bound_s,
        owns_beside=len(tries) == 1,
        free_bound_s=_free_bound_s(tries[0], demands),
        idle_s=_idle_s(found),
    )


def _free_bound_s(first: _Try, demands: Demands) -> float:
    """The bound on the optimizer where every device that takes part has room for all."""
    model = first.prices.for_plan(first.rows.plan)
    room, _ = owners._room(first.rows, model, demands)
    shapes = owners._shapes(model, demands)
    problem = owners._problem(model, first.rows.plan, shapes, room)
    room = np.where(problem.room > 0, inf, 0.0)
    whole = float(problem.numels @ problem.numbers) + problem.cut_numel
    answer = owners.assigned(replace(problem, room=np.minimum(room, 2 * whole)))
    assert answer is not None
    return answer.bound_s


def _idle_s(found: PlanSolution) -> float:
    """Seconds after the first reduction in which the device that is idle least has no turn."""
    cost = found.predicted
    waited_s = cost.backward_s + cost.exposed_comm_s
    return min(
        max(0.0, waited_s - rank.backward_s) for rank in cost.ranks if rank.optimizer_s > 0
    )


def told(row: Row) -> str:
    """One cluster, in a line."""
    if not row.owns:
        return f"{row.seed} {row.model} {row.cards}: {'no owners' if row.fits else 'no plan'}"
    return (
        f"{row.seed} {row.model} {row.cards}: {row.step_s:.3f} s, optimizer "
        f"{row.optimizer_s:.4f} ({row.over - 1:.2%} over), batches {row.by_batches - 1:.2%}, "
        f"overlap {row.by_overlap - 1:.2%}, {row.search_s} s"
    )


def as_markdown(rows: list[Row]) -> str:
    """The bars, and what other batches or an overlap could give."""
    fit = [row for row in rows if row.fits]
    own = [row for row in fit if row.owns]
    bars = [
        Bar(claim="clusters", measured=len(rows), at_least=NUM_CLUSTERS),
        Bar(claim="that a plan fits", measured=len(fit)),
        Bar(claim="that fits whole matrices beside the same batches",
            measured=sum(row.owns_beside for row in fit)),
        Bar(claim="or beside others", measured=len(own)),
        Bar(claim="assignments over a budget",
            measured=sum(not row.is_within for row in own), at_most=0),
        Bar(claim="optimizer on the slowest device, of the bound (median)",
            measured=median(row.over for row in own), at_most=1.02),
        Bar(claim="processor seconds of the owners (largest)",
            measured=max(row.search_s for row in own)),
    ]  # fmt: skip
    gains = {
        "optimizer, of the bound": [row.over for row in own],
        "optimizer, of the step": [row.optimizer_s / row.step_s for row in own],
        "step, if memory did not bind owners": [row.by_batches for row in own],
        "step, if the optimizer hid in idle time": [row.by_overlap for row in own],
    }
    table = [
        (name, Spread.of(each).cell(4), f"{max(each):.3f}", f"{sum(e > 1.03 for e in each)}")
        for name, each in gains.items()
    ]
    header = ("ratio", "median (10th-90th percentile)", "largest", "clusters over 1.03")
    return (
        markdown_table(BAR_HEADER, [bar.cells for bar in bars])
        + "\n\n"
        + markdown_table(header, table)
    )


if __name__ == "__main__":
    by_seed.run(HERE, Row, row_of, as_markdown, range(NUM_CLUSTERS), doc=__doc__, told=told)
