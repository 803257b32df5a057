"""How does the cost of a step grow as the work grows?

python -m experiments.scale.run                  about 25 minutes
python -m experiments.scale.run --far            and a world of 64 ranks
python -m experiments.scale.run --quick          one minute; keeps nothing
python -m experiments.scale.run --only overlap   one part; keeps nothing
"""

import time
from pathlib import Path

from experiments.common.results import Bar, Page, console, parser_of
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
    parser = parser_of(__doc__)
    parser.add_argument("--far", action="store_true", help="a world of 64 ranks too")
    parser.add_argument("--only", choices=PARTS, help="one part; keeps nothing")
    options = parser.parse_args()
    page = Page(HERE, is_kept=not (options.quick or options.only))
    effort = Effort(is_quick=options.quick, is_far=options.far)
    samples: list[Sample] = []
    bars: list[Bar] = []
    for part in [part for name, part in PARTS.items() if options.only in (None, name)]:
        found, report = measure_part(part, effort)
        samples += found
        bars += report.bars
        page.tables(report.tables)
    page.bars(bars)
    page.tell(figure.MARKDOWN)
    page.keep({"results.csv": samples})
    if page.is_kept:
        figure.main()


def measure_part(part: Part, effort: Effort) -> tuple[list[Sample], Report]:
    """Its samples and what they say."""
    start_s = time.perf_counter()
    found = part.measure(effort)
    console.print(f"{part.name}: {time.perf_counter() - start_s:.0f} s")
    return found, part.report(found)


if __name__ == "__main__":
    main()
