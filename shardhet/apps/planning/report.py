"""The report of ``shardhet plan``: what each device does, what limits it, and alternatives.

The plan is shown at once.  What takes more planning follows, each row as it is known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from shardhet.apps.cli.quantities import (
    GIB,
    MIB,
    duration,
    of_budget_in,
    percent,
    unit_of,
)
from shardhet.apps.cli.streamed import StreamedTable, figures_table, say
from shardhet.apps.planning.fewer_devices import BetterWithout, estimated, ranges
from shardhet.apps.planning.heading import source_line
from shardhet.apps.planning.sentences import (
    OVER_GLOO,
    form_lines,
    pipeline_lines,
    pipeline_proof,
    preferred_lines,
    proven_line,
    units_in_short,
)
from shardhet.config.planning import Inputs
from shardhet.planner import Constraints, PlanSolution
from shardhet.planner.advice.explain import Gain, Resource, fullest_kinds, slowest_kinds
from shardhet.planner.idle import active_positions
from shardhet.planner.stages.bound import together_s
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.pricing.derive import meets_over_gloo
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.step_cost import RankCost, StepCost
from shardhet.records.by_hand import parts_of_groups
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.shown import (
    alike,
    microbatches,
    recomputed,
    samples_of_step,
    tokens_cell,
)
from shardhet.records.workload import Workload
from shardhet.simulator.stages import PipelinePrice
from shardhet.simulator.timeline import Timeline

MANY_ROWS = 32
MOST_SIMULATED = 256  # rounds: a step with more of them takes long


MOSTLY_HIDDEN = 0.1  # compute that sets the pace for so little of the step is hidden by links


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan and what is reported about it at once."""

    inputs: Inputs
    constraints: Constraints
    solution: PlanSolution | PipelineSolution
    times: Timeline  # simulated
    note: str  # on its matrices, or that it has stages
    without: BetterWithout | None = None  # devices that the plan leaves out


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Neighbouring devices that do the same."""

    label: str  # ``0-7 NVIDIA A100`` or ``0 NVIDIA A100``
    positions: range  # in the plan
    rank: RankPlan
    num_samples: int  # of a step, on one of them
    cost: RankCost
    share: float  # of the state, on one of them
    busy: float  # fraction of the step
    tokens: str  # of its samples; "": the plan has no context groups


def rows(report: PlanReport) -> list[DeviceRow]:
    """The plan's devices in plan order; neighbours that do the same share a row."""
    solution = report.solution
    return rows_of(solution.plan, solution.predicted, report.times, solution.places)


def rows_of(
    plan: Plan,
    predicted: StepCost | PipelinePrice,
    times: Timeline,
    places: Sequence[int] | None = None,
) -> list[DeviceRow]:
    """The rows of a plan with these predictions.

    Devices are named by ``places``, or by their positions in the plan.
    """
    costs, numbered = predicted.ranks, places or range(plan.world_size)
    stored = [cost.stored_numel for cost in costs]
    shares = list(parts_of_groups(stored, plan.groups))

    found, numbers = [], samples_of_step(plan)
    for positions in alike(plan, shares.__getitem__):
        i = max(positions, key=lambda each: costs[each].memory.total_bytes)
        numbers_here = ranges([numbered[each] for each in positions])
        found.append(
            DeviceRow(
                f"{numbers_here} {plan.ranks[i].device.kind or 'device'}",
                positions,
                plan.ranks[i],
                numbers[i],
                costs[i],
                shares[i],
                1 - times.idle_fraction(i),
                tokens_cell(plan.ranks[i]) if plan.context_groups else "",
            )
        )
    return found


def show_plan(report: PlanReport, console: Console) -> None:
    """Print the plan and what it reaches."""
    say(console, report.note)
    _show_devices(report, console)
    lines = list(_result(report))
    if report.without is not None:
        lines += [
            report.without.gain_line,
            f"This plan leaves them out. {source_line(report.inputs)}",
            *report.without.launch_lines(),
        ]
    say(console, *lines)


def owners_note(solution: PlanSolution) -> str:
    """How long the optimizers take where each matrix of a block is whole on one device."""
    slowest_s = solution.predicted.optimizer_s
    return (
        f"each matrix of a block is whole on one device: optimizers (Muon) take "
        f"{duration(slowest_s)} on the slowest, and could take "
        f"{duration(solution.optimizer_bound_s)} at best"
    )


def _columns(unit: str, plan: Plan) -> tuple[str, ...]:
    """The names of cells; memory is in ``unit``."""
    usual = (
        "device",
        "samples",
        "microbatches",
        "recomputes",
        "state",
        f"memory, {unit}",
        "busy",
    )
    staged = ("stage",) * bool(plan.stages)
    shared = ("tokens",) * bool(plan.context_groups)
    return (*staged, *usual, *shared, *("matrices", "optimizer") * bool(plan.whole_matrices))


def _cells(unit: str, row: DeviceRow, plan: Plan, units: Sequence[str]) -> tuple[str, ...]:
    """What devices do and store; memory in ``unit``.

    How many matrices it has whole, if any device has, and the seconds of its optimizer.
    """
    owned = (f"{sum(each.number for each in row.rank.owned or ()):,}",)
    staged: tuple[str, ...] = ()
    if plan.stages is not None:
        number = plan.groups.index(group := plan.group_of(row.positions[0]))
        own = plan.stages[number].units
        named = f"{number}: {units_in_short(own, units)}" * (row.positions[0] == group[0])
        staged, units = (named,), own
    return (
        *staged,
        row.label,
        f"{row.num_samples:,}",
        microbatches(row.rank.microbatch_sizes),
        recomputed(row.rank, units),
        f"{row.share:.2%}",
        _memory_cell(row, unit),
        f"{row.busy:.0%}",
        *(row.tokens,) * bool(row.tokens),
        *(*owned, duration(row.cost.optimizer_s)) * (row.rank.owned is not None),
    )


def _memory_cell(row: DeviceRow, unit: str) -> str:
    """``18.1 of 21.6 (24 on the card)``."""
    text = of_budget_in(unit, row.cost.memory.total_bytes, row.cost.memory_budget_bytes)
    card = row.rank.device.memory_capacity_bytes
    if not card:
        return text
    return f"{text} ({card / (GIB if unit == 'GiB' else MIB):,.0f} on the card)"


def _show_devices(report: PlanReport, console: Console) -> None:
    units = [unit.fqn for unit in report.inputs.scenario.workload.units]
    found = rows(report)
    unit = unit_of(max(row.cost.memory_budget_bytes for row in found))
    plan = report.solution.plan
    columns = _columns(unit, plan)
    lines = [_cells(unit, row, plan, units) for row in found]
    if len(lines) > MANY_ROWS:  # laying them out takes a second where they are hundreds
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        streamed = StreamedTable(console, list(zip(columns, widths, strict=True)))
        for cells in lines:
            streamed.add_row(*cells)
        streamed.end()
        return
    table = figures_table(*columns, num_left=columns.index("device") + 1, wraps=True)
    for cells in lines:
        table.add_row(*cells)
    console.print(table)


def _result(report: PlanReport) -> Iterator[str]:
    solution, workload = report.solution, report.inputs.scenario.workload
    part = speed_part(report.inputs.scenario, solution)
    step_s = solution.predicted.step_time_s
    yield predicted_line(step_s, solution.samples_per_s, part, workload)
    yield from form_lines(solution.plan, workload)
    if meets_over_gloo(report.inputs.scenario.cluster):
        yield OVER_GLOO
    yield from _on_host_lines(report)
    if isinstance(solution, PipelineSolution):
        yield from pipeline_lines(solution, report.inputs.scenario.cluster)
        return
    active = active_positions(solution)
    unused = sorted({*range(solution.plan.world_size)}.difference(active))
    if unused:
        yield (
            f"Unused devices: {ranges(unused)}. They compute and store nothing, and "
            "collectives run without them"
            + "; leave_out=auto says how to launch without them" * (not report.note)
            + f".{estimated(report.inputs.scenario, active)}"
        )


def predicted_line(step_s: float, samples_per_s: float, part: float, workload: Workload) -> str:
    """What a plan reaches, which is ``part`` of the sum of the devices' speeds."""
    tokens = workload.tokens_per_sample
    return (
        f"predicted step {duration(step_s)}: {samples_per_s:,.4g} samples/s"
        + f", {samples_per_s * tokens:,.0f} tokens/s" * (tokens > 1)
        # With parts of samples, which some cards compute faster, it may be more than all of it.
        + f"; {part:.2f} of the sum of the devices' speeds" * (part <= 1)
    )


def proof_lines(report: PlanReport) -> Iterator[str]:
    """What was proven of the plan."""
    solution = report.solution
    if solution.plan.num_rounds <= MOST_SIMULATED:
        yield f"The simulated step takes {duration(report.times.step_time_s)}."
    if isinstance(solution, PipelineSolution):
        yield pipeline_proof(solution, report.inputs.scenario.workload)
    elif not report.note:
        yield proven_line(solution, report.constraints)
        yield from preferred_lines(solution)


def speed_part(scenario: Scenario, solution: PlanSolution | PipelineSolution) -> float:
    """Of the sum of the devices' speeds, what the plan reaches."""
    seconds = together_s(scenario, solution.plan.global_batch_size)
    if isinstance(solution, PipelineSolution):  # whose devices may have the units they suit
        seconds = solution.lower_bound_s
    return seconds / solution.predicted.step_time_s


def _on_host_lines(report: PlanReport) -> Iterator[str]:
    """Who keeps inputs of units or the state on the host, and what that takes there."""
    cluster, solution = report.inputs.scenario.cluster, report.solution
    costs = dict(zip(solution.places, solution.predicted.ranks, strict=True))
    for row in rows(report):
        yield from _row_on_host(row, report.inputs.scenario.workload)
    for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
        taken = sum(costs[i].memory.host_bytes for i in here if i in costs) / GIB
        if taken and node.host_memory_bytes is None:
            yield (
                f"{node.host}: {taken:,.1f} GiB of its memory; how much it has is not stated "
                "(host_memory_bytes)."
            )


def _row_on_host(row: DeviceRow, workload: Workload) -> Iterator[str]:
    """What devices keep on their hosts."""
    rank, memory = row.rank, row.cost.memory
    each = " each" if len(row.positions) > 1 else ""
    state_bytes = int(row.cost.stored_numel * workload.state_bytes_per_element)
    state_bytes *= rank.optimizer_on_host
    if rank.inputs_on_host:
        size = (memory.host_bytes - state_bytes) / GIB
        yield (
            f"{row.label}: the inputs of recomputed units wait for backward in the memory "
            f"of the host (inputs_on_host), {size:,.1f} GiB{each}."
        )
    if state_bytes:
        kept = memory.resting_bytes / GIB
        yield (
            f"{row.label}: the optimizer steps in the memory of the host "
            f"(optimizer_on_host), because there its part of the state takes "
            f"{state_bytes / GIB:,.1f} GiB{each} and on the device {kept:,.1f}."
        )


def pace_line(solution: PlanSolution) -> str:
    """What the parts of the step are paced by."""
    predicted = solution.predicted
    step_s, overhead_s = predicted.step_time_s, predicted.overhead_s
    overhead = f" {overhead_s / step_s:.0%} is the runtime's own time." if overhead_s else ""
    return (
        f"Compute sets the pace for {_compute_part(predicted):.0%} of the step, "
        f"links for {(_links_s(predicted) + predicted.exposed_comm_s) / step_s:.0%}, and "
        f"the optimizer for {predicted.optimizer_s / step_s:.0%}.{overhead}"
    )


def _links_s(predicted: StepCost) -> float:
    return sum(turn.seconds for turn in predicted.turns if turn.is_paced_by_links)


def _compute_part(predicted: StepCost) -> float:
    """The part of the step in which a device's compute sets the pace."""
    turns_s = predicted.forward_s + predicted.backward_s
    return (turns_s - _links_s(predicted)) / predicted.step_time_s


def limit_lines(solution: PlanSolution, gains: Sequence[Gain]) -> Iterator[str]:
    """What limits the plan, in words, by the gains from more of each resource."""
    tenths = [gain for gain in gains if gain.variant.is_limit and not gain.is_none]
    fullest = fullest_kinds(solution)
    if tenths:
        limit = max(tenths, key=lambda gain: gain.relative).variant.resource
        of_what: dict[Resource | None, str] = {
            Resource.COMPUTE: f"compute, which takes longest on {slowest_kinds(solution)}",
            Resource.MEMORY: f"memory{', which is full on ' * bool(fullest)}{fullest}",
            Resource.LINKS: f"links{_beside_compute(solution.predicted)}",
        }
        yield f"What limits it: {of_what[limit]}."
    else:
        yield "A tenth more compute, memory or bandwidth would change almost nothing."
    for gain in gains:
        if gain.variant.is_endless and not gain.is_none:
            where = f" (full: {fullest})" if fullest else ""
            yield (
                f"With {gain.variant.change} memory it would gain "
                f"{percent(gain.relative)}{where}."
            )


def _beside_compute(predicted: StepCost) -> str:
    """What more samples would cost where links limit."""
    compute = _compute_part(predicted)
    if compute < MOSTLY_HIDDEN:
        return "; a larger global batch would cost little if memory has room for it"
    return f"; a larger global batch adds to the {compute:.0%} that compute takes"
