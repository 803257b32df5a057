"""Rows of drawn instances, one per seed, in one file that several processes add to.

python -m experiments.sentences.run                      # goes on with results.csv
python -m experiments.sentences.run --seeds 600 750      # a part of it
python -m experiments.sentences.run --seeds 0 4 --only-show   # writes nothing
"""

import argparse
import csv
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from operator import attrgetter
from os import SEEK_END
from pathlib import Path
from typing import Any, TextIO, TypeVar

from experiments.common.machine import Environment
from experiments.common.results import (
    BLOCK_BEGINS,
    console,
    read_csv,
    write_csv,
    write_results_block,
)

Row = TypeVar("Row")  # a frozen dataclass with its seed


def run(
    folder: Path,
    record: type[Row],
    row_of: Callable[[int], Row | None],
    as_markdown: Callable[[list[Row]], str],
    seeds: range,
    *,
    doc: str | None,
    told: Callable[[Row], str] = str,
    how: str = "predictions, no ranks",
    file: str = "results.csv",
    key: str = "seed",
) -> None:
    """Add the rows that are missing to ``file``, and their table to README.md.

    A seed may have no row, and is tried again.  A README without the marks of a block is left
    as it is; ``key`` is the field with the seed.

    ``seeds`` are those of the file; others are looked at only where nothing is written.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--only-show", action="store_true", help="write nothing")
    given = parser.parse_args()
    asked = range(*given.seeds) if given.seeds else seeds
    if not given.only_show and not set(asked) <= set(seeds):
        parser.error(f"{file} is of seeds {seeds.start} to {seeds.stop - 1}; --only-show")
    path, environment = folder / file, Environment.here()
    rows: list[Row] = []
    for seed in asked:
        if not given.only_show and _is_known(path, record, seed, key):
            continue
        if (row := row_of(seed)) is None:
            continue
        rows.append(row)
        console.print(told(rows[-1]), markup=False, soft_wrap=True)
        if not given.only_show:
            _append(path, rows[-1])
    if not given.only_show:
        rows = _sorted(path, record, key)
    text = as_markdown(rows)
    console.print(text, markup=False, soft_wrap=True)
    readme = folder / "README.md"
    if not given.only_show and BLOCK_BEGINS in readme.read_text():
        write_results_block(readme, f"{environment.as_markdown(how)}\n\n{text}")


@contextmanager
def _held(path: Path) -> Iterator[TextIO]:
    """The end of a file, which no other process reads or writes meanwhile."""
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(0, SEEK_END)
        yield file


def _is_known(path: Path, record: type[Row], seed: int, key: str) -> bool:
    with _held(path) as file:
        return bool(file.tell()) and seed in map(attrgetter(key), read_csv(path, record))


def _append(path: Path, row: Any) -> None:
    with _held(path) as file:
        writer = csv.DictWriter(file, [e.name for e in fields(row)], lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(asdict(row))


def _sorted(path: Path, record: type[Row], key: str) -> list[Row]:
    """All rows of the file, which has them by seed from now on."""
    with _held(path):
        rows = sorted(read_csv(path, record), key=attrgetter(key))
        write_csv(path, rows)
    return rows
