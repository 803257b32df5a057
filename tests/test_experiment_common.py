"""What every experiment needs of files, tables and ranks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.common import by_seed
from experiments.common.results import (
    BLOCK_BEGINS,
    BLOCK_ENDS,
    read_csv,
)
from shardhet.comm.failure import birth


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
