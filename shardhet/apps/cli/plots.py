"""Pictures of plans and steps; this module only does the drawing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardhet.apps.cli.quantities import unit_of

WIDTH_INCHES = 10.0
LANE_INCHES = 0.35  # height of a device's bar
BYTES_BY_UNIT = {"MiB": 2**20, "GiB": 2**30}
# The colour and the legend's words of each kind of span in a lane, in the legend's order.
SHOWN_BY_WORK = {
    "forward": ("tab:blue", "forward"),
    "backward": ("tab:orange", "backward, with what is recomputed"),
    "optimizer": ("tab:green", "optimizer step"),
    "wait_gather": ("0.85", "waits for parameters"),
    "wait_reduce": ("0.75", "waits for gradients"),
    "wait_stage": ("0.8", "waits for another stage"),
    "agree": ("0.92", "waits for the slowest device"),
    "gather": ("tab:purple", "links: parameters to devices that compute"),
    "reduce": ("tab:brown", "links: gradients to devices that store"),
    "hand_over": ("tab:red", "links: from stage to stage"),
    "to_host": ("tab:olive", "copies to the host"),
    "to_device": ("tab:cyan", "copies from the host"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBar:
    """One line of a plan's figure: a device, or several that do the same."""

    label: str
    num_samples: int
    state_share: float
    bytes_by_part: Mapping[str, float]  # memory by purpose
    budget_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineTrack:
    """One line of a timeline."""

    label: str
    spans: Sequence[tuple[str, float, float]]  # kind of work, start, seconds
    memory_bytes: Sequence[tuple[float, float]] = ()  # start in seconds, held from then on
    budget_bytes: float = 0.0


def draw_plan(
    title: str, bars: Sequence[DeviceBar], tracks: Sequence[TimelineTrack], path: Path
) -> None:
    """Draw batches, shares and memory by device side by side, and the step's timeline below."""
    plt = pyplot()
    heights = [LANE_INCHES * len(bars) + 1.2, LANE_INCHES * len(tracks) + 1.2]
    drawing = plt.figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    drawing.suptitle(title)
    above, below = drawing.subfigures(2, 1, height_ratios=heights)
    panels = above.subplots(1, 3, sharey=True, width_ratios=[1, 1, 2])
    batch_axes, share_axes, memory_axes = panels
    labels = [bar.label for bar in bars]
    batch_axes.barh(labels, [bar.num_samples for bar in bars])
    batch_axes.set_xlabel("samples, each")
    share_axes.barh(labels, [100 * bar.state_share for bar in bars], color="tab:green")
    share_axes.set_xlabel("% of the state, each")
    _draw_memory(memory_axes, bars)
    batch_axes.invert_yaxis()
    _draw_lanes(below.subplots(), tracks)
    drawing.savefig(path)
    plt.close(drawing)


def draw_timeline(title: str, tracks: Sequence[TimelineTrack], path: Path) -> None:
    """Draw what every device does over a step, and the memory that lanes say it holds."""
    plt = pyplot()
    says_memory = any(track.memory_bytes for track in tracks)
    unit = unit_of(max(track.budget_bytes for track in tracks))
    heights = [LANE_INCHES * len(tracks) + 1.2, *([3.0] if says_memory else [])]
    drawing, panels = plt.subplots(
        len(heights),
        squeeze=False,
        figsize=(WIDTH_INCHES, sum(heights)),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
    )
    drawing.suptitle(title)
    _draw_lanes(panels[0, 0], tracks)
    if says_memory:
        panels[0, 0].set_xlabel("")
        memory_axes = panels[1, 0]
        for track in tracks:
            if track.memory_bytes:
                seconds, held = zip(*track.memory_bytes, strict=True)
                shown = [each / BYTES_BY_UNIT[unit] for each in held]
                memory_axes.step(seconds, shown, where="post", label=track.label)
        memory_axes.set_ylabel(f"{unit} held")
        memory_axes.set_xlabel("seconds")
        memory_axes.set_ylim(bottom=0)
        memory_axes.legend(fontsize="small")
    drawing.savefig(path)
    plt.close(drawing)


def _draw_memory(axes: Any, bars: Sequence[DeviceBar]) -> None:
    """Draw stacked bars of the parts, with the budget as a mark."""
    labels = [bar.label for bar in bars]
    unit = unit_of(max(bar.budget_bytes for bar in bars))
    left = [0.0] * len(bars)
    for part in bars[0].bytes_by_part:
        widths = [bar.bytes_by_part[part] / BYTES_BY_UNIT[unit] for bar in bars]
        axes.barh(labels, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    budgets = [bar.budget_bytes / BYTES_BY_UNIT[unit] for bar in bars]
    axes.plot(budgets, range(len(bars)), "k|", markersize=14, label="budget of the plan")
    axes.set_xlabel(f"{unit}, each")
    axes.legend(fontsize="x-small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_lanes(axes: Any, tracks: Sequence[TimelineTrack]) -> None:
    """Draw a bar per lane, coloured by kind of work."""
    for work, (color, label) in SHOWN_BY_WORK.items():
        for i, track in enumerate(tracks):
            spans = [(start, seconds) for what, start, seconds in track.spans if what == work]
            if spans:
                axes.broken_barh(spans, (i - 0.4, 0.8), color=color, label=label)
                label = "_"  # the legend names each once
    axes.set_yticks(range(len(tracks)), [track.label for track in tracks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(fontsize="x-small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")  # draws into a file, with or without a screen
    from matplotlib import pyplot as plt

    return plt
