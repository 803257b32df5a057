"""What do pipelines of unlike groups reach on clusters with slow links, and how soon?

    python -m experiments.pipelines.run

Rows of stated.csv are priced as it was (links at 0.37 of their specification, 0.9 of the
memory), and beside it by default.  Large clusters are planned for as ``shardhet plan`` does.
"""

import csv
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from experiments.capability.run import AS_STATED, inputs_of, number_of, planned, shown
from experiments.common.results import Page
from shardhet.config.planning import PlannedPrecision
from shardhet.planner.stages.find import MAX_STAGES, find_pipeline
from shardhet.planner.stages.groups import Positions
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.pricing.setting import Setting

HERE = Path(__file__).parent
LARGE = {
    "128 GPUs in two regions": ("cluster=two_regions_128", "model=llama_7b"),
    "256 GPUs of four kinds in four regions": (
        f"cluster={HERE / 'four_regions_256.yaml'}",
        "model=llama_7b",
        "precision=FP16",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Shares of the sum of the devices' speeds; None where nothing fits."""

    cluster: str
    model: str
    batch: int
    stated_rounds: float | None
    stated_part: float | None
    stated_pipeline: float | None
    without_stages: float | None
    pipeline: float | None
    stages: str
    num_rounds: int | None
    gap: float | None  # to the compute of all devices
    by_default: float | None
    search_s: float  # of user CPU


def pipeline_of(
    cluster: str, model: str, batch: int, keys: tuple[str, ...]
) -> tuple[Setting, PipelineSolution | None]:
    """What ``shardhet plan max_stages=4`` looks at."""
    conf, inputs = inputs_of(cluster, model, batch, keys)
    setting = inputs.setting
    whole = replace(conf, precision=PlannedPrecision(setting.workload.param_dtype))

    def smaller(positions: Positions) -> Setting:
        return whole.derived(setting.cluster.only(positions), inputs.name).setting

    found = find_pipeline(
        setting,
        global_batch_size=batch,
        smaller=smaller,
        max_stages=MAX_STAGES,
        tolerance=0.0,
    )
    return setting, found


def rows() -> Iterator[Row]:
    """All rows of stated.csv."""
    with (HERE / "stated.csv").open(newline="") as file:
        stated = list(csv.DictReader(file))
    for each in stated:
        batch, total = int(each["batch"]), float(each["sum_of_speeds"])
        key = each["cluster"], each["model"], batch

        def share(rate: float | None, total: float = total) -> float | None:
            return None if rate is None else round(rate / total, 3)

        started_s = time.process_time()
        setting, found = pipeline_of(*key, AS_STATED)
        search_s = time.process_time() - started_s
        flat = planned(setting, batch)
        _, usual = pipeline_of(*key, ("seq_len=2048",))
        stages = ""
        if found is not None:
            stages = "; ".join(
                f"{len(stage.unit_fqns)} units on {','.join(map(str, stage.positions))}"
                for stage in found.stages
            )
        yield Row(
            cluster=key[0],
            model=key[1],
            batch=batch,
            stated_rounds=number_of(each["rounds"]),
            stated_part=number_of(each["part_of_the_devices"]),
            stated_pipeline=number_of(each["pipeline"]),
            without_stages=share(None if flat is None else flat.samples_per_s),
            pipeline=share(None if found is None else found.samples_per_s),
            stages=stages,
            num_rounds=None if found is None else found.num_rounds,
            gap=None if found is None else round(found.relative_gap, 3),
            by_default=share(None if usual is None else usual.samples_per_s),
            search_s=round(search_s, 1),
        )


def seconds_from_enter(keys: tuple[str, ...]) -> tuple[float, str]:
    """User seconds of the whole command, and its line on the predicted step."""
    command = [sys.executable, "-m", "shardhet.apps.main", "plan", *keys]
    command += ["global_batch_size=512", "max_stages=4", "what_if_s=0"]
    before_s = getrusage(RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took_s = getrusage(RUSAGE_CHILDREN).ru_utime - before_s
    said = [line for line in done.stdout.splitlines() if line.startswith("predicted step")]
    return took_s, said[0]


def main() -> None:
    """Every row and large cluster, into results.csv and README.md."""
    page = Page(HERE, is_kept=True)
    found = []
    for row in rows():
        found.append(row)
        print(row.cluster, row.model, row.batch, row.stated_pipeline, row.pipeline, flush=True)
    page.table(
        "shares of the sum of the devices' speeds",
        ("cluster", "model", "batch", "rounds, stated", "part of the devices, stated")
        + ("pipeline, stated", "without stages", "pipeline", "default prices")
        + ("rounds then", "gap", "CPU s", "stages"),
        [
            (
                row.cluster,
                row.model,
                str(row.batch),
                shown(row.stated_rounds),
                shown(row.stated_part),
                shown(row.stated_pipeline),
                shown(row.without_stages),
                shown(row.pipeline),
                shown(row.by_default),
                str(row.num_rounds or "-"),
                "-" if row.gap is None else f"{row.gap:.0%}",
                f"{row.search_s:.1f}",
                row.stages,
            )
            for row in found
        ],
    )
    timed = [(name, *seconds_from_enter(keys)) for name, keys in LARGE.items()]
    page.table(
        "user seconds from Enter",
        ("cluster", "s", "found"),
        [(name, f"{seconds:.1f}", line) for name, seconds, line in timed],
    )
    page.keep({"results.csv": found})


if __name__ == "__main__":
    main()
