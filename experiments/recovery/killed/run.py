"""Runs whose launcher, agent or rank is killed or stopped: what is left, and does it go on?

python -m experiments.recovery.killed.run                     70 faults, more than an hour
python -m experiments.recovery.killed.run --seeds 0 7         some of them; keeps nothing
python -m experiments.recovery.killed.run --again 0 7         in place of those in results.csv

A seed draws the deed, the number of ranks, the rank, and the moment.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from experiments.common.results import Bar, Page, Spread, parser_of, read_csv

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
MARK = "SHARDHET_CAMPAIGN"  # in the environment of all processes of one fault
LAUNCHER, AGENT, RANK, STOP = DEEDS = ("launcher", "agent", "rank", "stop")
ROUND = (LAUNCHER, AGENT, RANK, STOP, LAUNCHER, AGENT, RANK)  # stops are half as many
NUM_FAULTS = 70
HANG_TIMEOUT_S = 10.0  # of the runs in which a rank is stopped
MAX_SECONDS_LEFT = 30.0  # after the deed; after the patience with a rank that is stopped
HANGS_AFTER_S = 150.0  # what runs then is killed
LIMIT_S = 400.0  # of one start, on a busy machine
SECONDS_BETWEEN_LOOKS = 0.2
START_S = 12.0  # about; deeds at the start fall into it
STEPS_MORE = 3  # of the start that goes on
SHM = Path("/dev/shm")
SMALL = (
    "data=text_dir",
    "debug=quick",
    "data.num_judged_samples=2",
    "model.width=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.hidden_width=16",
    "data.seq_len=8",
    "cluster.device=CPU",
    "checkpoint.every=5",
    "resume=auto",
)
HEADER = ["deed", "faults", "as they should", "s until nothing runs (p10-p90)", "most"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a run, and when."""

    seed: int
    deed: str
    world_size: int
    rank: int  # that is killed or stopped, if it is a rank
    step: int  # after which it happens; 0: while the run starts
    later_s: float  # than that step, or than the start
    keeps_replicas: bool

    @classmethod
    def of(cls, seed: int) -> "Fault":
        """Draw it."""
        rng = random.Random(seed)
        deed = ROUND[seed % len(ROUND)]
        world_size = rng.choice([2, 3])
        # A rank that is stopped while the run starts has ten times the patience.
        is_early = deed != STOP and rng.random() < 0.25
        return cls(
            seed=seed,
            deed=deed,
            world_size=world_size,
            rank=rng.randrange(world_size),
            step=0 if is_early else rng.randrange(6, 30),
            later_s=round(rng.uniform(0, START_S if is_early else 0.5), 2),
            keeps_replicas=rng.random() < 0.5,
        )

    def command(self, folder: Path, num_steps: int) -> list[str]:
        """That of a user, as one list."""
        keys = [*SMALL, f"data.path={folder}/text", f"num_steps={num_steps}"]
        if self.deed == STOP:
            keys.append(f"hang_timeout_s={HANG_TIMEOUT_S}")
        if self.keeps_replicas:
            keys.append("replicas.every=2")
        keys.append(f"hydra.run.dir={folder}/run")
        if self.deed == AGENT:
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={self.world_size}"]
            return [sys.executable, *torchrun, "-m", "shardhet.apps.train", *keys]
        keys.append(f"cluster.num_ranks={self.world_size}")
        return [sys.executable, "-m", "shardhet.apps.main", "train", *keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a fault."""

    seed: int
    deed: str
    world_size: int
    rank: int
    step: int
    later_s: float
    keeps_replicas: bool
    at_step: int  # the last that had been taken
    seconds: float  # from the deed until nothing was left running
    went_on_after: int  # the step
    verdict: str  # "as it should", or what went wrong
    load: float = 0.0  # runnable processes at the end, mean of a minute

    @property
    def is_well(self) -> bool:
        """Whether all was as it should be."""
        return self.verdict == "as it should"

    @property
    def seconds_over(self) -> float:
        """The same, after the patience with a rank that is stopped."""
        return self.seconds - (HANG_TIMEOUT_S if self.deed == STOP else 0.0)


class Run:
    """The processes of one fault, found by their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid4().hex
        self.screen = folder / "screen"

    @contextmanager
    def started(self, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command; what is left of it at the end is killed."""
        paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, MARK: self.mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with self.screen.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=file, stderr=file
            )
        try:
            yield process
        finally:
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def pids(self) -> list[int]:
        """All processes that are alive, whoever their parent is."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                stat = (each / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if stat[0] not in "ZX" and wanted in (each / "environ").read_bytes():
                    found.append(int(each.name))
        return sorted(found)

    def rank_pid(self, rank: int) -> int | None:
        """The process of a rank, once there is one."""
        for pid in self.pids():
            with suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                status = Path(f"/proc/{pid}/status").read_text()
                is_child_of_rank = f"PPid:\t{os.getpid()}" in status
                if f"RANK={rank}".encode() in environ and not is_child_of_rank:
                    return pid
        return None

    def losses(self) -> dict[int, float]:
        """By step, as far as they are written."""
        path, found = self.folder / "run" / "metrics.jsonl", {}
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):
                values = json.loads(line)
                if "loss" in values:
                    found[int(values["step"])] = float(values["loss"])
        return found

    def text(self) -> str:
        """All that is on the screen."""
        return self.screen.read_text(errors="replace")


def inject(fault: Fault) -> Outcome:
    """Run a training, disturb it, and start it again."""
    with TemporaryDirectory() as name:
        run = Run(Path(name))
        (run.folder / "text").mkdir()
        for page in range(60):  # one in twenty is held out
            (run.folder / "text" / f"{page}.txt").write_text(f"page {page} " * 50)
        with run.started(fault.command(run.folder, 100_000)) as process:
            pid = _reach(fault, run, process)
            at_step = max(run.losses(), default=0)
            began_s = time.monotonic()
            if pid is not None:
                os.kill(pid, signal.SIGSTOP if fault.deed == STOP else signal.SIGKILL)
            left = _wait_until_none_runs(run, process)
            seconds = time.monotonic() - began_s
            said = run.text()
        verdict = _judge(fault, pid, left, said)
        went_on_after = -1
        if verdict is None:
            verdict, went_on_after = _go_on(fault, run, at_step)
        rest = _files_in_memory(run)
    if verdict is None and rest:
        verdict = f"left in {SHM}: {rest}"
    if verdict is not None:
        print(said[-3000:], flush=True)
    return Outcome(
        **asdict(fault),
        at_step=at_step,
        seconds=round(seconds, 2),
        went_on_after=went_on_after,
        verdict=verdict or "as it should",
        load=round(os.getloadavg()[0], 1),
    )


def _reach(fault: Fault, run: Run, process: subprocess.Popen[bytes]) -> int | None:
    """Wait for the moment of the fault; the process that it happens to."""
    deadline_s = time.monotonic() + LIMIT_S
    while fault.step and time.monotonic() < deadline_s and process.poll() is None:
        if max(run.losses(), default=0) >= fault.step:
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    time.sleep(fault.later_s)
    if fault.deed in (LAUNCHER, AGENT):
        return process.pid if process.poll() is None else None
    pid = run.rank_pid(fault.rank)
    while pid is None and time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        pid = run.rank_pid(fault.rank)
    return pid


def _wait_until_none_runs(run: Run, process: subprocess.Popen[bytes]) -> list[str]:
    """Wait; the command lines of those that run at the limit."""
    deadline_s = time.monotonic() + HANGS_AFTER_S
    while True:
        process.poll()  # or it stays as a zombie
        left = run.pids()
        if not left:
            return []
        if time.monotonic() > deadline_s:
            return [_command_of(pid) for pid in left]
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return "has ended just now"


def _files_in_memory(run: Run) -> list[str]:
    """What the run keeps in memory."""
    path = run.folder / "run" / "id"
    name = path.read_text().split()[0] if path.exists() else "none"
    return [each.name for each in (SHM / "shardhet" / name).rglob("*") if each.is_file()]


def _judge(fault: Fault, pid: int | None, left: Sequence[str], said: str) -> str | None:
    """What went wrong until nothing ran; None if nothing did."""
    if pid is None:
        return "it ended before the deed"
    if left:
        return f"left running: {left}"
    needed = {
        LAUNCHER: ["the launcher of this rank", "is gone"],
        AGENT: ["the launcher of this rank", "is gone"],
        RANK: [f"rank  {fault.rank} (", "ended by signal 9"],
        STOP: [f"rank  {fault.rank} (", "its process is stopped (SIGSTOP)"],
    }[fault.deed]
    # A launcher that ends before it has started ranks leaves nobody who could tell.
    if fault.deed in (LAUNCHER, AGENT) and fault.step == 0 and not said.strip():
        return None
    missing = [each for each in needed if each not in said]
    return f"not on the screen: {missing}" if missing else None


def _go_on(fault: Fault, run: Run, at_step: int) -> tuple[str | None, int]:
    """Start the run again, for a few steps more; what went wrong, and after which step."""
    before = run.losses()
    saved = [
        int(each.name.rpartition("_")[2])
        for each in (run.folder / "run" / "checkpoints").glob("*")
        if each.name[0] != "."
    ]
    last = max(before, default=0) + STEPS_MORE
    with run.started(fault.command(run.folder, last)) as process:
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"the next start hangs: {run.text()[-500:]}", -1
    if code:
        return f"the next start ends with {code}: {run.text()[-500:]}", -1
    if sorted(run.losses()) != list(range(1, last + 1)):
        return f"steps are missing after {at_step}: {sorted(run.losses())[-8:]}", -1
    after = run.losses()
    same = [step for step in before if after[step] == before[step]]
    if len(same) < len([step for step in before if step <= max(saved, default=0)]):
        return "steps before the last checkpoint have other losses", max(saved, default=0)
    return None, max(saved, default=0)


def report(outcomes: Sequence[Outcome], page: Page) -> None:
    """The tables of a campaign."""
    rows = []
    for deed in DEEDS:
        of_deed = [each for each in outcomes if each.deed == deed]
        if of_deed:
            seconds = [each.seconds_over for each in of_deed]
            good = sum(each.is_well for each in of_deed)
            cells = [Spread.of(seconds).cell(1), f"{max(seconds):.1f}"]
            rows.append([deed, str(len(of_deed)), str(good), *cells])
    page.table(
        "what is killed, or stopped (seconds are those after the patience)", HEADER, rows
    )
    for each in outcomes:
        if not each.is_well:
            page.tell(f"{each}")
    page.bars(
        [
            Bar(
                claim="faults after which not all was as it should be",
                measured=sum(not each.is_well for each in outcomes),
                at_most=0,
            ),
            Bar(
                claim="seconds until nothing ran, the most",
                measured=max(each.seconds_over for each in outcomes),
                at_most=MAX_SECONDS_LEFT,
            ),
        ]
    )


def main() -> None:
    """Run what the command line says."""
    parser = parser_of(__doc__, "seven of them; keeps nothing")
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--again", nargs=2, type=int, metavar=("FIRST", "STOP"))
    options = parser.parse_args()
    first, stop = options.seeds or options.again or (0, NUM_FAULTS)
    page = Page(HERE, is_kept=options.seeds is None and not options.quick)
    outcomes = []
    for seed in range(first, len(ROUND) if options.quick else stop):
        outcomes.append(inject(Fault.of(seed)))
        print(outcomes[-1], flush=True)
    if options.again:
        before = read_csv(HERE / "results.csv", Outcome)
        outcomes = list({each.seed: each for each in (*before, *outcomes)}.values())
    report(outcomes, page)
    page.keep({"results.csv": outcomes})


if __name__ == "__main__":
    main()
