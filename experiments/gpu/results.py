"""One number per row, and what parts, tables and the file on disk share of them."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from experiments.common.results import Bar, Spread, Table, write_csv

MIB, GIB = 2**20, 2**30
FAILED = "failed"  # the metric of a case that raised; the case says what
LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured (or predicted) number."""

    part: str
    case: str
    metric: str
    value: float
    unit: str
    repeat: int


@dataclass(frozen=True, slots=True)
class Recorder:
    """Sends a part's numbers away as they are measured."""

    part: str
    send: Callable[[Row], None]

    def __call__(
        self, case: str, metric: str, value: float, unit: str = "", repeat: int = 0
    ) -> None:
        row = Row(
            part=self.part,
            case=case,
            metric=metric,
            value=float(value),
            unit=unit,
            repeat=repeat,
        )
        self.send(row)

    def failed(self, case: str, error: Exception) -> None:
        """Note that a case has raised, and how."""
        said = f"{case}: {type(error).__name__}: {error}".splitlines()[0][:LONGEST_MESSAGE]
        row = Row(part=self.part, case=said, metric=FAILED, value=1.0, unit="", repeat=0)
        self.send(row)


@contextmanager
def noting_failure(case: str, record: Recorder) -> Iterator[None]:
    """A case that raises is a result; the cases after it are still to be tried."""
    try:
        yield
    except Exception as error:
        record.failed(case, error)


class Ledger:
    """All rows so far; with a path, each is in the file before the next one is measured."""

    def __init__(self, path: Path | None) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._lock = threading.Lock()
        if path is not None:
            path.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Keep it."""
        with self._lock:
            self.rows.append(row)
            if self._path is not None:
                write_csv(self._path, self.rows)


def largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Relative; 1 where a value is no number, which is as different as can be."""
    differences = [abs(a / b - 1) for a, b in zip(values, expected, strict=True)]
    return max(differences) if all(map(isfinite, differences)) else 1.0


# What is shown of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A column of a part's table, and what is asked of every case that has it."""

    name: str
    of: str = ""  # asked of cases with these words alone
    at_least: float | None = None
    at_most: float | None = None


def values_by_case(rows: Iterable[Row], metric: str) -> dict[str, list[float]]:
    """All repeats of each case that has this metric, in the order of measuring."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.metric == metric:
            found.setdefault(row.case, []).append(row.value)
    return found


def table_of(title: str, metrics: Iterable[Metric], rows: Sequence[Row]) -> Table:
    """A line for each case; empty where nothing was measured, because a part did not finish."""
    columns = {each.name: values_by_case(rows, each.name) for each in metrics}
    cases = dict.fromkeys(case for values in columns.values() for case in values)
    lines = [[case, *(_cell(each.get(case)) for each in columns.values())] for case in cases]
    return Table(title, ["case", *columns], lines)


def bars_of(title: str, metrics: Iterable[Metric], rows: Sequence[Row]) -> Iterator[Bar]:
    """Of each metric the worst case."""
    for each in metrics:
        values = values_by_case(rows, each.name)
        medians = [Spread.of(found).median for case, found in values.items() if each.of in case]
        claim = f"{title}, {each.name}" + f", {each.of}" * bool(each.of)
        if medians and each.at_least is not None:
            yield Bar(claim=f"{claim}: least", measured=min(medians), at_least=each.at_least)
        if medians and each.at_most is not None:
            yield Bar(claim=f"{claim}: most", measured=max(medians), at_most=each.at_most)


def _cell(values: Sequence[float] | None) -> str:
    """Median, first and last decile, in three digits or as many as are before the point."""
    if not values:
        return ""
    spread = Spread.of(values)
    middle, low, high = (
        f"{each:.0f}" if abs(each) >= 1000 else f"{each:.3g}"
        for each in (spread.median, spread.p10, spread.p90)
    )
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"
