"""Recomputing a part of the blocks, on each device as much as it needs: what does it give?

    OMP_NUM_THREADS=1 python -m experiments.planner.partial

Every described cluster and model as ``shardhet plan`` reads them, planned with a kind of unit
recomputed at once (1 step) and in 2, 4 and 8 steps.  Predictions: nothing is run.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median

from experiments.common.results import write_csv
from experiments.published.inputs import described
from shardhet.config.compose import conf_dir
from shardhet.config.planning import Inputs
from shardhet.planner import Effort, PlanError, solve
from shardhet.records.cluster import Cluster
from shardhet.simulator.simulation import simulate

HERE = Path(__file__).parent
MODELS = ("bert_large", "vit_g", "llama_1b", "gpt_2_7b", "llama_7b")
BATCHES = (128, 256, 512)
STEPS = (1, 2, 4, 8)
GAINS = (0.001, 0.01, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case with one number of steps; nothing is run."""

    cluster: str
    devices: int
    model: str
    batch: int
    steps: int = 1
    step_s: float = 0.0
    simulated_s: float = 0.0
    gap: float = 0.0
    cpu_s: float = 0.0  # of the planner


def planned(inputs: Inputs, row: Row) -> Row | None:
    """The row with what was found; None where nothing fits."""
    effort = Effort(recompute_steps=row.steps)
    start_s = time.process_time()
    try:
        solution = solve(inputs.setting, global_batch_size=row.batch, effort=effort)
    except PlanError:
        return None
    return replace(
        row,
        cpu_s=time.process_time() - start_s,
        step_s=solution.predicted.step_time_s,
        simulated_s=simulate(solution.plan, inputs.setting).step_time_s,
        gap=solution.relative_gap,
    )


def cases() -> Iterator[dict[int, Row]]:
    """Where a plan fits: its rows by number of steps."""
    for path in sorted((conf_dir() / "cluster" / "described").glob("*.yaml")):
        devices = Cluster.load(path).world_size
        for model, batch in product(MODELS, BATCHES):
            inputs = described(path.stem, f"model={model}")
            case = Row(cluster=path.stem, devices=devices, model=model, batch=batch)
            rows = [planned(inputs, replace(case, steps=steps)) for steps in STEPS]
            fitting = {row.steps: row for row in rows if row is not None}
            assert len(fitting) in (0, len(STEPS)), "all of it is always a choice"
            if fitting:
                yield fitting


def main() -> None:
    """All cases to partial.csv; what each number of steps gives to the screen."""
    found = list(cases())
    write_csv(HERE / "partial.csv", [row for rows in found for row in rows.values()])
    print(f"{len(found)} cases fit")
    for steps in STEPS:
        rows = [each[steps] for each in found]
        gains = [each[1].step_s / each[steps].step_s - 1 for each in found]
        simulated = [each[1].simulated_s / each[steps].simulated_s - 1 for each in found]
        cpu_s = [row.cpu_s for row in rows]
        numbers = ", ".join(f"{sum(g > least for g in gains)} > {least:.1%}" for least in GAINS)
        print(
            f"{steps} steps: mean {mean(gains):.2%}, best {max(gains):.2%} (simulated "
            f"{mean(simulated):.2%}, {max(simulated):.2%}), {numbers}; worst gap "
            f"{max(row.gap for row in rows):.1e}; CPU median {median(cpu_s):.2f} s, worst "
            f"{max(cpu_s):.2f} s"
        )
    best = sorted(found, key=lambda rows: rows[4].step_s / rows[1].step_s)
    for rows in best[:8]:
        row, gain = rows[4], rows[1].step_s / rows[4].step_s - 1
        print(f"  {row.cluster:22} {row.model:10} {row.batch:4}: {gain:.1%} faster")


if __name__ == "__main__":
    main()
