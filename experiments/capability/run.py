"""What share of the sum of their speeds do clusters of people reach, in one round and more?

    python -m experiments.capability.run

Prices are those of stated.csv (links at 0.37 of their specification, 0.9 of the memory, 2e9
elements a second of optimizers on a host, whose memory has no limit), and beside them those
that ``shardhet plan`` takes by default.
"""

import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common.results import Page
from shardhet.apps.plan import DOOR
from shardhet.apps.planning.inputs import load, read_request
from shardhet.config.planning import Inputs, PlannerConf
from shardhet.planner import Demands, PlanError, PlanSolution, solve
from shardhet.pricing.hosts import UPDATE_BYTES
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan

HERE = Path(__file__).parent
BFLOAT16 = ("desktop", "small_desktop", "office_10", "office_3")  # the others are FP16
HOST_NUMELS_PER_S = 2e9  # of optimizers
AS_STATED = ("link_fraction=0.37", "usable_memory_fraction=0.9", "seq_len=2048")


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


def inputs_of(
    cluster: str, model: str, batch: int, keys: tuple[str, ...]
) -> tuple[PlannerConf, Inputs]:
    """What ``shardhet plan`` reads."""
    precision = "BF16" if cluster in BFLOAT16 else "FP16"
    path = HERE / "clusters" / f"{cluster}.yaml"
    keys = (*keys, f"cluster={path}", f"model={model}", f"precision={precision}")
    request = read_request(DOOR, [*keys, f"global_batch_size={batch}"])
    assert request is not None
    return load(DOOR, request, PlannerConf)


def setting_of(cluster: str, model: str, batch: int, keys: tuple[str, ...]) -> Setting:
    """What ``shardhet plan`` plans with."""
    return inputs_of(cluster, model, batch, keys)[1].setting


def planned(
    setting: Setting,
    batch: int,
    max_rounds: int | None = None,
    *,
    on_host: bool = False,
    optimizer_on_host: bool = False,
) -> PlanSolution | None:
    """The fastest plan, if one fits."""
    demands = Demands(
        max_rounds=max_rounds,
        may_keep_inputs_on_host=on_host,
        may_keep_optimizer_on_host=optimizer_on_host,
    )
    try:
        return solve(setting, global_batch_size=batch, demands=demands, tolerance=0.0)
    except PlanError:
        return None


def with_fast_hosts(setting: Setting) -> Setting:
    """The setting with the speed of hosts that is stated."""
    speed = UPDATE_BYTES * HOST_NUMELS_PER_S
    nodes = tuple(replace(node, host_bytes_per_s=speed) for node in setting.cluster.nodes)
    return replace(setting, cluster=replace(setting.cluster, nodes=nodes))


def gathers_of(plan: Plan) -> str:
    """How often a unit is gathered and reduced."""
    form = plan.form
    gathers = "every use"
    if not form.reshard_after_forward:
        gathers = "a round" if form.reshard_after_backward else "a step"
    return f"{gathers}, reduced {'a round' if form.reduce_each_round else 'a step'}"


def num_on_host(found: PlanSolution) -> int:
    """Devices whose optimizers step on hosts."""
    return sum(rank.optimizer_on_host for rank in found.plan.ranks)


def number_of(cell: str) -> float | None:
    """A cell of stated.csv."""
    return float(cell) if cell else None


def rows() -> Iterator[Row]:
    """All rows of stated.csv."""
    with (HERE / "stated.csv").open(newline="") as file:
        stated = list(csv.DictReader(file))
    for each in stated:
        batch, total = int(each["batch"]), float(each["sum_of_speeds"])
        key = each["cluster"], each["model"], batch

        def share(found: PlanSolution | None, total: float = total) -> float | None:
            return None if found is None else round(found.samples_per_s / total, 3)

        setting = setting_of(*key, AS_STATED)
        one = planned(setting, batch, max_rounds=1)
        without, inputs = planned(setting, batch), planned(setting, batch, on_host=True)
        fast, started_s = with_fast_hosts(setting), time.process_time()
        found = planned(fast, batch, on_host=True, optimizer_on_host=True)
        search_s = time.process_time() - started_s
        by_default = setting_of(*key, ("seq_len=2048",))
        yield Row(
            cluster=key[0],
            model=key[1],
            batch=batch,
            sum_of_speeds=total,
            stated_one_round=number_of(each["today"]),
            one_round=share(one),
            stated_rounds=number_of(each["rounds"]),
            rounds=share(without),
            stated_inputs_on_host=number_of(each["inputs_on_host"]),
            inputs_on_host=share(inputs),
            stated_optimizer_on_host=number_of(each["optimizer_on_host"]),
            optimizer_on_host=share(found),
            num_on_host=None if found is None else num_on_host(found),
            num_rounds=None if found is None else found.plan.num_rounds,
            gathers=None if found is None else gathers_of(found.plan),
            by_default=share(planned(by_default, batch, on_host=True, optimizer_on_host=True)),
            search_s=round(search_s, 2),
        )


def shown(value: float | None) -> str:
    """A share, or a dash where nothing fits."""
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    """Every row to results.csv, and a table into README.md."""
    page = Page(HERE, is_kept=True)
    found = []
    for row in rows():
        found.append(row)
        print(row.cluster, row.model, row.batch, row.rounds, row.optimizer_on_host, flush=True)
    page.table(
        "shares of the sum of the devices' speeds",
        ("cluster", "model", "batch", "one round, stated", "planned", "rounds, stated")
        + ("planned", "inputs on the host, stated", "planned")
        + ("and optimizers, stated", "planned", "devices with it there", "rounds then")
        + ("a unit is gathered", "default prices", "s of CPU"),
        [
            (
                row.cluster,
                row.model,
                str(row.batch),
                shown(row.stated_one_round),
                shown(row.one_round),
                shown(row.stated_rounds),
                shown(row.rounds),
                shown(row.stated_inputs_on_host),
                shown(row.inputs_on_host),
                shown(row.stated_optimizer_on_host),
                shown(row.optimizer_on_host),
                str(row.num_on_host if row.num_on_host is not None else "-"),
                str(row.num_rounds or "-"),
                row.gathers or "-",
                shown(row.by_default),
                f"{row.search_s:.1f}",
            )
            for row in found
        ],
    )
    page.keep({"results.csv": found})


if __name__ == "__main__":
    main()
