"""Draw a plan and its simulated step as figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardhet.apps.cli.plots import DeviceBar, Lane, draw_plan
from shardhet.apps.planning.report import PlanReport, Row, rows
from shardhet.pricing.step_cost import MemoryParts
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Timeline

GIB = 2**30


def draw_report(report: PlanReport, path: Path) -> None:
    """Draw the plan's devices and the timeline of its step."""
    found = rows(report)
    bars = [
        DeviceBar(
            label=row.label,
            num_samples=row.rank.rank_batch_size,
            state_share=row.share,
            gib_by_part=_gib_by_part(row.cost.memory),
            budget_gib=row.cost.memory_budget_bytes / GIB,
        )
        for row in found
    ]
    inputs, plan = report.inputs, report.solution.plan
    title = (
        f"{inputs.name} on {plan.world_size} devices, {plan.global_batch_size} "
        f"samples: {report.solution.samples_per_s:,.4g} samples/s predicted"
    )
    timeline = simulate(plan, inputs.setting)
    draw_plan(title, bars, lanes(timeline, found), path)


def lanes(timeline: Timeline, found: Sequence[Row]) -> list[Lane]:
    """One lane per row of devices that do the same, and one for the links."""
    drawn = []
    for row in found:
        rank = timeline.ranks[row.positions[0]]
        spans = [(each.work.value, each.start_s, each.seconds) for each in rank.events]
        held = [(point.time_s, point.nbytes / GIB) for point in rank.memory]
        held.append((timeline.step_time_s, held[-1][1]))
        drawn.append(Lane(label=row.label, spans=spans, memory_gib=held))
        copied = [(each.work.value, each.start_s, each.seconds) for each in rank.copies]
        if copied:
            drawn.append(Lane(label=f"{row.label}, copies", spans=copied))
    sent = [(each.work.value, each.start_s, each.seconds) for each in timeline.collectives]
    return [*drawn, Lane(label="links", spans=sent)] if sent else drawn


def _gib_by_part(memory: MemoryParts) -> Mapping[str, float]:
    return {
        "state": memory.resting_bytes / GIB,
        "unsharded": (memory.unsharded_bytes + memory.grad_bytes) / GIB,
        "inputs of units": memory.boundary_bytes / GIB,
        "activations": memory.activation_bytes / GIB,
        "reserved": memory.reserved_bytes / GIB,
    }
