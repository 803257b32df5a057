"""What is gained over Zorse's formulation and over equal stages, by prediction?

    OMP_NUM_THREADS=1 python -m experiments.pipelines.compare

Clusters of two sites or with slow cables (those of stated.csv), and clusters that others have
published about; llama models at lengths of 2,048, prices as ``shardhet plan`` takes them.
Our plan is the best of those with stages and without.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median

from experiments.capability.run import inputs_of
from experiments.common.machine import Environment
from experiments.common.results import markdown_table, write_csv
from experiments.pipelines.others import Found, Others
from experiments.published.inputs import loaded
from shardhet.config.planning import Inputs, PlannedPrecision, PlannerConf
from shardhet.planner import PlanError, solve
from shardhet.planner.stages.find import MAX_STAGES, find_pipeline
from shardhet.planner.stages.groups import Positions
from shardhet.pricing.setting import Setting

HERE = Path(__file__).parent
SITES = (
    ("v100_t4", "llama_1b", 64),
    ("lab", "llama_1b", 64),
    ("lab", "llama_3b", 256),
    ("lab", "llama_7b", 256),
    ("sites_10", "llama_1b", 512),
    ("sites_10", "llama_7b", 512),
    ("sites_3", "llama_7b", 512),
    ("office_10", "llama_1b", 64),
    ("office_10", "llama_3b", 64),
    ("office_3", "llama_3b", 64),
)
PUBLISHED = (
    ("rtx4090_2x3090", "llama_1b", 128),
    ("rtx4090_2x3090", "gpt_2_7b", 128),
    ("l4_a6000_p40_p100", "gpt_2_7b", 128),
    ("l4_a6000_p40_p100", "llama_3b", 128),
    ("h100_a100_20", "llama_13b", 256),
    ("a10g_v100_t4_64", "llama_7b", 512),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Predicted samples/s for one cluster, model and batch; zeros where nothing fits."""

    cluster: str
    model: str
    batch: int
    ours: float = 0.0
    stages: int = 0  # of ours; 1: none
    even_inside: float = 0.0  # Zorse's formulation
    its_stages: int = 0
    equal_stages: float = 0.0
    equal_number: int = 0  # of equal stages
    cpu_s: float = 0.0

    @property
    def gain(self) -> float:
        """Over Zorse's formulation; inf where it finds none, 0 where we do not."""
        return self.ours / self.even_inside if self.even_inside else inf * bool(self.ours)


def cases() -> Iterator[tuple[str, str, int, PlannerConf, Inputs]]:
    """All of them, as ``shardhet plan`` reads them."""
    for cluster, model, batch in SITES:
        yield cluster, model, batch, *inputs_of(cluster, model, batch, ("seq_len=2048",))
    for cluster, model, batch in PUBLISHED:
        yield cluster, model, batch, *loaded(cluster, f"model={model}")


def ours(others: Others) -> Found | None:
    """The best plan, with stages or without."""
    found = []
    try:
        flat = solve(others.setting, global_batch_size=others.batch)
        everyone = tuple(range(others.setting.cluster.world_size))
        found = [Found(flat.predicted.step_time_s, (everyone,), flat.plan.num_rounds)]
    except PlanError:
        pass
    pipeline = find_pipeline(
        others.setting,
        global_batch_size=others.batch,
        smaller=others.smaller,
        max_stages=MAX_STAGES,
        at_most_s=min((each.step_s for each in found), default=inf),
    )
    if pipeline is not None:
        found.append(Found(pipeline.step_time_s, pipeline.groups, pipeline.num_rounds))
    return min(found, key=lambda each: each.step_s, default=None)


def compared(cluster: str, model: str, batch: int, conf: PlannerConf, of: Inputs) -> Compared:
    """One case by all three."""
    started_s = time.process_time()
    whole = replace(conf, precision=PlannedPrecision(of.setting.workload.param_dtype))

    def smaller(positions: Positions) -> Setting:
        return whole.derived(of.setting.cluster.only(positions), of.name).setting

    others = Others(of.setting, smaller, batch)
    rows = [ours(others), others.even_inside(), others.equal_stages()]
    rates = [0.0 if row is None else round(batch / row.step_s, 4) for row in rows]
    numbers = [0 if row is None else len(row.stages) for row in rows]
    return Compared(
        cluster=cluster,
        model=model,
        batch=batch,
        ours=rates[0],
        stages=numbers[0],
        even_inside=rates[1],
        its_stages=numbers[1],
        equal_stages=rates[2],
        equal_number=numbers[2],
        cpu_s=round(time.process_time() - started_s, 1),
    )


def main() -> None:
    """compare.csv, and a table for the README."""
    rows = []
    for case in cases():
        rows.append(row := compared(*case))
        print(row, flush=True)
    write_csv(HERE / "compare.csv", rows)
    lines = [
        (
            row.cluster,
            row.model,
            str(row.batch),
            f"{row.ours:.4g} in {row.stages}" if row.ours else "-",
            f"{row.even_inside:.4g} in {row.its_stages}" if row.even_inside else "-",
            f"{row.equal_stages:.4g} in {row.equal_number}" if row.equal_stages else "-",
            f"{row.gain:.2f}" if 0 < row.gain < inf else "-",
        )
        for row in rows
    ]
    header = ("cluster", "model", "batch", "ours, samples/s in stages", "even state inside")
    print(markdown_table((*header, "equal stages", "gain over even inside"), lines))
    gains = [row.gain for row in rows if 0 < row.gain < inf]
    alone = sum(row.gain == inf for row in rows)
    print(f"Gain: median {median(gains):.2f}, {min(gains):.2f} to {max(gains):.2f}", end="; ")
    print(f"{alone} of {len(rows)} fit only as ours.")
    print(Environment.here().as_markdown("predictions"))


if __name__ == "__main__":
    main()
