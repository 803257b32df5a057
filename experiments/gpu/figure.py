"""Draws accumulation.png from results.csv.

python -m experiments.gpu.figure
"""

from pathlib import Path

from experiments.common.results import read_csv
from experiments.gpu import accumulation
from experiments.gpu.results import Row

HERE = Path(__file__).parent

if __name__ == "__main__":
    rows = [row for row in read_csv(HERE / "results.csv", Row) if row.part == accumulation.NAME]
    accumulation.draw(rows, HERE / "accumulation.png")
