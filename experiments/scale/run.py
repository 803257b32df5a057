"""How does the cost of a step grow as the work grows?

python -m experiments.scale.run                  about 25 minutes
python -m experiments.scale.run --far            and a world of 64 ranks
python -m experiments.scale.run --quick          one minute; keeps nothing
python -m experiments.scale.run --only overlap   one part; keeps nothing
"""

import argparse
import time
from pathlib import Path

from experiments.common import (
    BAR_HEADER,
    Bar,
    Environment,
    console,
    show,
    write_csv,
    write_results_block,
)
from experiments.scale import accumulation, figure, growth, overhead, overlap, simulated, worlds
from experiments.scale.records import Effort, Part, Report, Sample

HERE = Path(__file__).parent
PARTS = {
    part.name: part
    for part in (
        growth.PART,
        accumulation.PART,
        overlap.PART,
        worlds.PART,
        overhead.PART,
        simulated.PART,
    )
}


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and small; keeps nothing")
    parser.add_argument("--far", action="store_true", help="a world of 64 ranks too")
    parser.add_argument("--only", choices=PARTS, help="one part; keeps nothing")
    options = parser.parse_args()
    environment = Environment.here()
    console.print(environment.as_markdown())
    effort = Effort(is_quick=options.quick, is_far=options.far)
    parts = [part for name, part in PARTS.items() if options.only in (None, name)]
    samples: list[Sample] = []
    shown = [environment.as_markdown()]
    bars: list[Bar] = []
    for part in parts:
        found, report = measure_part(part, effort)
        samples += found
        bars += report.bars
        shown += [show(table.title, table.header, table.rows) for table in report.tables]
    shown.append(show("Bars", BAR_HEADER, [bar.cells for bar in bars]))
    shown.append(figure.MARKDOWN)
    if options.quick or options.only:
        console.print("Only a part was measured: nothing was written.")
        return
    write_csv(HERE / "results.csv", samples)
    write_results_block(HERE / "README.md", "\n\n".join(shown))
    figure.main()


def measure_part(part: Part, effort: Effort) -> tuple[list[Sample], Report]:
    """Its samples and what they say."""
    start_s = time.perf_counter()
    found = part.measure(effort)
    console.print(f"{part.name}: {time.perf_counter() - start_s:.0f} s")
    return found, part.report(found)


if __name__ == "__main__":
    main()
