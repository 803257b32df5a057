"""Draw a plan and its simulated step as figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardhet.apps.cli.plots import DeviceBar, TimelineTrack, draw_plan
from shardhet.apps.planning.report import DeviceRow, PlanReport, rows
from shardhet.pricing.step_cost import MemoryParts
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Timeline, Work


def draw_report(report: PlanReport, path: Path) -> None:
    """Draw the plan's devices and the timeline of its step."""
    found = rows(report)
    bars = [
        DeviceBar(
            label=row.label,
            num_samples=row.rank.rank_batch_size,
            state_share=row.share,
            bytes_by_part=_bytes_by_part(row.cost.memory),
            budget_bytes=row.cost.memory_budget_bytes,
        )
        for row in found
    ]
    inputs, plan = report.inputs, report.solution.plan
    title = (
        f"{inputs.name} on {plan.world_size} devices, {plan.global_batch_size} "
        f"samples: {report.solution.samples_per_s:,.4g} samples/s predicted"
    )
    timeline = simulate(plan, inputs.scenario)
    draw_plan(title, bars, tracks(timeline, found), path)


def tracks(timeline: Timeline, found: Sequence[DeviceRow]) -> list[TimelineTrack]:
    """One lane per row of devices that do the same, and one for the links."""
    drawn = []
    for row in found:
        rank = timeline.ranks[row.positions[0]]
        spans = [(each.work.value, each.start_s, each.seconds) for each in rank.events]
        held = [(point.time_s, point.nbytes) for point in rank.memory]
        held.append((timeline.step_time_s, held[-1][1]))
        budget = row.cost.memory_budget_bytes
        track = TimelineTrack(
            label=row.label, spans=spans, memory_bytes=held, budget_bytes=budget
        )
        drawn.append(track)
        copied = [(each.work.value, each.start_s, each.seconds) for each in rank.copies]
        if copied:
            drawn.append(TimelineTrack(label=f"{row.label}, copies", spans=copied))
    sent: dict[str, list[tuple[str, float, float]]] = {}
    for each in timeline.collectives:
        label = "links" if timeline.num_stages == 1 else f"links of stage {each.stage}"
        label = "links between stages" if each.work is Work.HAND_OVER else label
        sent.setdefault(label, []).append((each.work.value, each.start_s, each.seconds))
    return [*drawn, *(TimelineTrack(label=label, spans=sent[label]) for label in sorted(sent))]


def _bytes_by_part(memory: MemoryParts) -> Mapping[str, float]:
    return {
        "state between steps": memory.resting_bytes,
        "gathered parameters, whole gradients": memory.unsharded_bytes + memory.grad_bytes,
        "inputs of units": memory.boundary_bytes,
        "activations": memory.activation_bytes,
        "process and libraries": memory.reserved_bytes,
    }
