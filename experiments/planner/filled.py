"""How much of a budget do default plans fill, and what does it buy beyond 97 %?

    OMP_NUM_THREADS=1 python -m experiments.planner.filled

Every described cluster of conf/ with every model, as ``shardhet plan`` plans them by default.
Where a plan fills a budget beyond 97 %, the fastest plan that does not is searched for, too.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.common.machine import Environment
from experiments.common.results import markdown_table, write_csv
from experiments.published.inputs import MODELS, described
from shardhet.config.compose import conf_dir
from shardhet.config.planning import PlannerConf
from shardhet.planner import Demands, PlanError, PlanSolution, solve
from shardhet.planner.preference import FULL, TOLERANCE
from shardhet.pricing.setting import Setting

HERE = Path(__file__).parent
BATCH = PlannerConf().global_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One cluster and model; zeros where no plan fits."""

    cluster: str
    model: str
    fullest: float = 0.0  # part of the budget of the fullest device
    of_the_fastest: float = 0.0  # the same in the fastest plan
    slower: float = 0.0  # than the fastest plan, of its step
    slower_within: float = 0.0  # the fastest plan that fills at most 97 %; inf: none fits
    planner_s: float = 0.0  # of CPU


def fullest(solution: PlanSolution) -> float:
    """The part of the budget that the fullest device fills."""
    ranks = solution.predicted.ranks
    return max(each.memory.total_bytes / each.memory_budget_bytes for each in ranks)


def within(setting: Setting, fastest_s: float) -> float:
    """How much slower the fastest plan is that fills no budget beyond 97 %."""
    budgets = Demands().budgets(setting.cluster)
    smaller = {i: int(FULL * each) for i, each in enumerate(budgets)}
    try:
        found = solve(setting, global_batch_size=BATCH, demands=Demands().with_budgets(smaller))
    except PlanError:
        return float("inf")
    return found.predicted.step_time_s / fastest_s - 1


def filled(cluster: str, model: str) -> Filled:
    """The default plan, beside the fastest."""
    setting, started_s = described(cluster, f"model={model}").setting, time.process_time()
    try:
        chosen = solve(setting, global_batch_size=BATCH, tolerance=TOLERANCE)
    except PlanError:
        return Filled(cluster=cluster, model=model, planner_s=time.process_time() - started_s)
    planner_s = time.process_time() - started_s
    fastest = solve(setting, global_batch_size=BATCH)
    fastest_s, part = fastest.predicted.step_time_s, fullest(chosen)
    return Filled(
        cluster=cluster,
        model=model,
        fullest=part,
        of_the_fastest=fullest(fastest),
        slower=chosen.predicted.step_time_s / fastest_s - 1,
        slower_within=within(setting, fastest_s) if part > FULL else 0.0,
        planner_s=planner_s,
    )


def cases() -> Iterator[tuple[str, str]]:
    """All described clusters with all models."""
    for path in sorted((conf_dir() / "cluster" / "described").glob("*.yaml")):
        for model in MODELS:
            yield path.stem, model


def main() -> None:
    """filled.csv, and a table for the README."""
    rows = []
    for cluster, model in cases():
        rows.append(row := filled(cluster, model))
        print(row, flush=True)
    write_csv(HERE / "filled.csv", rows)
    planned = [row for row in rows if row.fullest]
    full = [row for row in planned if row.fullest > FULL]
    needless = [row for row in full if row.slower_within <= TOLERANCE]
    lines = [
        ("cases; planned", f"{len(rows)}; {len(planned)}"),
        (
            f"fastest plans beyond {FULL:.0%}",
            str(sum(r.of_the_fastest > FULL for r in planned)),
        ),
        (f"default plans beyond {FULL:.0%}", str(len(full))),
        ("of these, without a gain of 0.5 %", str(len(needless))),
        ("slower than the fastest, at most", f"{max(row.slower for row in planned):.2%}"),
    ]
    lines += [
        (f"{row.cluster}, {row.model}: {row.fullest:.1%}", f"{row.slower_within:.2%} slower")
        for row in full
    ]
    print(markdown_table(("", ""), lines))
    print(Environment.here().as_markdown("predictions"))


if __name__ == "__main__":
    main()
