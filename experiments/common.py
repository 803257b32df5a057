"""What every experiment needs: ranks to run on, a record of the machine, spreads, tables.

Raw samples go to a csv file.  Tables and README blocks are made from samples alone, so that
what a README shows can be made again from the file beside it.
"""

import csv
import ctypes
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable

Result = TypeVar("Result")
Record = TypeVar("Record")

REPOSITORY = Path(__file__).parent.parent
GROUP_TIMEOUT = timedelta(minutes=5)
BLOCK_BEGINS = "<!-- results: written by run.py -->"
BLOCK_ENDS = "<!-- end of results -->"

PR_SET_PDEATHSIG = 1  # prctl(2)

_TABLE_WIDTH = 130  # of a pipe or a log file, which have no width of their own

console = Console()
if not console.is_terminal:
    console = Console(width=_TABLE_WIDTH)


# Ranks


def run_ranks(
    fn: Callable[..., Result], world_size: int, *args: Any, initialises: bool = True
) -> list[Result]:
    """``fn(rank, *args)`` of every rank of a fresh gloo world with one thread a rank.

    ``fn`` must be a module-level function.  Without ``initialises`` it is called before
    ``init_process_group``, as ``fn(rank, join, *args)``, and calls ``join()`` itself.
    Raises ``RuntimeError`` with the traceback of the first rank to fail.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        join = partial(_join_over_file, f"file://{folder}/store", world_size)
        return start_ranks(context, join, fn, world_size, *args, initialises=initialises)


def _join_over_file(store: str, world_size: int, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )


def start_ranks(
    context: BaseContext,
    join: Callable[[int], None],
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    initialises: bool = True,
) -> list[Result]:
    """As ``run_ranks``; processes are made in ``context``, ``join(rank)`` opens their group."""
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(  # type: ignore[attr-defined]  # every context has one of its own
            target=_run_rank, args=(fn, rank, join, sender, args, initialises), daemon=True
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()  # ours; the end of file then tells when the rank is gone
        return _collect([receiver for receiver, _ in pipes])
    finally:
        for process in ranks:
            if process.pid is not None:
                process.join(5)
                process.kill()


def _collect(receivers: list[Connection]) -> list[Any]:
    result_by_rank: dict[int, Any] = {}
    while len(result_by_rank) < len(receivers):
        waiting = [r for i, r in enumerate(receivers) if i not in result_by_rank]
        for receiver in wait(waiting):
            rank = next(i for i, other in enumerate(receivers) if other is receiver)
            try:
                result, failure = receivers[rank].recv()
            except EOFError:
                result, failure = None, "it ended without a message."
            if failure is not None:
                raise RuntimeError(f"rank {rank} of {len(receivers)}: {failure}")
            result_by_rank[rank] = result
    return [result for _, result in sorted(result_by_rank.items())]


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    join: Callable[[int], None],
    sender: Connection,
    args: tuple[Any, ...],
    initialises: bool,
) -> None:
    torch.set_num_threads(1)
    _end_with_parent()
    try:
        if initialises:
            join(rank)
            result = fn(rank, *args)
        else:
            result = fn(rank, partial(join, rank), *args)
        dist.barrier()  # nobody leaves while a peer still talks to it
        sender.send((result, None))
        dist.destroy_process_group()
    except BaseException:
        sender.send((None, traceback.format_exc()))


def _end_with_parent() -> None:
    """Let the system kill this rank when who started it is gone, killed or not: it would go on
    computing, beside whatever is measured next.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it was gone before
        os._exit(1)


# The machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a number was measured on."""

    date: str  # UTC
    commit: str  # with "-dirty" where programs differ from it
    cpu: str
    num_cores: int
    memory_gib: float
    load_before: float  # runnable processes, mean of the minute before: 0 on a quiet machine
    system: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> "Environment":
        """This machine now."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            commit=_commit(),
            cpu=_cpu_model(),
            num_cores=len(os.sched_getaffinity(0)),
            memory_gib=round(memory_bytes / 2**30, 1),
            load_before=round(os.getloadavg()[0], 2),
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            torch=torch.__version__,
        )

    def as_markdown(self) -> str:
        """One line for a README."""
        return (
            f"{self.date}, commit `{self.commit}`; {self.cpu}, {self.num_cores} cores, "
            f"{self.memory_gib} GiB, {self.system}, load before {self.load_before}; "
            f"Python {self.python}, torch {self.torch}, gloo over loopback, one thread a rank."
        )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    value_by_key = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    name = value_by_key.get("model name", platform.processor() or "unknown CPU")
    family, model = value_by_key.get("cpu family", "?"), value_by_key.get("model", "?")
    return f"{name} (family {family} model {model})"


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "*.py", "*.toml")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


# Numbers


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
    """The inverse of ``write_csv``, for a dataclass whose fields are words and numbers."""
    type_by_name: dict[str, Any] = {each.name: each.type for each in fields(record)}  # type: ignore[arg-type]
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


def replace_cases(
    path: Path, rows: Sequence[Record], record: type[Record], order: Sequence[str]
) -> list[Record]:
    """Put ``rows`` in the place of a file's rows of the same ``case``; returns all.

    ``order`` is that of the cases in the file.
    """
    measured = {_case(row) for row in rows}
    before = read_csv(path, record) if path.exists() else []
    kept = [row for row in before if _case(row) not in measured]
    merged = sorted([*kept, *rows], key=lambda row: order.index(_case(row)))
    write_csv(path, merged)
    return merged


def _case(row: object) -> str:
    case: str = row.case  # type: ignore[attr-defined]
    return case


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
