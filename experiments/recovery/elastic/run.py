"""Nodes that are lost, told to leave, and come back: does training go on, and how soon?

python -m experiments.recovery.elastic.run            five runs of four nodes, three deeds each
python -m experiments.recovery.elastic.run --quick    one run; keeps nothing
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.common.results import Bar, Page, Spread, parser_of
from shardhet.records.plan import Plan

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SPEEDS = (0.6, 0.45, 0.3, 0.3)  # of the nodes, one device each; less than two cores together
NUM_RUNS = 6
GLOBAL_BATCH_SIZE = 16
CHECKPOINT_EVERY = 1000  # none but those of ranks that are told to leave
STEPS_ON_THEIR_WAY = 1  # a replica that is being copied when a node is lost does not count
IN_MEMORY = Path("/dev/shm")  # where nodes keep replicas
STEPS_BETWEEN = 12  # a node is disturbed once so many have been taken
SECONDS_BETWEEN_LOOKS = 0.02
LIMIT_S = 120.0
RESTART_LIMIT_S = 15.0  # from the start of the processes to the end of the next step
ROUNDING = 1e-9  # of losses in float64
LOST, JOINS = "is lost (kill -9)", "joins"
NOTICE, NOTICE_FILE = "is told to leave (SIGTERM)", "is told to leave (a file)"
DEEDS = (LOST, JOINS, NOTICE, NOTICE_FILE)
MODEL = ("model=tiny", "cluster.device=CPU")
HEADER = [
    "a node",
    "times",
    "s from deed to step",
    "of it from the start of the processes",
    "steps lost, most",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a run went on after a node was disturbed."""

    run: int
    deed: str
    node: int
    num_devices: int  # after it
    last_step: int  # that was recorded before
    went_on_with: int  # the first step after it
    seconds: float  # from the deed to the end of that step
    restart_s: float  # of it from the start of the first process

    @property
    def steps_lost(self) -> int:
        """Steps that were taken twice, of those that had been recorded."""
        return max(0, self.last_step + 1 - self.went_on_with)


class Nodes:
    """The agents of a run, one for each node."""

    def __init__(self, folder: Path, measured: Path) -> None:
        self.folder = folder
        self._measured = measured
        self._port = free_port()
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        """The node comes, or comes back."""
        # All are one host here; without ``is_host`` each would try to hold the rendezvous.
        rendezvous = f"is_host={node == 0},last_call_timeout=2,join_timeout=60,".lower()
        rendezvous += "keep_alive_interval=1,keep_alive_max_attempt=5"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"),
            *(f"--nnodes=1:{len(SPEEDS)}", "--max-restarts=9", "--rdzv-backend=c10d"),
            f"--rdzv-endpoint=localhost:{self._port}",
            f"--rdzv-conf={rendezvous}",
            *(
                "--monitor-interval=0.1",
                "--local-addr=localhost",
                "-m",
                "experiments.recovery.elastic.rank",
            ),
            *(*MODEL, "plan=measured", f"plan.measured={self._measured}"),
            f"plan.global_batch_size={GLOBAL_BATCH_SIZE}",
            *("num_steps=1000", "precision=FP64", f"checkpoint.every={CHECKPOINT_EVERY}"),
            *("resume=auto", f"hydra.run.dir={self.folder}"),
            # Each node looks for its own, as a cloud's agent leaves it there.
            "stop_on_signal.file=${oc.env:NODE_NOTICE}",
            *("replicas.every=1", "replicas.folder=${oc.env:NODE_REPLICAS}"),
            *("lr_scheduler=constant", "lr_scheduler.warmup_fraction=0"),
        ]
        environment = {
            **os.environ,
            "NODE_SPEED": str(SPEEDS[node]),
            "NODE_NOTICE": str(self._notice(node)),
            "NODE_REPLICAS": str(self.replicas(node)),
            "NODE_STARTED": str(self._started(node)),
            "OMP_NUM_THREADS": "1",
            # Without it torch (2.13) leaves a node that joins later waiting for the others.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        log = (self.folder.parent / f"node{node}.log").open("ab")
        self._agents[node] = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def lose(self, node: int) -> None:
        """The node is gone, and all of its processes."""
        os.killpg(self._agents[node].pid, signal.SIGSTOP)  # none may start others
        for pid in [*_children(self._agents[node].pid), self._agents[node].pid]:
            os.kill(pid, signal.SIGKILL)
        self._agents.pop(node).wait()
        shutil.rmtree(self.replicas(node), ignore_errors=True)

    def tell_to_leave(self, node: int) -> None:
        """The agent is asked to end."""
        self._agents[node].terminate()
        self._agents.pop(node)

    def leave_notice(self, node: int) -> None:
        """The file appears that the node's ranks look for."""
        self._notice(node).touch()
        self._agents.pop(node)

    def replicas(self, node: int) -> Path:
        """The folder of the node's own."""
        return IN_MEMORY / f"shardhet_{os.getpid()}_{self.folder.parent.name}_node{node}"

    @property
    def started_s(self) -> float:
        """When the newest process of the first node, which is never lost, was started."""
        return float(self._started(0).read_text(encoding="ascii"))

    def _started(self, node: int) -> Path:
        return self.folder.parent / f"started{node}"

    def _notice(self, node: int) -> Path:
        return self.folder.parent / f"notice{node}"

    def end(self) -> None:
        """End all that are left."""
        for agent in self._agents.values():
            for pid in [*_children(agent.pid), agent.pid]:
                os.kill(pid, signal.SIGKILL)
            agent.wait()
        for node in range(len(SPEEDS)):
            shutil.rmtree(self.replicas(node), ignore_errors=True)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(each) for each in listed.split()]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


class Metrics:
    """What a run has recorded so far."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"

    def entries(self) -> list[dict[str, Any]]:
        """All complete lines."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """By step; of a step that was taken twice, the last."""
        return {each["step"]: each["loss"] for each in self.entries() if "loss" in each}

    def wait_for_steps(self, number: int) -> int:
        """Until so many steps are recorded after those of now; returns the last of them."""
        last = max(self.losses(), default=0) + number
        _until(lambda: max(self.losses(), default=0) >= last, f"step {last}")
        return max(self.losses())

    @property
    def times_gone_on(self) -> int:
        """How many times the run has gone on from a checkpoint."""
        return sum("went_on" in each for each in self.entries())

    def wait_until_it_goes_on(self, times: int) -> dict[str, Any]:
        """What is recorded once the run has gone on so many times."""
        _until(lambda: self.times_gone_on >= times, "going on")
        return next(each for each in reversed(self.entries()) if "went_on" in each)

    def wait_until_all_take_part(self, number: int) -> None:
        """Until the plan in the run folder is for so many devices."""

        def takes_part() -> bool:
            path = self._path.with_name("plan.json")
            return path.exists() and Plan.load(path).world_size == number

        _until(takes_part, f"{number} devices")


def _until(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(SECONDS_BETWEEN_LOOKS)


def measure(folder: Path, *, max_microbatch_size: int = 16) -> Path:
    """What the devices of all nodes do, as ``shardhet measure`` finds it."""
    speeds = f"cluster.speeds=[{','.join(map(str, SPEEDS))}]"
    command = [
        *(sys.executable, "-m", "shardhet.apps.main", "measure", *MODEL),
        *(f"cluster.num_ranks={len(SPEEDS)}", speeds, "precision=FP64"),
        *(f"max_microbatch_size={max_microbatch_size}", "num_repeats=3"),
        f"out={folder / 'measured'}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder / "measured"


def undisturbed(folder: Path, num_steps: int) -> dict[int, float]:
    """The losses of a run on one device."""
    command = [
        *(sys.executable, "-m", "shardhet.apps.main", "train", *MODEL, "precision=FP64"),
        *("plan=even", f"plan.global_batch_size={GLOBAL_BATCH_SIZE}"),
        *("plan.microbatch_size=16", f"num_steps={num_steps}", f"hydra.run.dir={folder}"),
        *("lr_scheduler=constant", "lr_scheduler.warmup_fraction=0"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Metrics(folder).losses()


def disturb(run: int, measured: Path, folder: Path) -> list[Recovery]:
    """One run: a node is lost, comes back, and another is told to leave."""
    rng = random.Random(run)
    nodes = Nodes(folder / "run", measured)
    nodes.folder.mkdir(parents=True)
    metrics = Metrics(nodes.folder)
    # The first node holds torchrun's rendezvous, which cannot be lost.
    lost, leaves = rng.randrange(1, len(SPEEDS)), rng.randrange(1, len(SPEEDS))
    deeds = [(LOST, lost, nodes.lose), (JOINS, lost, nodes.start)]
    if run % 2:
        deeds.append((NOTICE, leaves, nodes.tell_to_leave))
    else:
        deeds.append((NOTICE_FILE, leaves, nodes.leave_notice))
    found: list[Recovery] = []
    num_devices = len(SPEEDS)
    try:
        nodes.start(0)
        for node in range(1, len(SPEEDS)):
            nodes.start(node)
        for deed, node, do in deeds:
            metrics.wait_until_all_take_part(num_devices)
            metrics.wait_for_steps(STEPS_BETWEEN + rng.randrange(10))
            deed_s, times = time.monotonic(), metrics.times_gone_on
            do(node)
            last_step = max(metrics.losses())
            went_on = metrics.wait_until_it_goes_on(times + 1)
            end_s = time.monotonic()
            num_devices += 1 if deed == JOINS else -1
            found.append(
                Recovery(
                    run=run,
                    deed=deed,
                    node=node,
                    num_devices=num_devices,
                    last_step=last_step,
                    went_on_with=went_on["step"],
                    seconds=round(end_s - deed_s, 2),
                    restart_s=round(end_s - nodes.started_s, 2),
                )
            )
            print(found[-1], flush=True)
        metrics.wait_for_steps(STEPS_BETWEEN)
    finally:
        nodes.end()
    return found


def report(found: Sequence[Recovery], errors: Sequence[float], page: Page) -> None:
    """The table and the bars."""
    rows = []
    for deed in DEEDS:
        of_deed = [each for each in found if each.deed == deed]
        if not of_deed:
            continue
        columns = ("seconds", "restart_s")
        cells = [Spread.of([getattr(e, name) for e in of_deed]).cell(1) for name in columns]
        lost = max(each.steps_lost for each in of_deed)
        rows.append([deed, str(len(of_deed)), *cells, str(lost)])
    page.table(f"{len(SPEEDS)} nodes of one device each", HEADER, rows)
    lost = [each for each in found if each.deed == LOST]
    others = [each.steps_lost for each in found if each.deed != LOST]
    claims = (
        (
            "s from torchrun's restart to the next step, a node lost, the most",
            max(each.restart_s for each in lost),
            RESTART_LIMIT_S,
        ),
        (
            "steps lost of those recorded, a node lost, the most",
            max(each.steps_lost for each in lost),
            STEPS_ON_THEIR_WAY,
        ),
        ("steps lost when a node joins or is told to leave, the most", max(others), 0),
        (
            "relative difference of losses from one undisturbed device, the most",
            max(errors),
            ROUNDING,
        ),
    )
    page.bars([Bar(claim=claim, measured=value, at_most=most) for claim, value, most in claims])


def main() -> None:
    """Run what the command line says."""
    options = parser_of(__doc__, "one run; keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    found: list[Recovery] = []
    errors: list[float] = []
    with TemporaryDirectory() as name:
        measured = measure(Path(name))
        for run in range(1 if options.quick else NUM_RUNS):
            folder = Path(name) / f"{run}"
            found += disturb(run, measured, folder)
            losses = Metrics(folder / "run").losses()
            expected = undisturbed(folder / "alone", max(losses))
            errors.append(max(abs(loss / expected[step] - 1) for step, loss in losses.items()))
            missing = sorted(set(range(1, max(losses) + 1)) - losses.keys())
            print(f"run {run}: {len(losses)} steps, error {errors[-1]:.1e}, missing {missing}")
    report(found, errors, page)
    page.keep({"results.csv": found})


if __name__ == "__main__":
    main()
