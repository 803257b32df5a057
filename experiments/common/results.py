"""Samples on disk, what they come to, and the tables that show it.

Raw samples go to a csv file.  Tables and README blocks are made from samples alone, so that
what a README shows can be made again from the file beside it.
"""

import csv
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable

from experiments.common.machine import Environment

Record = TypeVar("Record")

BLOCK_BEGINS = "<!-- results: written by run.py -->"
BLOCK_ENDS = "<!-- end of results -->"

_TABLE_WIDTH = 130  # of a pipe or a log file, which have no width of their own

console = Console()
if not console.is_terminal:
    console = Console(width=_TABLE_WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A sample's middle and how far it reaches."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Raises ``ValueError`` without samples."""
        if not samples:
            raise ValueError("Spread: no samples. Measure at least one.")
        ordered = sorted(samples)
        return cls(
            median=_quantile(ordered, 0.5),
            p10=_quantile(ordered, 0.1),
            p90=_quantile(ordered, 0.9),
            n=len(ordered),
        )

    def cell(self, digits: int, *, scale: float = 1.0) -> str:
        """Of a table: median and how far it reaches, all multiplied by ``scale``."""
        middle, low, high = (
            f"{scale * each:.{digits}f}" for each in (self.median, self.p10, self.p90)
        )
        return f"{middle} ({low}-{high})"


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A claim made before the measurement, and whether it held."""

    claim: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool:
        """Whether ``measured`` lies within the bounds."""
        low = self.at_least is None or self.measured >= self.at_least
        return low and (self.at_most is None or self.measured <= self.at_most)

    @property
    def cells(self) -> list[str]:
        """A row of a table of bars."""
        bounds = [f">= {self.at_least}"] if self.at_least is not None else []
        bounds += [f"<= {self.at_most}"] if self.at_most is not None else []
        verdict = ("PASS" if self.holds else "FAIL") if bounds else ""
        return [self.claim, " and ".join(bounds), f"{self.measured:.3f}", verdict]


BAR_HEADER = ["bar", "needed", "measured", "verdict"]


# Files and tables


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """``rows``, dataclass instances of one class, one per line."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(rows[0])], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_csv(path: Path, record: type[Record]) -> list[Record]:
    """The inverse of ``write_csv``, for a dataclass of words, numbers and booleans."""
    type_by_name: dict[str, Any] = {
        each.name: each.type if each.type is not bool else "True".__eq__
        for each in fields(record)  # type: ignore[arg-type]
    }
    with path.open(newline="") as file:
        return [
            record(**{name: type_by_name[name](text) for name, text in line.items()})
            for line in csv.DictReader(file)
        ]


@dataclass(frozen=True, slots=True)
class Table:
    """For the terminal and for the README."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on the terminal; text in the first column, numbers in the others."""
    table = TerminalTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a README."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def columns(
    rows: Iterable[Any], formats: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Header and cells of records, by formats like ``"{0.share:.2f}"``; None is a dash."""

    def cell(text: str, row: Any) -> str:
        try:
            return text.format(row)
        except TypeError:  # None has no such format
            return "-"

    return [*formats], [[cell(text, row) for text in formats.values()] for row in rows]


def replace_cases(
    path: Path, rows: Sequence[Record], record: type[Record], order: Sequence[str]
) -> list[Record]:
    """Put ``rows`` in the place of a file's rows of the same ``case``; returns all.

    ``order`` is that of the cases in the file.
    """
    case_of = attrgetter("case")
    measured = set(map(case_of, rows))
    before = read_csv(path, record) if path.exists() else []
    kept = [row for row in before if case_of(row) not in measured]
    merged = sorted([*kept, *rows], key=lambda row: order.index(case_of(row)))
    write_csv(path, merged)
    return merged


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Print a table; the same for the README."""
    print_table(title, header, rows)
    return f"{title}:\n\n{markdown_table(header, rows)}"


def write_results_block(readme: Path, text: str) -> None:
    """Replace what stands between the two markers in ``readme``."""
    before, begins, rest = readme.read_text().partition(BLOCK_BEGINS)
    _, ends, after = rest.partition(BLOCK_ENDS)
    if not begins or not ends:
        raise ValueError(
            f"{readme}: {BLOCK_BEGINS!r} and {BLOCK_ENDS!r} are not there. Put both back."
        )
    readme.write_text(f"{before}{BLOCK_BEGINS}\n{text.strip()}\n{BLOCK_ENDS}{after}")


class Page:
    """What a run shows on the terminal and, if it is kept, writes into its folder."""

    def __init__(self, folder: Path, *, is_kept: bool, heading: str | None = None) -> None:
        """The heading says what was measured on; this machine, unless it is given."""
        self.environment = Environment.here()
        self.is_kept = is_kept
        self._folder = folder
        self._shown: list[str] = []
        self.tell(heading or self.environment.as_markdown())

    def tell(self, text: str) -> None:
        """A paragraph."""
        console.print(text, markup=False, soft_wrap=True)
        self._shown.append(text)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table, unless it is empty."""
        if rows:
            self._shown.append(show(title, header, rows))

    def tables(self, tables: Iterable[Table]) -> None:
        """Several."""
        for each in tables:
            self.table(each.title, each.header, each.rows)

    def bars(self, bars: Sequence[Bar]) -> None:
        """Claims and whether they hold."""
        self.table("Bars", BAR_HEADER, [bar.cells for bar in bars])

    def write_block(self) -> None:
        """What was shown so far into README.md, if it is kept."""
        if self.is_kept:
            write_results_block(self._folder / "README.md", "\n\n".join(self._shown))

    def keep(self, rows_by_file: Mapping[str, Sequence[Any]]) -> None:
        """Write the rows of each file and the block of README.md, if they are to be kept."""
        if not self.is_kept:
            console.print("Only a part was measured: nothing was written.")
            return
        for name, rows in rows_by_file.items():
            write_csv(self._folder / name, rows)
        self.write_block()


def parser_of(doc: str | None, quick: str = "little, and keeps nothing") -> ArgumentParser:
    """A command's options, explained by its module's docstring; --quick is one of them."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def parse_cases(parser: ArgumentParser, cases: Iterable[Any]) -> Namespace:
    """What is asked for; ``cases`` of it are those whose name has the words of --only."""
    names = [case.name for case in cases]
    words = "cases whose name has these words, in place of those in results.csv: "
    parser.add_argument("--only", metavar="WORDS", default="", help=words + "; ".join(names))
    options = parser.parse_args()
    options.cases = [case for case in cases if options.only in case.name]
    if not options.cases:
        parser.error(f"no case has {options.only!r} in its name; there are {names}")
    return options
