"""Draws accumulation.png and worlds.png from results.csv.

python -m experiments.scale.figure
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.common.figure import draw_lines
from experiments.common.results import read_csv
from experiments.common.systems import FSDP2, HET
from experiments.scale import accumulation, worlds
from experiments.scale.records import Sample, cases_in, median

HERE = Path(__file__).parent
MARKDOWN = """![ms of a step beyond compute, by number of microbatches](accumulation.png)
![seconds of a step, by number of ranks](worlds.png)"""

Points = list[tuple[float, float]]


def accumulation_lines(samples: Sequence[Sample]) -> dict[str, Points]:
    """Milliseconds beyond compute, by number of microbatches."""
    lines = {}
    for compute in accumulation.COMPUTES:
        for system in (HET, FSDP2):
            points = [
                (float(n), 1000 * accumulation.beyond_compute_s(samples, compute, n, system))
                for n in accumulation.COUNTS
            ]
            # Both axes are logarithmic, and noise may hide what is next to nothing.
            lines[f"{system}, {compute}"] = [point for point in points if point[1] > 0]
    return {name: points for name, points in lines.items() if points}


def world_lines(samples: Sequence[Sample]) -> dict[str, Points]:
    """Seconds of a step, by number of ranks."""
    lines: dict[str, Points] = {}
    for name in worlds.plans_of(4):
        for quantity, what in ((worlds.STEP, "measured"), (worlds.SIMULATED, "simulated")):
            lines[f"batches {name}, {what}"] = [
                (float(case.split()[0]), median(samples, case, name, quantity))
                for case in cases_in(samples)
            ]
    return lines


def main() -> None:
    """Both pictures."""
    samples = read_csv(HERE / "results.csv", Sample)
    by_part = {
        name: [sample for sample in samples if sample.part == name]
        for name in (accumulation.NAME, worlds.NAME)
    }
    draw_lines(
        accumulation_lines(by_part[accumulation.NAME]),
        HERE / "accumulation.png",
        x_label="microbatches",
        y_label="ms of a step beyond compute",
    )
    draw_lines(
        world_lines(by_part[worlds.NAME]),
        HERE / "worlds.png",
        x_label="ranks",
        y_label="seconds of a step",
    )


if __name__ == "__main__":
    main()
