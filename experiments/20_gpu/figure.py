"""Draws accumulation.png from results.csv.

PYTHONPATH=. python experiments/20_gpu/figure.py
"""

from pathlib import Path

import accumulation
from results import Row

from experiments.common import read_csv

HERE = Path(__file__).parent

if __name__ == "__main__":
    rows = [row for row in read_csv(HERE / "results.csv", Row) if row.part == accumulation.NAME]
    accumulation.draw(rows, HERE / "accumulation.png")
