"""Sentences, tables of figures, at once or row by row, and a status line."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

FILE_COLUMNS = 200  # of what is no terminal, so that nothing is cut and paths are not wrapped


class WideConsole(Console):
    """A console as wide as the terminal, or wide enough for tables in a file or a pipe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = FILE_COLUMNS


def say(console: Console, *lines: str | None) -> None:
    """Print lines as they are, a path or a key in one piece; None is left out."""
    for line in filter(None, lines):
        console.print(line, markup=False, soft_wrap=True)


@contextmanager
def refusing(
    what_follows: str, kinds: tuple[type[Exception], ...] = (ValueError,), *, status: int = 2
) -> Iterator[None]:
    """Context whose errors of these kinds end the program, which says them and what follows."""
    try:
        yield
    except kinds as error:
        say(Console(stderr=True, highlight=False), f"{error}{what_follows}")
        raise SystemExit(status) from None


def figures_table(*names: str, num_left: int = 1, wraps: bool = False) -> Table:
    """An empty table, the same in a file as on a terminal; ``num_left`` columns have words.

    With ``wraps``, cells take more lines where a terminal is too narrow.
    """
    table = Table(box=box.ASCII)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < num_left else "right", no_wrap=not wraps)
    return table


class StreamedTable:
    """A table whose rows appear as they are known; widths are fixed before the first one."""

    def __init__(
        self,
        console: Console,
        columns: Sequence[tuple[str, int]],
        *,
        title: str | None = None,
        num_left: int = 1,
    ) -> None:
        """``columns`` are names and widths; the first ``num_left`` are aligned to the left."""
        self._console = console
        self._widths = [max(len(name), width) for name, width in columns]
        self._num_left = num_left
        if title is not None:
            say(self._console, title)
        say(self._console, f"+{'-' * (sum(self._widths) + 3 * len(columns) - 1)}+")
        self.add_row(*(name for name, _ in columns))
        say(self._console, f"|{'+'.join('-' * (width + 2) for width in self._widths)}|")

    def add_row(self, *cells: str) -> None:
        """Print one row."""
        aligned = [
            cell.ljust(width) if i < self._num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, self._widths, strict=True))
        ]
        say(self._console, f"| {' | '.join(aligned)} |")

    def end(self) -> None:
        """Print the last line."""
        say(self._console, f"+{'-' * (sum(self._widths) + 3 * len(self._widths) - 1)}+")


class Spinner:
    """Says on a terminal what is being done."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def for_(self, what: str) -> Iterator[None]:
        """Context in which ``what`` is done; shows nothing where there is no terminal."""
        with self._console.status(f"{what} ..."):
            yield
