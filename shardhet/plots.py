"""Figures from what runs have written; nothing is computed here but places on paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZE_INCHES = (8.0, 9.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a figure."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigure:
    """What is drawn of a run: three panels that share the axis of steps."""

    title: str
    losses: Mapping[str, Series]  # by name: "loss", "held_out_loss"
    tokens_per_s: Series
    busy_shares: Mapping[str, Series] = field(default_factory=dict)  # by device
    waiting_shares: Mapping[str, Series] = field(default_factory=dict)


def draw_run(figure: RunFigure, path: Path) -> None:
    """Write the figure; its format follows from the path's suffix."""
    import matplotlib as mpl

    mpl.use("agg")  # into a file, with or without a screen
    from matplotlib import pyplot as plt

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
    """Busy shares as lines, waiting shares dashed in the same colour."""
    for device, busy in figure.busy_shares.items():
        (line,) = axes.plot(busy.steps, busy.values, label=device)
        waiting = figure.waiting_shares[device]
        axes.plot(waiting.steps, waiting.values, "--", color=line.get_color())
    axes.set_ylabel("share of step time\n(busy; dashed: waiting)")
    axes.set_xlabel("step")
    axes.set_ylim(0, 1)
    axes.legend(ncols=2, fontsize="small")


def series_of(entries: Sequence[Mapping[str, Any]], key: str) -> Series:
    """The values of ``key`` in the lines of a metrics.jsonl that have one."""
    found = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
    return Series(steps=tuple(s for s, _ in found), values=tuple(v for _, v in found))
