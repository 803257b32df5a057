"""Figures of experiments."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # draws into a file, with or without a screen
from matplotlib import pyplot as plt


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    x_label: str,
    y_label: str,
) -> None:
    """Draw named lines of points with both axes logarithmic."""
    drawing, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name, points in lines.items():
        axes.loglog(*zip(*points, strict=True), "o-", label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    drawing.savefig(path, dpi=80)
    plt.close(drawing)
