"""Recomputing a part of the blocks, on each device as much as it needs: what does it give?

    OMP_NUM_THREADS=1 python -m experiments.planner.partial

Every described cluster and model as ``shardhet plan`` reads them, planned with a kind of unit
recomputed at once (1 step) and in 2, 4 and 8 steps.  Predictions: nothing is run.
"""

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

from shardhet.apps.common.planning_input import Request, load
from shardhet.apps.plan import DOOR
from shardhet.config.compose import conf_dir
from shardhet.config.planning import Inputs, PlannerConf, register_planning_schemas
from shardhet.planner import Effort, PlanError, solve
from shardhet.records.cluster import Cluster
from shardhet.simulator.simulation import simulate

HERE = Path(__file__).parent
MODELS = ("bert_large", "vit_g", "llama_1b", "gpt_2_7b", "llama_7b")
BATCHES = (128, 256, 512)
STEPS = (1, 2, 4, 8)
GAINS = (0.001, 0.01, 0.05)
CASE = ["cluster", "devices", "model", "batch"]
MEASURES = ["steps", "step_s", "simulated_s", "gap", "cpu_s"]


def described(cluster: str, model: str) -> Inputs:
    """What ``shardhet plan`` plans for."""
    register_planning_schemas()
    request = Request((f"cluster=described/{cluster}", f"model={model}"), (), None)
    return load(DOOR, request, PlannerConf)[1]


def planned(inputs: Inputs, batch: int, steps: int) -> tuple[float, ...] | None:
    """Predicted and simulated step, gap, the planner's CPU seconds; None where nothing fits."""
    effort = Effort(recompute_steps=steps)
    start_s = time.process_time()
    try:
        solution = solve(inputs.setting, global_batch_size=batch, effort=effort, num_rescored=1)
    except PlanError:
        return None
    cpu_s = time.process_time() - start_s
    simulated_s = simulate(solution.plan, inputs.setting).step_time_s
    return (solution.predicted.step_time_s, simulated_s, solution.relative_gap, cpu_s)


def cases() -> Iterator[tuple[str, int, str, int, dict[int, tuple[float, ...]]]]:
    """Where a plan fits: cluster, devices, model, batch, and the plans by number of steps."""
    for path in sorted((conf_dir() / "cluster" / "described").glob("*.yaml")):
        size = Cluster.load(path).world_size
        for model in MODELS:
            inputs = described(path.stem, model)
            for batch in BATCHES:
                plans = {steps: planned(inputs, batch, steps) for steps in STEPS}
                fitting = {steps: plan for steps, plan in plans.items() if plan is not None}
                assert len(fitting) in (0, len(STEPS)), "all of it is always a choice"
                if fitting:
                    yield path.stem, size, model, batch, fitting


def main() -> None:
    """All cases to partial.csv; what each number of steps gives to the screen."""
    found = list(cases())
    with (HERE / "partial.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*CASE, *MEASURES])
        for *case, plans in found:
            writer.writerows([*case, steps, *plan] for steps, plan in plans.items())
    print(f"{len(found)} cases fit")
    for steps in STEPS:
        columns = list(zip(*(plans[steps] for *_, plans in found), strict=True))
        gains, simulated = (
            [plans[1][i] / plans[steps][i] - 1 for *_, plans in found] for i in (0, 1)
        )
        numbers = ", ".join(f"{sum(g > least for g in gains)} > {least:.1%}" for least in GAINS)
        print(
            f"{steps} steps: mean {mean(gains):.2%}, best {max(gains):.2%} (simulated "
            f"{mean(simulated):.2%}, {max(simulated):.2%}), {numbers}; worst gap "
            f"{max(columns[2]):.1e}; CPU median {median(columns[3]):.2f} s, worst "
            f"{max(columns[3]):.2f} s"
        )
    best = sorted(found, key=lambda each: each[-1][4][0] / each[-1][1][0])
    for cluster, _, model, batch, plans in best[:8]:
        print(
            f"  {cluster:22} {model:10} {batch:4}: {plans[1][0] / plans[4][0] - 1:.1%} faster"
        )


if __name__ == "__main__":
    main()
