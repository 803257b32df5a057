"""One number per row, and what parts, tables and the file on disk share of them."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from experiments.common.results import Bar, Spread, write_csv

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
    fails_at: str = ""  # cases with these words are made to fail

    def __call__(
        self, case: str, metric: str, value: float, unit: str = "", repeat: int = 0
    ) -> None:
        if self.fails_at and self.fails_at in f"{self.part}: {case}":
            raise RuntimeError(f"{case}: made to fail by --fail {self.fails_at!r}")
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


def cases_of(rows: Iterable[Row], metric: str | None = None) -> list[str]:
    """Cases that have this metric, in the order in which they were measured."""
    return list(dict.fromkeys(row.case for row in rows if metric in (None, row.metric)))


def values_of(rows: Iterable[Row], case: str, metric: str) -> list[float]:
    """All repeats of one number."""
    return [row.value for row in rows if row.case == case and row.metric == metric]


def median_of(rows: Iterable[Row], case: str, metric: str) -> float | None:
    """The middle of the repeats; None where there are none, because a part did not finish."""
    values = values_of(rows, case, metric)
    return Spread.of(values).median if values else None


def shown(value: float | None, pattern: str = "{:.2f}", *, scale: float = 1.0) -> str:
    """A cell; empty where nothing was measured."""
    return "" if value is None else pattern.format(scale * value)


def spread_cell(values: Sequence[float], digits: int = 0, *, scale: float = 1.0) -> str:
    """Median, first and last decile; empty where nothing was measured."""
    return Spread.of(values).cell(digits, scale=scale) if values else ""


def largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Relative; 1 where a value is no number, which is as different as can be."""
    differences = [abs(a / b - 1) for a, b in zip(values, expected, strict=True)]
    return max(differences) if all(map(isfinite, differences)) else 1.0


def ratio_bar(
    claim: str,
    dividend: float | None,
    divisor: float | None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> list[Bar]:
    """The bar, or none where one of the two numbers is missing."""
    if dividend is None or not divisor:
        return []
    return [Bar(claim=claim, measured=dividend / divisor, at_least=at_least, at_most=at_most)]


def comparison(
    rows: Sequence[Row], quantity: str, metrics: tuple[str, str], tolerance: float
) -> list[Bar]:
    """A bar for each case that has the second metric: the first lies within the tolerance."""
    first, second = metrics
    bounds = {"at_least": 1 - tolerance, "at_most": 1 + tolerance}
    return [
        bar
        for case in cases_of(rows, second)
        for bar in ratio_bar(
            f"{case}: {quantity}, {first.split()[0]} / {second.split()[0]}",
            median_of(rows, case, first),
            median_of(rows, case, second),
            **bounds,
        )
    ]
