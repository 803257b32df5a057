"""Figures from what runs have written; this module only does the drawing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZE_INCHES = (8.0, 9.0)
WIDTH_INCHES = 10.0
LANE_INCHES = 0.35  # height of a device's bar
# The colour of each kind of span in a lane, in the order of the legend.
COLOR_BY_WORK = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "optimizer": "tab:green",
    "wait_gather": "0.85",
    "wait_reduce": "0.75",
    "agree": "0.92",
    "gather": "tab:purple",
    "reduce": "tab:brown",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a figure."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigure:
    """The figure of a run: three panels with a common axis of steps."""

    title: str
    losses: Mapping[str, Series]  # by name: "loss", "held_out_loss"
    tokens_per_s: Series
    busy_shares: Mapping[str, Series] = field(default_factory=dict)  # by device
    waiting_shares: Mapping[str, Series] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBar:
    """One line of a plan's figure: a device, or several that do the same."""

    label: str
    num_samples: int
    state_share: float
    gib_by_part: Mapping[str, float]  # memory by purpose
    budget_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One line of a timeline."""

    label: str
    spans: Sequence[tuple[str, float, float]]  # kind of work, start, seconds
    memory_gib: Sequence[tuple[float, float]] = ()  # start in seconds, memory held from then on


def draw_plan(title: str, bars: Sequence[DeviceBar], lanes: Sequence[Lane], path: Path) -> None:
    """Draw batches, shares and memory by device side by side, and the step's timeline below."""
    plt = _pyplot()
    heights = [LANE_INCHES * len(bars) + 1.2, LANE_INCHES * len(lanes) + 1.2]
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
    _draw_lanes(below.subplots(), lanes)
    drawing.savefig(path)
    plt.close(drawing)


def draw_timeline(title: str, lanes: Sequence[Lane], path: Path) -> None:
    """Draw what every device does over a step, and the memory it holds."""
    plt = _pyplot()
    height = LANE_INCHES * len(lanes) + 1.2
    drawing, (axes, memory_axes) = plt.subplots(
        2,
        1,
        figsize=(WIDTH_INCHES, height + 3),
        height_ratios=[height, 3],
        sharex=True,
        layout="constrained",
    )
    drawing.suptitle(title)
    _draw_lanes(axes, lanes)
    axes.set_xlabel("")
    for lane in lanes:
        if lane.memory_gib:
            seconds, held = zip(*lane.memory_gib, strict=True)
            memory_axes.step(seconds, held, where="post", label=lane.label)
    memory_axes.set_ylabel("GiB held")
    memory_axes.set_xlabel("seconds")
    memory_axes.set_ylim(bottom=0)
    memory_axes.legend(fontsize="small")
    drawing.savefig(path)
    plt.close(drawing)


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    x_label: str,
    y_label: str,
) -> None:
    """Draw named lines of points with both axes logarithmic."""
    plt = _pyplot()
    drawing, axes = plt.subplots(figsize=(WIDTH_INCHES / 2, 3.2), layout="constrained")
    for name, points in lines.items():
        axes.loglog(*zip(*points, strict=True), "o-", label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    drawing.savefig(path, dpi=80)
    plt.close(drawing)


def _draw_memory(axes: Any, bars: Sequence[DeviceBar]) -> None:
    """Draw stacked bars of the parts, with the budget as a mark."""
    labels = [bar.label for bar in bars]
    left = [0.0] * len(bars)
    for part in bars[0].gib_by_part:
        widths = [bar.gib_by_part[part] for bar in bars]
        axes.barh(labels, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    budgets = [bar.budget_gib for bar in bars]
    axes.plot(budgets, range(len(bars)), "k|", markersize=14, label="budget")
    axes.set_xlabel("GiB, each")
    axes.legend(fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_lanes(axes: Any, lanes: Sequence[Lane]) -> None:
    """Draw a bar per lane, coloured by kind of work."""
    for work, color in COLOR_BY_WORK.items():
        label = work.replace("_", " ")
        for i, lane in enumerate(lanes):
            spans = [(start, seconds) for what, start, seconds in lane.spans if what == work]
            if spans:
                axes.broken_barh(spans, (i - 0.4, 0.8), color=color, label=label)
                label = "_"  # the legend names each once
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(fontsize="x-small", ncols=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")  # draws into a file, with or without a screen
    from matplotlib import pyplot as plt

    return plt


def draw_run(figure: RunFigure, path: Path) -> None:
    """Write the figure; its format follows from the path's suffix."""
    plt = _pyplot()
    drawing, (loss_axes, speed_axes, use_axes) = plt.subplots(
        3, 1, figsize=SIZE_INCHES, sharex=True, layout="constrained"
    )
    drawing.suptitle(figure.title)
    for name, series in figure.losses.items():
        style = ".-" if len(series.steps) < len(figure.losses["loss"].steps) else "-"
        loss_axes.plot(series.steps, series.values, style, label=name.replace("_", " "))
    loss_axes.set_ylabel("nats per target")
    loss_axes.legend()
    speed_axes.plot(figure.tokens_per_s.steps, figure.tokens_per_s.values)
    speed_axes.set_ylabel("targets per second")
    speed_axes.set_ylim(bottom=0)
    _draw_use(use_axes, figure)
    drawing.savefig(path)
    plt.close(drawing)


def _draw_use(axes: Any, figure: RunFigure) -> None:
    """Draw busy shares as lines, and waiting shares dashed in the same colour."""
    for device, busy in figure.busy_shares.items():
        (line,) = axes.plot(busy.steps, busy.values, label=device)
        waiting = figure.waiting_shares[device]
        axes.plot(waiting.steps, waiting.values, "--", color=line.get_color())
    axes.set_ylabel("share of step time\n(busy; dashed: waiting)")
    axes.set_xlabel("step")
    axes.set_ylim(0, 1)
    axes.legend(ncols=2, fontsize="small")


def series_of(entries: Sequence[Mapping[str, Any]], key: str) -> Series:
    """The values of ``key`` in those lines of a metrics.jsonl that have it."""
    found = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
    return Series(steps=tuple(s for s, _ in found), values=tuple(v for _, v in found))
