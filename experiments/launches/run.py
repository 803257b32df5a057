"""Does every launch make exactly one complete run folder?

python -m experiments.launches.run            about ten minutes
python -m experiments.launches.run --quick    two launches of each kind
"""

import json
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from tempfile import TemporaryDirectory

from hatchling.builders.wheel import WheelBuilder

from experiments.common.machine import REPOSITORY
from experiments.common.results import Bar, Page, console, parser_of

HERE = Path(__file__).parent
TIMEOUT_S = 300
NUM_STEPS = 3
TINY = (
    "debug=quick",
    "cluster.device=CPU",
    "model.width=16",
    "model.num_layers=1",
    "data.seq_len=8",
    "data.num_judged_samples=2",
    f"num_steps={NUM_STEPS}",
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN = ("-m", "shardhet.apps.train")
FOUR_RANKS = "torchrun, 4 ranks"
TWO_AGENTS = "torchrun, agents of 1 and 3 ranks"
SWEEP = "shardhet train -m, 4 jobs"
WHEEL = "a wheel in an empty environment"
HEADER = ["launch", "complete", "launches", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one launch left behind."""

    kind: str
    number: int
    is_complete: bool  # as many folders as jobs, every step of each in its metrics
    seconds: float
    words: str  # the end of what it printed, where it is not complete


def four_ranks(folder: Path) -> list[subprocess.Popen[str]]:
    """One agent."""
    return [start([*TORCHRUN, "--standalone", "--nproc-per-node=4", *TRAIN, *TINY], folder)]


def two_agents(folder: Path) -> list[subprocess.Popen[str]]:
    """As on two hosts, one with a process and one with three."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    rendezvous = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--local-addr=localhost",
    )
    return [
        start([*TORCHRUN, *rendezvous, f"--nproc-per-node={number}", *TRAIN, *TINY], folder)
        for number in (1, 3)
    ]


def sweep(folder: Path) -> list[subprocess.Popen[str]]:
    """Four jobs, one after the other, each with ranks of its own."""
    keys = ("cluster.num_ranks=2", "-m", "optim.lr=1e-3,2e-3", "seed=1,2")
    return [start([sys.executable, "-m", "shardhet.apps.main", "train", *TINY, *keys], folder)]


def start(
    command: Sequence[str | Path], folder: Path, **variables: str
) -> subprocess.Popen[str]:
    """In ``folder``, with this checkout first on the path."""
    return subprocess.Popen(
        list(command),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def installed_wheel() -> Iterator[Path]:
    """The console script of an environment that has the wheel and what it needs, no more."""
    with TemporaryDirectory() as name:
        [wheel] = WheelBuilder(str(REPOSITORY)).build(directory=name, versions=["standard"])
        environment = Path(name) / "environment"
        venv.create(environment, with_pip=True)
        pip = (environment / "bin" / "python", "-m", "pip", "install", "--quiet")
        subprocess.run([*pip, wheel, "-c", REPOSITORY / "constraints.txt"], check=True)
        yield environment / "bin" / "shardhet"


def launch(
    kind: str,
    number: int,
    begin: Callable[[Path], list[subprocess.Popen[str]]],
    *,
    runs_glob: str = "runs/*",
    num_runs: int = 1,
) -> Launch:
    """One launch in a folder of its own."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        start_s = time.perf_counter()
        processes = begin(folder)
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        seconds = time.perf_counter() - start_s
        runs = [each for each in folder.glob(runs_glob) if each.is_dir()]
        is_complete = (
            not any(process.returncode for process in processes)
            and len(runs) == num_runs
            and all(num_losses(each) == NUM_STEPS for each in runs)
        )
        words = "" if is_complete else " | ".join(text[-300:] for text in printed)
        return Launch(
            kind=kind, number=number, is_complete=is_complete, seconds=seconds, words=words
        )


def num_losses(run_dir: Path) -> int:
    """Steps in the metrics of a run."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return sum("loss" in json.loads(line) for line in lines)


def main() -> None:
    """Launch, count, and keep."""
    options = parser_of(__doc__).parse_args()
    page = Page(HERE, is_kept=not options.quick)
    times = 2 if options.quick else 20
    launches = []
    for kind, begin in ((FOUR_RANKS, four_ranks), (TWO_AGENTS, two_agents)):
        launches += [launch(kind, i, begin) for i in range(times)]
    launches.append(launch(SWEEP, 0, sweep, runs_glob="runs/*/[0-9]*", num_runs=4))
    if not options.quick:
        with installed_wheel() as shardhet:
            launches.append(
                launch(
                    WHEEL, 0, lambda f: [start([shardhet, "train", *TINY], f, PYTHONPATH="")]
                )
            )
    report(launches, page)
    page.keep({"results.csv": launches})


def report(launches: Sequence[Launch], page: Page) -> None:
    """A table of kinds and a bar for each."""
    rows, bars = [], []
    for kind in dict.fromkeys(each.kind for each in launches):
        of_kind = [each for each in launches if each.kind == kind]
        complete = sum(each.is_complete for each in of_kind)
        median_s = median_high(each.seconds for each in of_kind)
        rows.append([kind, str(complete), str(len(of_kind)), f"{median_s:.1f}"])
        claim = f"{kind}: part of launches that leave what they should"
        bars.append(Bar(claim=claim, measured=complete / len(of_kind), at_least=1.0))
    for each in launches:
        if each.words:
            console.print(f"{each.kind} {each.number}: {each.words}", markup=False)
    page.table("Launches", HEADER, rows)
    page.bars(bars)


if __name__ == "__main__":
    main()
