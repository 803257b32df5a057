"""What share of the sum of their speeds do clusters that people have reach, and by which plans?

    python -m experiments.capability.run

Prices are those of stated.csv (links at 0.37 of their specification, 0.9 of the memory, 2e9
elements a second of optimizers on a host, whose memory has no limit), and beside them those
that ``shardhet plan`` takes by default.
"""

import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.results import Page, columns, console, parser_of
from shardhet.apps.plan import SPEC
from shardhet.apps.planning.inputs import load, read_request
from shardhet.config.planning import PlannerConf
from shardhet.planner import Constraints, PlanError, PlanSolution, solve
from shardhet.planner.stages.find import MAX_STAGES, find_pipeline
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.pricing.hosts import update_bytes
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm

HERE = Path(__file__).parent
BFLOAT16 = ("desktop", "small_desktop", "office_10", "office_3")  # the others are FP16
HOST_NUMELS_PER_S = 2e9  # of optimizers
AS_STATED = ("link_fraction=0.37", "usable_memory_fraction=0.9", "seq_len=2048")
BY_DEFAULT = ("seq_len=2048",)
ON_HOSTS = Constraints(may_keep_inputs_on_host=True, may_keep_optimizer_on_host=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cluster, model and batch; shares are of ``sum_of_speeds``, None where nothing fits."""

    cluster: str
    model: str
    batch: int
    sum_of_speeds: float  # samples/s of the devices, each alone and with endless memory
    stated_one_round: float | None
    one_round: float | None
    stated_rounds: float | None
    rounds: float | None
    stated_inputs_on_host: float | None
    inputs_on_host: float | None
    stated_optimizer_on_host: float | None
    optimizer_on_host: float | None  # with inputs there, too
    num_on_host: int | None  # devices whose optimizers are, then
    num_rounds: int | None
    gathers: str | None
    by_default: float | None  # with the prices that are taken by default
    search_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InStages:
    """The same for plans in stages."""

    cluster: str
    model: str
    batch: int
    stated_rounds: float | None
    stated_part: float | None  # of some devices alone
    stated_pipeline: float | None
    without_stages: float | None
    pipeline: float | None
    stages: str
    num_rounds: int | None
    gap: float | None  # to the compute of all devices
    by_default: float | None
    search_s: float  # of CPU


def scenario_of(cluster: str, model: str, batch: int, keys: Sequence[str]) -> Scenario:
    """What ``shardhet plan`` plans with."""
    keys = [*keys, f"cluster={HERE / 'clusters' / cluster}.yaml", f"model={model}"]
    keys += [f"precision={'BF16' if cluster in BFLOAT16 else 'FP16'}"]
    request = read_request(SPEC, [*keys, f"global_batch_size={batch}"])
    assert request is not None
    return load(SPEC, request, PlannerConf)[1].scenario


def planned(scenario: Scenario, batch: int, demands: Constraints) -> PlanSolution | None:
    """The fastest plan, if one fits."""
    try:
        return solve(scenario, global_batch_size=batch, constraints=demands, tolerance=0.0)
    except PlanError:
        return None


def pipelined(scenario: Scenario, batch: int) -> PipelineSolution | None:
    """What ``shardhet plan max_stages=4`` looks at."""
    return find_pipeline(
        scenario,
        global_batch_size=batch,
        smaller=partial(part_of, scenario),
        max_stages=MAX_STAGES,
        tolerance=0.0,
    )


def with_fast_hosts(scenario: Scenario) -> Scenario:
    """The scenario with the speed of hosts that is stated."""
    speed = update_bytes(num_moments=2) * HOST_NUMELS_PER_S
    nodes = tuple(replace(node, host_bytes_per_s=speed) for node in scenario.cluster.nodes)
    return replace(scenario, cluster=replace(scenario.cluster, nodes=nodes))


def gathers_of(plan: Plan) -> str:
    """How often a unit is gathered and reduced."""
    form = StepForm.of(plan)
    gathers = "every use"
    if not form.reshard_after_forward:
        gathers = "a round" if form.reshard_after_backward else "a step"
    return f"{gathers}, reduced {'a round' if form.reduce_each_round else 'a step'}"


def stated() -> Iterator[tuple[tuple[str, str, int], float, dict[str, Any]]]:
    """Cluster, model and batch of each row, the sum of speeds, and what was reached by plan."""
    with (HERE / "stated.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = row.pop("cluster"), row.pop("model"), int(row.pop("batch"))
            cells = {name: float(cell) if cell else None for name, cell in row.items()}
            yield key, float(row["sum_of_speeds"]), cells


def share(found: PlanSolution | PipelineSolution | None, total: float) -> float | None:
    """What is reached of the sum of speeds."""
    return None if found is None else round(found.samples_per_s / total, 3)


def row_of(key: tuple[str, str, int], total: float, cells: Any) -> Row:
    """One row of stated.csv, planned."""
    batch, scenario = key[2], scenario_of(*key, AS_STATED)
    fast, started_s = with_fast_hosts(scenario), time.process_time()
    found = planned(fast, batch, ON_HOSTS)
    search_s = time.process_time() - started_s
    inputs = Constraints(may_keep_inputs_on_host=True)
    plan = None if found is None else found.plan
    return Row(
        **dict(zip(("cluster", "model", "batch"), key, strict=True)),
        sum_of_speeds=total,
        stated_one_round=cells["today"],
        one_round=share(planned(scenario, batch, Constraints(max_rounds=1)), total),
        stated_rounds=cells["rounds"],
        rounds=share(planned(scenario, batch, Constraints()), total),
        stated_inputs_on_host=cells["inputs_on_host"],
        inputs_on_host=share(planned(scenario, batch, inputs), total),
        stated_optimizer_on_host=cells["optimizer_on_host"],
        optimizer_on_host=share(found, total),
        num_on_host=plan and sum(rank.optimizer_on_host for rank in plan.ranks),
        num_rounds=plan and plan.num_rounds,
        gathers=plan and gathers_of(plan),
        by_default=share(planned(scenario_of(*key, BY_DEFAULT), batch, ON_HOSTS), total),
        search_s=round(search_s, 2),
    )


def in_stages(key: tuple[str, str, int], total: float, cells: Any) -> InStages:
    """One row of stated.csv that has a pipeline, planned in stages."""
    batch, scenario, started_s = key[2], scenario_of(*key, AS_STATED), time.process_time()
    found = pipelined(scenario, batch)
    search_s = time.process_time() - started_s
    return InStages(
        **dict(zip(("cluster", "model", "batch"), key, strict=True)),
        stated_rounds=cells["rounds"],
        stated_part=cells["part_of_the_devices"],
        stated_pipeline=cells["pipeline"],
        without_stages=share(planned(scenario, batch, Constraints()), total),
        pipeline=share(found, total),
        stages="; ".join(
            f"{len(stage.units)} units on {','.join(map(str, positions))}"
            for stage, positions in (
                zip(found.plan.stages or (), found.groups, strict=True) if found else ()
            )
        ),
        num_rounds=found and found.plan.num_rounds,
        gap=found and round(found.relative_gap, 3),
        by_default=share(pipelined(scenario_of(*key, BY_DEFAULT), batch), total),
        search_s=round(search_s, 1),
    )


WHICH = {"cluster": "{0.cluster}", "model": "{0.model}", "batch": "{0.batch}"}


def main() -> None:
    """Every row, into results.csv, pipelines.csv and README.md."""
    options = parser_of(__doc__, quick="the first row; keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    found: dict[str, list[Any]] = {"results.csv": [], "pipelines.csv": []}
    for each in [*stated()][: 1 if options.quick else None]:
        found["results.csv"].append(row_of(*each))
        console.print(str(found["results.csv"][-1]), markup=False, soft_wrap=True)
        if each[2]["pipeline"] is not None:
            found["pipelines.csv"].append(in_stages(*each))
            console.print(str(found["pipelines.csv"][-1]), markup=False, soft_wrap=True)
    page.table(
        "shares of the sum of the devices' speeds",
        *columns(
            found["results.csv"],
            {
                **WHICH,
                "one round, stated": "{0.stated_one_round:.2f}",
                "one round": "{0.one_round:.2f}",
                "rounds, stated": "{0.stated_rounds:.2f}",
                "rounds": "{0.rounds:.2f}",
                "inputs on the host, stated": "{0.stated_inputs_on_host:.2f}",
                "inputs on the host": "{0.inputs_on_host:.2f}",
                "and optimizers, stated": "{0.stated_optimizer_on_host:.2f}",
                "and optimizers": "{0.optimizer_on_host:.2f}",
                "devices with it there": "{0.num_on_host:d}",
                "rounds then": "{0.num_rounds:d}",
                "a unit is gathered": "{0.gathers:}",
                "default prices": "{0.by_default:.2f}",
                "s of CPU": "{0.search_s:.1f}",
            },
        ),
    )
    page.table(
        "the same in stages",
        *columns(
            found["pipelines.csv"],
            {
                **WHICH,
                "rounds, stated": "{0.stated_rounds:.2f}",
                "part of the devices, stated": "{0.stated_part:.2f}",
                "pipeline, stated": "{0.stated_pipeline:.2f}",
                "without stages": "{0.without_stages:.2f}",
                "pipeline": "{0.pipeline:.2f}",
                "default prices": "{0.by_default:.2f}",
                "rounds then": "{0.num_rounds:d}",
                "gap": "{0.gap:.0%}",
                "CPU s": "{0.search_s:.1f}",
                "stages": "{0.stages}",
            },
        ),
    )
    page.keep(found)


if __name__ == "__main__":
    main()
