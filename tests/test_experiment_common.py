"""What every experiment needs of files, tables and ranks."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from experiments.common import by_seed
from experiments.common.launch import start_ranks
from experiments.common.results import (
    BLOCK_BEGINS,
    BLOCK_ENDS,
    Spread,
    read_csv,
    show,
    write_csv,
)
from shardhet.comm.failure import birth

FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a file."""

    name: str
    number: int
    seconds: float


def test_a_file_gives_back_the_rows_that_were_written(tmp_path: Path) -> None:
    rows = [
        Row(name="a, b", number=1, seconds=0.1 + 0.2),
        Row(name="", number=-2, seconds=1e-9),
    ]
    write_csv(tmp_path / "rows.csv", rows)
    assert read_csv(tmp_path / "rows.csv", Row) == rows


@dataclass(frozen=True, slots=True, kw_only=True)
class OfSeed:
    """What an instance came to."""

    seed: int
    seconds: float


def test_parts_of_a_list_of_seeds_come_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, each once; with --only-show nothing is written."""
    (tmp_path / "README.md").write_text(f"{BLOCK_BEGINS}\n{BLOCK_ENDS}\n")
    asked: list[int] = []

    def row_of(seed: int) -> OfSeed:
        asked.append(seed)
        return OfSeed(seed=seed, seconds=seed / 2)

    def started(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["run", *words])
        by_seed.run(
            tmp_path, OfSeed, row_of, lambda rows: f"{len(rows)} rows", range(3, 8), doc=None
        )

    started("--seeds", "5", "7")
    started("--seeds", "3", "6")
    started("--seeds", "0", "1", "--only-show")
    assert asked == [5, 6, 3, 4, 0]
    rows = read_csv(tmp_path / "results.csv", OfSeed)
    assert rows == [OfSeed(seed=i, seconds=i / 2) for i in range(3, 7)]
    assert "4 rows" in (tmp_path / "README.md").read_text()
    started()
    assert asked[5:] == [7]
    with pytest.raises(SystemExit):
        started("--seeds", "0", "1")


def test_a_cell_shows_the_median_and_how_far_it_reaches() -> None:
    spread = Spread.of([0.001 * n for n in range(11)])
    assert spread.cell(1, scale=1000) == "5.0 (1.0-9.0)"
    assert spread.cell(3) == "0.005 (0.001-0.009)"


def test_what_is_shown_can_go_into_a_readme() -> None:
    text = show("Steps", ["system", "ms"], [["one", "2"]])
    assert text == "Steps:\n\n| system | ms |\n| --- | ---: |\n| one | 2 |"


def test_ranks_answer_in_their_order(tmp_path: Path) -> None:
    join = partial(_join, f"file://{tmp_path}/store")
    assert start_ranks(FORKS, join, _rank_and, 2, "word") == [(0, "word"), (1, "word")]


def _join(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)


def _rank_and(rank: int, word: str) -> tuple[int, str]:
    assert rank == dist.get_rank()
    return rank, word


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1: .*no luck"):
        start_ranks(FORKS, _join_nobody, _fail, 1)


def _join_nobody(_rank: int) -> None:
    pass


def _fail(_rank: int) -> None:
    raise ValueError("no luck")


@pytest.mark.campaign  # of experiments alone
def test_ranks_of_an_experiment_that_is_killed_end_with_it(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys, time\n"
        "from experiments.common.launch import run_ranks\n"
        "def rank_sleeps(rank, folder):\n"
        "    pathlib.Path(folder, str(os.getpid())).touch()\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(rank_sleeps, 2, sys.argv[1])\n"
    )
    (tmp_path / "program.py").write_text(program)
    folder = tmp_path / "ranks"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, str(tmp_path / "program.py"), str(folder)]
    killed = subprocess.Popen(command, env=environment)
    try:
        wait_until(lambda: len(list(folder.iterdir())) == 2, seconds=60)
    finally:
        killed.kill()
        killed.wait()
    pids = [int(each.name) for each in folder.iterdir()]
    wait_until(lambda: not any(birth(pid) for pid in pids), seconds=5)


def wait_until(is_so: Callable[[], bool], *, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
