"""The report of ``shardhet plan max_stages=N``: a pipeline, why it is cut there, and rivals."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise, takewhile
from math import ceil, inf

from rich.console import Console
from rich.table import Table

from shardhet.apps.cli.quantities import MIB, counted, duration, unit_of
from shardhet.apps.cli.streamed import figures_table, say
from shardhet.apps.planning.fewer_devices import named, ranges
from shardhet.apps.planning.report import (
    Row,
    cells_in,
    columns_in,
    on_host_lines,
    predicted_line,
    rows_of,
)
from shardhet.apps.planning.sentences import form_lines, margin_line
from shardhet.config.planning import Inputs, PlannerConf
from shardhet.planner import Demands, PlanError, PlanSolution, solve
from shardhet.planner.idle import PartPlan
from shardhet.planner.search.search import Effort
from shardhet.planner.stages.find import find_pipeline
from shardhet.planner.stages.groups import Positions
from shardhet.planner.stages.solution import PipelineSolution, StageSolution
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, Link

LEAST_PART = 1e-3  # of a link's bandwidth that is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """A pipeline and what it is compared with."""

    inputs: Inputs
    solution: PipelineSolution
    settings: tuple[Setting, ...]  # of its stages
    flat: PlanSolution | None  # of all devices without stages; None: nothing fits
    # Parts of which a plan fits, in the precision that is its best.
    alone: tuple[tuple[Positions, PlanSolution, str], ...]


def faster_pipeline(
    conf: PlannerConf,
    inputs: Inputs,
    flat: PlanSolution | None,
    fewer: PartPlan | None,
    *,
    demands: Demands,
    effort: Effort,
) -> PipelineReport | None:
    """A pipeline that is faster than the plan without stages, ``flat``; None if none was found.

    It is shown beside plans of parts of the cluster: ``fewer``, and the devices of each stage.
    All stages compute in the precision of the whole; a part alone may do so in another.
    """
    flat_s = inf if flat is None else flat.predicted.step_time_s
    found = pipeline_below(conf, inputs, demands, flat_s)
    if found is None:
        return None
    alone = []
    if fewer is not None:
        alone.append((fewer.positions, fewer.solution, fewer.setting.workload.param_dtype))
    alone_in = replace(conf, max_stages=1).part_of(inputs, keeps_precision=False)
    for positions in found.groups:
        with suppress(PlanError):
            setting = alone_in(positions)
            solution = solve(
                setting,
                global_batch_size=conf.global_batch_size,
                demands=demands.only(positions),
                effort=effort,
                is_bounded=False,
            )
            alone.append((positions, solution, setting.workload.param_dtype))
    return PipelineReport(
        inputs=inputs,
        solution=found,
        settings=tuple(map(conf.part_of(inputs), found.groups)),
        flat=flat,
        alone=tuple(alone),
    )


def pipeline_below(
    conf: PlannerConf, inputs: Inputs, demands: Demands, at_most_s: float
) -> PipelineSolution | None:
    """A pipeline whose step is shorter than this; None if none was found."""
    found = find_pipeline(
        inputs.setting,
        global_batch_size=conf.global_batch_size,
        smaller=conf.part_of(inputs),
        max_stages=conf.max_stages,
        demands=demands,
        tolerance=conf.tolerance,
        at_most_s=at_most_s,
    )
    return None if found is None or found.step_time_s >= at_most_s else found


def show_pipeline(report: PipelineReport, console: Console, *, explains: bool = False) -> None:
    """Print the pipeline, what it reaches, what it is compared with, and what was proven."""
    found = report.solution
    say(console, f"A pipeline of {counted(len(found.stages), 'stage')}:")
    console.print(_table(report))
    proof = _proof(report) if explains else ()
    said = (_result(report), _on_host(report), _hand_over(found), _rivals(report), proof)
    say(console, *chain(*said))


def _table(report: PipelineReport) -> Table:
    budgets = report.inputs.setting.cluster.memory_budget_bytes
    most = max(budgets(i) for group in report.solution.groups for i in group)
    unit = unit_of(most)
    units = [fqn for stage in report.solution.stages for fqn in stage.unit_fqns]
    table = figures_table(
        "stage", "device", *columns_in(unit, report.solution.plan), num_left=2, wraps=True
    )
    for number, stage in enumerate(report.solution.stages):
        for i, row in enumerate(_rows(stage, report.solution.step_time_s)):
            table.add_row(
                f"{number}: {units_in_short(stage.unit_fqns, units)}" if i == 0 else "",
                _label(stage, row),
                *cells_in(unit, row, stage.unit_fqns),
            )
    return table


def _rows(stage: StageSolution, step_s: float) -> list[Row]:
    costs = stage.solution.predicted.ranks

    def busy(i: int) -> float:
        return (costs[i].forward_s + costs[i].backward_s + costs[i].optimizer_s) / step_s

    return rows_of(stage.solution.plan, stage.solution.predicted, busy)


def _label(stage: StageSolution, row: Row) -> str:
    return f"{ranges([stage.positions[p] for p in row.positions])} {row.kind}"


def _on_host(report: PipelineReport) -> Iterator[str]:
    step_s = report.solution.step_time_s
    for stage in report.solution.stages:
        labelled = [(_label(stage, row), row) for row in _rows(stage, step_s)]
        yield from on_host_lines(labelled, report.inputs)


def units_in_short(fqns: Sequence[str], of_model: Sequence[str]) -> str:
    """Units in few words: ``embed, layers 0-17``, without what all names begin with."""
    paths = [fqn.split(".") for fqn in of_model if fqn]
    by_place = zip(*(path[:-1] for path in paths), strict=False)
    num_shared = len([*takewhile(lambda names: len(set(names)) == 1, by_place)])
    while num_shared and any(path[num_shared].isdigit() for path in paths):
        num_shared -= 1  # "layers" says what the numbers are of
    found: list[tuple[str, list[int]]] = []
    for fqn in fqns:
        *names, last = fqn.split(".")[num_shared:]
        name = ".".join(names if last.isdigit() else [*names, last])
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].extend([int(last)] if last.isdigit() else [])
    return ", ".join(f"{name} {ranges(numbers)}".strip() for name, numbers in found)


def _result(report: PipelineReport) -> Iterator[str]:
    found, workload = report.solution, report.inputs.setting.workload
    part = found.lower_bound_s / found.step_time_s
    yield predicted_line(found.step_time_s, found.samples_per_s, part, workload)
    plan = found.plan
    yield from form_lines(plan, workload)
    in_flight = ", ".join(str(stage.in_flight) for stage in found.stages)
    seconds = ", ".join(duration(stage.times.round_s) for stage in found.stages)
    yield f"A round takes {seconds}; at most {in_flight} are in flight."
    if unused := unused_in(found, report.inputs):
        yield f"Left out: {named(report.inputs.setting.cluster, unused)}. Start no ranks there."
    yield "shardhet train plan=file runs plans with stages (docs/limits.md)."


def _proof(report: PipelineReport) -> Iterator[str]:
    """What stays free on the devices, and what was proven of the pipeline."""
    found, setting = report.solution, report.inputs.setting
    if (free := margin_line(report.settings)) is not None:
        yield free
    yield (
        f"No plan in {setting.workload.param_dtype}, with stages or without, is predicted to "
        f"be more than {ceil(100 * found.relative_gap)}% faster: the compute alone takes all "
        f"devices {duration(found.lower_bound_s)}. Cuts, rounds and rounds in flight were "
        "improved until no neighbour was faster; nothing proves that they are the best."
    )


def unused_in(found: PipelineSolution, inputs: Inputs) -> list[int]:
    """The positions of devices that no stage has."""
    used = {i for group in found.groups for i in group}
    return [i for i in range(inputs.setting.cluster.world_size) if i not in used]


def _hand_over(found: PipelineSolution) -> Iterator[str]:
    """What goes over the links between stages."""
    for i, (hop, (one, other)) in enumerate(
        zip(found.hops, pairwise(found.stages), strict=True)
    ):
        number = f"{hop.num_links} x " * (hop.num_links > 1)
        back = (
            f"{_mib(hop.back_bytes)} back: {duration(hop.seconds)} and {duration(hop.back_s)}"
        )
        if hop.back_bytes == hop.nbytes:
            back = f"as much back: {duration(hop.seconds)} each"
        yield (
            f"Stage {i} hands stage {i + 1} {_mib(hop.nbytes)} a round over "
            f"{number}{_gbit_per_s(hop.link):,.4g} Gbit/s, and gets {back}, beside rounds of "
            f"{duration(max(one.times.round_s, other.times.round_s))}."
        )


def _mib(nbytes: int) -> str:
    mib = nbytes / MIB
    return f"{mib:,.{0 if mib >= 10 else 2}f} MiB"


def _rivals(report: PipelineReport) -> Iterator[str]:
    """Other ways to use the devices, and when they would win."""
    found, cluster = report.solution, report.inputs.setting.cluster
    step_s = found.step_time_s
    if report.flat is None:
        yield "Without stages no plan fits."
    else:
        flat_s = report.flat.predicted.step_time_s
        yield f"Without stages: {duration(flat_s)} a step, {flat_s / step_s:.2f} times as long."
    if not report.alone:
        yield "No stage's devices alone can train the model."
        return
    positions, best, dtype = min(report.alone, key=lambda e: e[1].predicted.step_time_s)
    seconds = best.predicted.step_time_s
    own = report.inputs.setting.workload.param_dtype
    formats = f" (in {dtype} instead of {own})" * (dtype != own)
    yield (
        f"Only {named(cluster, positions)}: {duration(seconds)} a step, "
        f"{seconds / step_s:.2f} times as long{formats}."
    )
    slowest = min(found.hops, key=lambda hop: _gbit_per_s(hop.link) * hop.num_links).link
    if any(_crosses(cluster, group, slowest) for group in (positions, *found.groups)):
        return  # collectives would take longer, too
    part = _part_with(found, slowest, seconds)
    if part is not None:
        rate, who = _gbit_per_s(slowest), "it" if len(positions) == 1 else "they"
        yield (
            f"Below {rate * part:,.2g} Gbit/s, in place of {rate:,.4g} between stages, {who} "
            "alone would be faster than this cut in these rounds; another may be faster still."
        )


def _gbit_per_s(link: Link) -> float:
    return link.bandwidth_bytes_per_s * 8 / 1e9


def _crosses(cluster: Cluster, positions: Positions, link: Link) -> bool:
    """Whether collectives among these devices may cross the link."""
    with suppress(ValueError):  # not all of their links are stated
        return link in cluster.only(positions).links
    return True


def _part_with(found: PipelineSolution, link: Link, seconds: float) -> float | None:
    """The part of the link's bandwidth at which the pipeline takes so long; None: below all."""
    low, high = LEAST_PART, 1.0
    if not found.step_time_s < seconds < found.step_time_over(link, low):
        return None
    for _ in range(30):
        middle = (low * high) ** 0.5
        is_longer = found.step_time_over(link, middle) > seconds
        low, high = (middle, high) if is_longer else (low, middle)
    return high
