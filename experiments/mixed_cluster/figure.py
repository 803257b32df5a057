"""Draw results.csv: what part of the ideal each system reaches on each cluster."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.common.results import read_csv
from experiments.mixed_cluster.clusters import CASES
from experiments.mixed_cluster.report import CaseRows, Row


def draw(results: Path, picture: Path) -> None:
    """One group of bars per case; whiskers reach from p10 to p90."""
    rows = read_csv(results, Row)
    measured = [CaseRows.of(case, rows) for case in CASES]
    measured = [each for each in measured if each.rows]
    systems = list(dict.fromkeys(name for each in measured for name in each.systems))
    figure, axes = plt.subplots(figsize=(max(8, 2.2 * len(measured)), 4.5))
    width = 0.85 / len(systems)
    for i, system in enumerate(systems):
        having = [(x, each) for x, each in enumerate(measured) if each.has(system)]
        spreads = [(x, each.spread(system), each.ideal_samples_per_s) for x, each in having]
        heights = [spread.median / ideal for _, spread, ideal in spreads]
        axes.bar(
            [x + (i - (len(systems) - 1) / 2) * width for x, _, _ in spreads],
            heights,
            width,
            label=system,
            yerr=[
                [(s.median - s.p10) / ideal for _, s, ideal in spreads],
                [(s.p90 - s.median) / ideal for _, s, ideal in spreads],
            ],
            error_kw={"linewidth": 0.8},
            color=plt.get_cmap("tab20")(i),
        )
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylabel("samples/s, of the ideal")
    names = [each.case.name.replace(", ", ",\n") for each in measured]
    axes.set_xticks(range(len(measured)), names, fontsize=8)
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
