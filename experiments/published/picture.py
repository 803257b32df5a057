"""Draw results.csv: what each form gives, relative to even plans, by cluster and model."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.published.forms import EVEN, FORMS, Row
from experiments.published.inputs import DERIVED
from experiments.published.summary import Forms, at_shown_batch, by_case

OTHERS = [form for form in FORMS if form != EVEN]
NUM_COLUMNS = 2
PANEL_INCHES = (7.0, 3.0)
WIDTH = 0.8 / len(OTHERS)


def draw(rows: Sequence[Row], picture: Path) -> None:
    """One panel per part and cluster, at the batch that the tables show too."""
    panels: dict[str, list[Forms]] = {}
    for each in by_case(rows):
        row = each.rows[0]
        how = row.part if row.part != DERIVED else "derived from specifications"
        panels.setdefault(f"{row.cluster}: {how}", []).append(each)
    num_rows = -(-len(panels) // NUM_COLUMNS)
    size = (NUM_COLUMNS * PANEL_INCHES[0], num_rows * PANEL_INCHES[1])
    figure, grid = plt.subplots(
        num_rows, NUM_COLUMNS, figsize=size, squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, of_cluster) in zip(grid.flat, panels.items(), strict=False):
        found = at_shown_batch(of_cluster)
        axes.set_title(f"{title}; batch {found[0].batch}", fontsize=9)
        _panel(axes, found)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(OTHERS) + 1)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _panel(axes: Axes, found: Sequence[Forms]) -> None:
    """Bars by model; where even does not fit, words say what does."""
    for i, form in enumerate(OTHERS):
        having = [
            (x + (i - (len(OTHERS) - 1) / 2) * WIDTH, speed / even)
            for x, each in enumerate(found)
            if (speed := each.speed(form)) is not None and (even := each.speed(EVEN))
        ]
        axes.bar(
            [x for x, _ in having],
            [ratio for _, ratio in having],
            WIDTH,
            label=form,
            color=f"C{i}",
        )
    axes.axhline(1, color="grey", linewidth=0.8, label="even = 1")
    for x, each in enumerate(found):
        if each.speed(EVEN) is None:
            fitting = [form for form in OTHERS if each.speed(form) is not None]
            words = f"fits: {', '.join(fitting)}" if fitting else "nothing fits"
            axes.text(x, 0.05, words, rotation=90, ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(found)), [each.rows[0].model for each in found], fontsize=7)
    axes.set_xlim(-0.6, len(found) - 0.4)
    axes.set_ylabel("samples/s / even's", fontsize=8)
    axes.set_ylim(bottom=0)
