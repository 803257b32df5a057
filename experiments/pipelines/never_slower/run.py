"""Is a plan ever slower because stages, or the memory of hosts, are allowed?

    nice python -m experiments.pipelines.never_slower.run          # goes on with results.csv
    python -m experiments.pipelines.never_slower.run --seeds 0 4 --only-show

Clusters are drawn as in ../brute_force, of two to four devices, all of which take part.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path

from experiments.common import by_seed
from experiments.common.results import (
    BAR_HEADER,
    Bar,
    markdown_table,
)
from experiments.pipelines.brute_force.instances import Instance, drawn
from shardhet.planner import Demands, PlanError
from shardhet.planner.preference import TOLERANCE
from shardhet.planner.present import plan_for
from shardhet.planner.stages.groups import MAX_STAGES
from shardhet.pricing.cost import CostModel
from shardhet.simulator.stages import price_of

HERE = Path(__file__).parent
NUM_INSTANCES = 200
SEEDS = range(1000, 1000 + NUM_INSTANCES)  # ../brute_force has those before
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instance; seconds of a step, inf where nothing fits."""

    seed: int
    devices: int
    hosts: int
    batch: int
    flat_s: float
    staged_s: float  # with stages allowed
    flat_on_host_s: float  # with inputs and optimizers allowed on hosts
    staged_on_host_s: float
    num_stages: int  # of the last
    search_s: float  # of CPU, of all four


def planned(instance: Instance, max_stages: int, *, on_host: bool) -> tuple[float, int]:
    """The price of what is planned, and its stages; inf where nothing fits."""
    setting = instance.setting
    demands = Demands(may_keep_inputs_on_host=on_host, may_keep_optimizer_on_host=on_host)
    try:
        plan = plan_for(
            setting.cluster.devices,
            setting,
            global_batch_size=instance.batch,
            demands=demands,
            max_stages=max_stages,
        )
    except PlanError:
        return inf, 0
    if plan.stages is None:
        return CostModel(setting).predict(plan).step_time_s, 1
    price = price_of(plan, setting, instance.part)
    return price.timeline().step_time_s, len(plan.stages)


def row_of(seed: int) -> Row:
    """All four plans."""
    instance, started_s = drawn(seed, sizes=(2, 4)), time.process_time()
    found = {
        (stages, on_host): planned(instance, stages, on_host=on_host)
        for on_host, stages in product((False, True), (1, MAX_STAGES))
    }
    return Row(
        seed=seed,
        devices=instance.cluster.world_size,
        hosts=len(instance.cluster.nodes),
        batch=instance.batch,
        flat_s=found[1, False][0],
        staged_s=found[MAX_STAGES, False][0],
        flat_on_host_s=found[1, True][0],
        staged_on_host_s=found[MAX_STAGES, True][0],
        num_stages=found[MAX_STAGES, True][1],
        search_s=round(time.process_time() - started_s, 2),
    )


def as_markdown(rows: list[Row]) -> str:
    """The bars."""

    def longest(more: Callable[[Row], float], less: Callable[[Row], float]) -> float:
        pairs = [(more(row), less(row)) for row in rows]
        return max((one / other - 1 for one, other in pairs if other < inf), default=0.0)

    bars = [
        Bar(claim="instances", measured=len(rows), at_least=NUM_INSTANCES),
        Bar(
            claim="those in which stages are faster, on hosts, too",
            measured=sum(row.num_stages > 1 for row in rows),
        ),
        Bar(
            claim="most that a plan is slower because stages are allowed",
            measured=longest(lambda row: row.staged_s, lambda row: row.flat_s),
            at_most=ROUNDING,
        ),
        Bar(
            claim="the same with hosts allowed in both",
            measured=longest(lambda row: row.staged_on_host_s, lambda row: row.flat_on_host_s),
            at_most=ROUNDING,
        ),
        Bar(
            claim="most that one without stages is slower because hosts are allowed",
            measured=longest(lambda row: row.flat_on_host_s, lambda row: row.flat_s),
            at_most=TOLERANCE,
        ),
        Bar(
            claim="most that one in stages is slower because hosts are allowed",
            measured=longest(lambda row: row.staged_on_host_s, lambda row: row.staged_s),
            at_most=TOLERANCE,
        ),
        Bar(
            claim="those in which stages on hosts are faster than stages",
            measured=sum(row.staged_on_host_s < row.staged_s for row in rows),
        ),
        Bar(claim="CPU seconds", measured=sum(row.search_s for row in rows)),
    ]
    return markdown_table(BAR_HEADER, [bar.cells for bar in bars])


if __name__ == "__main__":
    by_seed.run(HERE, Row, row_of, as_markdown, SEEDS, doc=__doc__)
