"""What every experiment needs of files, tables and ranks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardhet.comm.failure import birth


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
