"""What do stages gain that may keep inputs of units, and optimizers, on their hosts?

    python -m experiments.pipelines.on_host.run

Prices are those of ../stated.csv: links at 0.37 of their specification, 0.9 of the memory, 2e9
elements a second of optimizers on a host, whose memory has no limit.
"""

import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.capability.run import AS_STATED, inputs_of, shown, with_fast_hosts
from experiments.common.results import Page
from shardhet.config.planning import PlannedPrecision
from shardhet.planner import Demands
from shardhet.planner.stages.find import MAX_STAGES, find_pipeline
from shardhet.planner.stages.groups import Positions
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.pricing.setting import Setting

HERE = Path(__file__).parent
ON_HOSTS = Demands(may_keep_inputs_on_host=True, may_keep_optimizer_on_host=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Shares of the sum of the devices' speeds; None where nothing fits."""

    cluster: str
    model: str
    batch: int
    without: float | None  # everything on the devices
    stated: float  # with hosts
    on_hosts: float | None
    num_inputs: int  # devices that keep inputs there
    num_optimizers: int  # devices whose optimizers step there
    form: str
    stages: str
    search_s: float  # of user CPU


def pipeline_of(key: tuple[str, str, int], demands: Demands) -> PipelineSolution | None:
    """The best pipeline of a row with fast hosts."""
    conf, inputs = inputs_of(*key, AS_STATED)
    setting = with_fast_hosts(inputs.setting)
    whole = replace(conf, precision=PlannedPrecision(setting.workload.param_dtype))

    def smaller(positions: Positions) -> Setting:
        return whole.derived(setting.cluster.only(positions), inputs.name).setting

    return find_pipeline(
        setting,
        global_batch_size=key[2],
        smaller=smaller,
        max_stages=MAX_STAGES,
        demands=demands,
        tolerance=0.0,
    )


def form_of(found: PipelineSolution) -> str:
    """Rounds, and how often units are gathered and reduced."""
    form = found.plan.form
    gathers = "every use" if form.reshard_after_forward else "a step"
    reduces = "a round" if form.reduce_each_round else "a step"
    return f"{found.num_rounds}, gathered {gathers}, reduced {reduces}"


def stages_of(found: PipelineSolution) -> str:
    """Units, devices and rounds in flight of each stage."""
    return "; ".join(
        f"{len(stage.unit_fqns)} units on {','.join(map(str, stage.positions))}, "
        f"{stage.in_flight} in flight"
        for stage in found.stages
    )


def rows() -> Iterator[Row]:
    """All rows of stated.csv."""
    with (HERE.parent / "stated.csv").open(newline="") as file:
        stated = list(csv.DictReader(file))
    for each in stated:
        key = each["cluster"], each["model"], int(each["batch"])
        total = float(each["sum_of_speeds"])

        def share(found: PipelineSolution | None, total: float = total) -> float | None:
            return None if found is None else round(found.samples_per_s / total, 3)

        without = pipeline_of(key, Demands())
        started_s = time.process_time()
        found = pipeline_of(key, ON_HOSTS)
        search_s = time.process_time() - started_s
        ranks = () if found is None else found.plan.ranks
        yield Row(
            cluster=key[0],
            model=key[1],
            batch=key[2],
            without=share(without),
            stated=float(each["pipeline_host"]),
            on_hosts=share(found),
            num_inputs=sum(bool(rank.inputs_on_host) for rank in ranks),
            num_optimizers=sum(rank.optimizer_on_host for rank in ranks),
            form="" if found is None else form_of(found),
            stages="" if found is None else stages_of(found),
            search_s=round(search_s, 1),
        )


def main() -> None:
    """Every row to results.csv, and a table into README.md."""
    page = Page(HERE, is_kept=True)
    found = []
    for row in rows():
        found.append(row)
        print(row.cluster, row.model, row.batch, row.stated, row.on_hosts, flush=True)
    page.table(
        "shares of the sum of the devices' speeds",
        ("cluster", "model", "batch", "all on devices", "with hosts, stated", "with hosts")
        + ("inputs there", "optimizers there", "rounds", "CPU s", "stages"),
        [
            (
                row.cluster,
                row.model,
                str(row.batch),
                shown(row.without),
                shown(row.stated),
                shown(row.on_hosts),
                str(row.num_inputs),
                str(row.num_optimizers),
                row.form,
                f"{row.search_s:.1f}",
                row.stages,
            )
            for row in found
        ],
    )
    page.keep({"results.csv": found})


if __name__ == "__main__":
    main()
