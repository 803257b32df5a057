"""Figures of experiments."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardhet.apps.cli.plots import WIDTH_INCHES, pyplot


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    x_label: str,
    y_label: str,
) -> None:
    """Draw named lines of points with both axes logarithmic."""
    plt = pyplot()
    drawing, axes = plt.subplots(figsize=(WIDTH_INCHES / 2, 3.2), layout="constrained")
    for name, points in lines.items():
        axes.loglog(*zip(*points, strict=True), "o-", label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    drawing.savefig(path, dpi=80)
    plt.close(drawing)
