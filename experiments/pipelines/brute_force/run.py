"""Is the pipeline that is found the best of all ordered partitions of up to six devices?

    nice python -m experiments.pipelines.brute_force.run           # goes on with results.csv
    python -m experiments.pipelines.brute_force.run --seeds 0 4 --only-show

For each drawn instance, every ordered choice of two to four disjoint groups of its devices is
tried, with all cuts, rounds, forms and numbers in flight.  What a bound says is no faster than
what is known is passed over.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from pathlib import Path

from experiments.common import by_seed
from experiments.common.results import BAR_HEADER, Bar, markdown_table
from experiments.pipelines.brute_force.instances import Instance, drawn
from shardhet.planner import Demands, PlanError, solve
from shardhet.planner.stages.find import PipelineSearch, find_pipeline
from shardhet.planner.stages.groups import MAX_STAGES, Stages
from shardhet.planner.stages.likely import FORMS, MORE_IN_FLIGHT, Trial

HERE = Path(__file__).parent
NUM_INSTANCES = 300
SEEDS = range(600, 600 + NUM_INSTANCES)  # the search was changed by what those before show
LEAST_GAIN = 1e-3  # stages are solved to this


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instance; seconds of a step, inf where nothing fits."""

    seed: int
    devices: int
    hosts: int
    units: int
    batch: int
    partitions: int  # that were tried
    looked_at: int  # of which no bound said that they are slower
    flat_s: float
    found_s: float
    best_s: float
    best: str  # where it is better than what was found
    search_s: float  # of CPU
    all_s: float

    @property
    def miss(self) -> float:
        """By which what was found is slower than the best pipeline."""
        return 0.0 if self.found_s == self.best_s else self.found_s / self.best_s - 1

    @property
    def planned_miss(self) -> float:
        """The same of plans, which have stages only where these are faster."""
        planned_s, best_s = min(self.flat_s, self.found_s), min(self.flat_s, self.best_s)
        return 0.0 if planned_s == best_s else planned_s / best_s - 1


def ordered_partitions(instance: Instance) -> Iterator[Stages]:
    """All of some devices in two to four stages; of those alike on a host, any."""
    cluster = instance.cluster
    labels = [(node.host, each.kind) for node in cluster.nodes for each in node.devices]
    seen = set()
    most = min(MAX_STAGES, cluster.world_size, len(instance.workload.units) - 1)
    for number in range(2, most + 1):
        for places in product(range(number + 1), repeat=len(labels)):
            stages = tuple(
                tuple(i for i, place in enumerate(places) if place == stage)
                for stage in range(number)
            )
            look = tuple(tuple(sorted(labels[i] for i in stage)) for stage in stages)
            if all(stages) and look not in seen:
                seen.add(look)
                yield stages


def best_of(search: PipelineSearch, stages: Stages, at_most_s: float) -> tuple[float, str]:
    """The fastest pipeline of these stages and its trial, if it takes less than ``at_most_s``.

    All cuts, rounds, forms and rounds in flight are tried, each once, but those of which a
    bound says that they take longer.  With one round it is the same how often units are
    reduced.
    """
    best = ""
    for cuts in combinations(range(1, len(search.units)), len(stages) - 1):
        for number in search.rounds:
            once, *others = (replace(form, num_rounds=number) for form in reversed(FORMS))
            any_form = Trial(cuts, once)
            if search.expected.least_s(stages, any_form, whatever_in_flight=True) >= at_most_s:
                continue
            seen = set()
            for form in (once, *others):
                for more in range(MORE_IN_FLIGHT + 1):
                    trial = Trial(cuts, form, more)
                    reduces = number > 1 and form.reduce_each_round
                    held = tuple(trial.in_flight(len(stages)))
                    key = form.reshard_after_forward, reduces, held
                    if key in seen:
                        continue
                    seen.add(key)
                    seconds = search.tried_s(stages, trial, at_most_s)
                    if seconds < at_most_s:
                        at_most_s, best = seconds * (1 - LEAST_GAIN), f"{stages} {trial}"
    return at_most_s, best


def row_of(seed: int) -> Row:
    """What is found, and the best."""
    instance = drawn(seed)
    setting, started_s = instance.setting, time.process_time()
    found = find_pipeline(
        setting, global_batch_size=instance.batch, smaller=instance.part, tolerance=0.0
    )
    search_s = time.process_time() - started_s
    found_s = inf if found is None else found.step_time_s
    try:
        flat = solve(setting, global_batch_size=instance.batch)
        flat_s = flat.predicted.step_time_s
    except PlanError:
        flat_s = inf
    search = PipelineSearch(setting, instance.part, instance.batch, Demands())
    started_s, best_s, best = time.process_time(), found_s, ""
    partitions = list(ordered_partitions(instance))
    bounds = sorted((search.speeds.least_step_s(each), each) for each in partitions)
    looked_at, limit_s = 0, best_s * (1 - LEAST_GAIN)
    for bound_s, stages in bounds:
        if bound_s >= limit_s:
            break
        looked_at += 1
        most_s, trial = best_of(search, stages, limit_s)
        if trial:
            limit_s, best = most_s, trial
            best_s = limit_s / (1 - LEAST_GAIN)
    return Row(
        seed=seed,
        devices=setting.cluster.world_size,
        hosts=len(setting.cluster.nodes),
        units=len(search.units),
        batch=instance.batch,
        partitions=len(partitions),
        looked_at=looked_at,
        flat_s=flat_s,
        found_s=found_s,
        best_s=best_s,
        best=best,
        search_s=round(search_s, 2),
        all_s=round(time.process_time() - started_s, 2),
    )


def told(row: Row) -> str:
    """One instance, in a line."""
    return (
        f"{row.seed:>4} {row.devices} devices, batch {row.batch}: {row.looked_at} of "
        f"{row.partitions} looked at, found {row.found_s:.5f}, best {row.best_s:.5f} "
        f"({row.miss:+.2%}), flat {row.flat_s:.5f}; {row.search_s} and {row.all_s} s {row.best}"
    )


def as_markdown(rows: list[Row]) -> str:
    """The bars, and where something better was tried."""
    with_any = [row for row in rows if row.best_s < inf]
    misses = [row for row in with_any if row.miss > LEAST_GAIN]
    bars = [
        Bar(claim="instances", measured=len(rows), at_least=NUM_INSTANCES),
        Bar(claim="those that a pipeline fits", measured=len(with_any)),
        Bar(
            claim="those where it is faster than no stages",
            measured=sum(row.best_s < row.flat_s for row in with_any),
        ),
        Bar(claim="misses of more than 1 %", measured=sum(row.miss > 0.01 for row in with_any)),
        Bar(
            claim="largest miss of a plan, with stages or without",
            measured=max(row.planned_miss for row in rows),
            at_most=0.01,
        ),
    ]
    table = [
        (
            f"{row.seed}",
            f"{row.devices}",
            f"{row.miss:.2%}",
            f"{row.planned_miss:.2%}",
            row.best,
        )
        for row in misses
    ]
    text = markdown_table(BAR_HEADER, [bar.cells for bar in bars])
    header = ("seed", "devices", "miss", "of the plan", "better")
    return f"{text}\n\n{markdown_table(header, table)}" if table else text


if __name__ == "__main__":
    by_seed.run(HERE, Row, row_of, as_markdown, SEEDS, doc=__doc__, told=told)
