"""Draws accumulation.png from results.csv.

PYTHONPATH=. python experiments/20_gpu/figure.py
"""

from pathlib import Path

import accumulation
from results import read_rows

HERE = Path(__file__).parent

if __name__ == "__main__":
    rows = [row for row in read_rows(HERE / "results.csv") if row.part == accumulation.NAME]
    accumulation.draw(rows, HERE / "accumulation.png")
