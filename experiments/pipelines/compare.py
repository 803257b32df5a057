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
from shardhet.apps.plan import DOOR
from shardhet.apps.planning.inputs import Request, load
from shardhet.config.planning import (
    Inputs,
    PlannedPrecision,
    PlannerConf,
    register_planning_schemas,
)
from shardhet.planner import Demands, PlanError, solve
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
    ours_on_host: float = 0.0  # that may keep inputs of units on hosts, as Zorse's does
    stages_on_host: int = 0
    even_inside: float = 0.0  # Zorse's formulation
    its_stages: int = 0
    equal_stages: float = 0.0
    equal_number: int = 0  # of equal stages
    cpu_s: float = 0.0

    @property
    def gain(self) -> float:
        """Over Zorse's formulation; inf where it finds none, 0 where we do not."""
        return self._gain_of(self.ours)

    @property
    def gain_on_host(self) -> float:
        """The same with inputs of units on hosts, too."""
        return self._gain_of(self.ours_on_host)

    def _gain_of(self, ours: float) -> float:
        return ours / self.even_inside if self.even_inside else inf * bool(ours)


def cases() -> Iterator[tuple[str, str, int, PlannerConf, Inputs]]:
    """All of them, as ``shardhet plan`` reads them."""
    for cluster, model, batch in SITES:
        yield cluster, model, batch, *inputs_of(cluster, model, batch, ("seq_len=2048",))
    register_planning_schemas()
    for cluster, model, batch in PUBLISHED:
        request = Request((f"cluster=described/{cluster}", f"model={model}"), (), None)
        yield cluster, model, batch, *load(DOOR, request, PlannerConf)


def ours(others: Others, *, on_host: bool) -> Found | None:
    """The best plan, with stages or without, perhaps with inputs of units on hosts."""
    found = []
    demands = Demands(may_keep_inputs_on_host=on_host)
    try:
        flat = solve(others.setting, global_batch_size=others.batch, demands=demands)
        everyone = tuple(range(others.setting.cluster.world_size))
        found = [Found(flat.predicted.step_time_s, (everyone,), flat.plan.num_rounds)]
    except PlanError:
        pass
    pipeline = find_pipeline(
        others.setting,
        global_batch_size=others.batch,
        smaller=others.smaller,
        max_stages=MAX_STAGES,
        demands=demands,
        at_most_s=min((each.step_s for each in found), default=inf),
    )
    if pipeline is not None:
        found.append(Found(pipeline.step_time_s, pipeline.groups, pipeline.num_rounds))
    return min(found, key=lambda each: each.step_s, default=None)


def compared(cluster: str, model: str, batch: int, conf: PlannerConf, of: Inputs) -> Compared:
    """One case by all of them."""
    started_s = time.process_time()
    whole = replace(conf, precision=PlannedPrecision(of.setting.workload.param_dtype))

    def smaller(positions: Positions) -> Setting:
        return whole.derived(of.setting.cluster.only(positions), of.name).setting

    others = Others(of.setting, smaller, batch)
    rows = [ours(others, on_host=on_host) for on_host in (False, True)]
    rows += [others.even_inside(), others.equal_stages()]
    rates = [0.0 if row is None else round(batch / row.step_s, 4) for row in rows]
    numbers = [0 if row is None else len(row.stages) for row in rows]
    return Compared(
        cluster=cluster,
        model=model,
        batch=batch,
        ours=rates[0],
        stages=numbers[0],
        ours_on_host=rates[1],
        stages_on_host=numbers[1],
        even_inside=rates[2],
        its_stages=numbers[2],
        equal_stages=rates[3],
        equal_number=numbers[3],
        cpu_s=round(time.process_time() - started_s, 1),
    )


def told(rate: float, stages: int) -> str:
    """A cell of the table."""
    return f"{rate:.4g} in {stages}" if rate else "-"


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
            told(row.ours, row.stages),
            told(row.ours_on_host, row.stages_on_host),
            told(row.even_inside, row.its_stages),
            told(row.equal_stages, row.equal_number),
            f"{row.gain:.2f}" if 0 < row.gain < inf else "-",
            f"{row.gain_on_host:.2f}" if 0 < row.gain_on_host < inf else "-",
        )
        for row in rows
    ]
    header = ("cluster", "model", "batch", "ours, samples/s in stages", "inputs on hosts")
    others = ("even state inside", "equal stages", "gain over even inside", "with hosts")
    print(markdown_table((*header, *others), lines))
    for what, gains in (
        ("Gain", [row.gain for row in rows]),
        ("Gain with hosts", [row.gain_on_host for row in rows]),
    ):
        some = [each for each in gains if 0 < each < inf]
        alone = sum(each == inf for each in gains)
        print(
            f"{what}: median {median(some):.2f}, {min(some):.2f} to {max(some):.2f}; "
            f"{alone} of {len(rows)} fit only as ours."
        )
    print(Environment.here().as_markdown("predictions"))


if __name__ == "__main__":
    main()
