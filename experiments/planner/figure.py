"""Draws scale.png from scale.csv and shell.csv: seconds against the number of devices.

python -m experiments.planner.figure
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median

from experiments.common.figure import draw_lines

HERE = Path(__file__).parent
NUM_KINDS = 8  # of the search's cases that belong to one line


def points(name: str, seconds: str, **wanted: str) -> list[tuple[float, float]]:
    """Median seconds by number of devices, of the rows that have the wanted values."""
    by_devices: dict[int, list[float]] = defaultdict(list)
    with (HERE / name).open() as file:
        for row in csv.DictReader(file):
            if all(row[key] == value for key, value in wanted.items()):
                by_devices[int(row["devices"])].append(float(row[seconds]))
    return [(devices, median(values)) for devices, values in sorted(by_devices.items())]


def main() -> None:
    """Draw it."""
    lines = {
        "shardhet plan, everything on": points("shell.csv", "cpu_s", is_everything="True"),
        f"the search alone, {NUM_KINDS} kinds": points(
            "scale.csv", "cpu_s", kinds=str(NUM_KINDS)
        ),
    }
    draw_lines(lines, HERE / "scale.png", x_label="devices", y_label="CPU seconds, median")


if __name__ == "__main__":
    main()
