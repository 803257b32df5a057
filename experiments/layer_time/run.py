"""How a layer's time goes on beyond the sizes that were measured: form and constants.

    SHARDHET_SHARED_DATA=... python -m experiments.layer_time.run

Microbatch sizes 1-5 of each of Cephalo's published curves predict the largest size.  The
form is a line through the last point; its slope is that of a fit weighted by x^power, mixed
with the proportional one and stretched.  The three constants are chosen on all kinds of GPU
but one and judged on that one, for each kind in turn.
"""

import csv
import json
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.common.machine import SHARED_DATA
from shardhet.records.profiles import Curve

HERE = Path(__file__).parent
SIZES = np.arange(1.0, 6.0)
POWERS, PARTS, GROWTHS = (
    (0.0, 0.5, 1.0, 1.5),
    (0.0, 0.1, 0.2, 0.3, 0.4),
    (0.99, 1.0, 1.01, 1.02),
)
MEDIAN_BAR, P90_BAR = 0.04, 0.15

Floats = NDArray[np.float64]


def curves() -> tuple[list[str], list[Floats]]:
    """The kind of GPU and the values of every curve with more than five points."""
    table = json.loads((SHARED_DATA / "cephalo" / "model_latencies.json").read_text())
    gpus, values = [], []
    for by_gpu in table.values():
        for gpu, by_length in by_gpu.items():
            for by_dtype in by_length.values():
                for entry in by_dtype.values():
                    if isinstance(entry, list) and len(entry) == 4:
                        long = [np.array(v) for v in entry[2:] if len(v) > len(SIZES)]
                        gpus += [gpu] * len(long)
                        values += long
    return gpus, values


def predicted(value: Floats, power: float, part: float, growth: float) -> float:
    """The last value from the first five."""
    y, weights = value[: len(SIZES)], np.sqrt(SIZES**power)
    columns = np.stack([np.ones_like(SIZES), SIZES], axis=1) * weights[:, None]
    slope = np.linalg.lstsq(columns, y * weights, rcond=None)[0][1]
    slope = growth * ((1 - part) * slope + part * y[-1] / SIZES[-1])
    return float(y[-1] + slope * (len(value) - SIZES[-1]))


def main() -> None:
    """One row per curve; the errors leaving its kind of GPU out to the screen."""
    gpus, values = curves()
    grid = list(product(POWERS, PARTS, GROWTHS))
    errors = np.array([[abs(predicted(v, *each) / v[-1] - 1) for v in values] for each in grid])
    judged = np.empty(len(values))
    for gpu in sorted(set(gpus)):
        is_left_out = np.array([each == gpu for each in gpus])
        median, p90 = np.quantile(errors[:, ~is_left_out], [0.5, 0.9], axis=1)
        best = int(np.argmin(median / MEDIAN_BAR + p90 / P90_BAR))
        judged[is_left_out] = errors[best, is_left_out]
        low, high = np.quantile(judged[is_left_out], [0.5, 0.9])
        print(
            f"{gpu:14} {is_left_out.sum():4} curves, constants {grid[best]}: "
            f"median {low:.3f} p90 {high:.3f}"
        )
    shipped = np.array(
        [abs(Curve(tuple(SIZES), tuple(v[:5])).at(len(v)) / v[-1] - 1) for v in values]
    )
    for name, each in (("left out", judged), ("as shipped", shipped)):
        median, p90 = np.quantile(each, [0.5, 0.9])
        print(f"{name}: median {median:.4f} (bar {MEDIAN_BAR}), p90 {p90:.4f} (bar {P90_BAR})")
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "largest_size", "error_left_out", "error_as_shipped"])
        writer.writerows(zip(gpus, map(len, values), judged, shipped, strict=True))


if __name__ == "__main__":
    main()
