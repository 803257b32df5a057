"""A rank that is stopped, loops or sleeps for ever ends the run on all others, by name."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardhet import HetFSDP, Plan
from shardhet.checkpoint import save
from shardhet.checkpoint.state import ranks
from shardhet.comm.channel import may_take_long, progress
from shardhet.comm.failure import Failure
from shardhet.comm.liveness import watch
from shardhet.comm.liveness.diagnosis import panel
from shardhet.comm.liveness.ending import EXIT_STATUS
from shardhet.comm.liveness.watch import watch_ranks
from tests.misdeeds import Misdeed, commit
from tests.selection import one_in, only
from tests.test_bad_input import Net
from tests.worlds import Outcome, on_ranks, patience, run_ranks, run_ranks_expecting_failure

TIMEOUT_S = 2.0
WITHIN_S = 20.0
STOPPED_FOR_S = 8.0
STEP = 3
PLACES = ("forward", "backward", "optimizer", "saving", "evaluation", "loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one rank does, and when."""

    deed: Misdeed
    place: str
    rank: int
    folder: str = ""  # nothing is saved without

    def do(self) -> None:
        if self.deed == "stop":
            stop_here()
        else:
            commit(self.deed, slow_s=0.7 * TIMEOUT_S)


def stop_here(*, for_s: float = STOPPED_FOR_S) -> None:
    """SIGSTOP; another process ends this one, after its peers must have noticed."""
    kill = f"sleep {for_s * patience()}; kill -9 {os.getpid()}"
    subprocess.Popen(["sh", "-c", kill])
    os.kill(os.getpid(), signal.SIGSTOP)


class Optimizer(torch.optim.SGD):
    spring: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        self.spring()
        return super().step(closure)


def keep(folder: str, failure: Failure) -> None:
    if folder:
        Path(f"{folder}.panel").write_text(panel(failure))


def train(rank: int, world_size: int, case: Case) -> int:
    watch_ranks(hang_timeout_s=TIMEOUT_S, on_failure=partial(keep, case.folder))
    return take_steps(rank, case, Plan.even(world_size, microbatch_size=2))


def take_steps(rank: int, case: Case, plan: Plan, device: torch.device | None = None) -> int:
    torch.manual_seed(1)
    net = Net()
    model = HetFSDP(net, plan, device=device)
    optimizer = Optimizer(model.parameters(), lr=0.01)
    doing = ""

    def spring(*_: Any) -> None:
        if rank == case.rank and model.step == STEP and doing == case.place:
            case.do()

    net.layer(1).in_forward = net.layer(1).in_backward = spring
    optimizer.spring = spring  # type: ignore[method-assign]
    x = torch.randn(plan.ranks[rank].rank_batch_size, 4, dtype=torch.float64).to(model.device)
    for step in range(STEP + 2):
        time.sleep(0.2)  # so that the last sign of life comes from this step
        doing = "loader"
        spring()
        doing = "forward"
        output = model(x)
        doing = "backward"
        model.backward(*output)
        model._runtime.rounds.end_step(step)  # the deeds below belong to the same step
        doing = "optimizer"
        optimizer.step()
        doing = "saving"
        if step == STEP and case.folder:
            with may_take_long("saving"):
                spring()
                save(model, optimizer, case.folder)
        doing = "evaluation"
        with torch.no_grad():
            model.eval()
            model(x)
            model.train()
        model._runtime.rounds.end_step(step + 1)
    return model.step


def check(outcomes: Sequence[Outcome], case: Case, *parts: str) -> None:
    for outcome in outcomes:
        assert outcome.is_within(WITHIN_S)
        if outcome.rank == case.rank:
            continue
        message = outcome.message
        assert outcome.exception_name == "RuntimeError", (outcome, outcome.traceback)
        assert message.startswith(f"rank {case.rank} (cpu"), message
        for part in parts:
            assert part in message


@pytest.mark.parametrize(
    ("place", "rank", "world_size"),
    one_in(  # whom signs accuse is tested in test_liveness
        8,
        [
            ("forward", 0, 2),
            ("forward", 1, 4),
            ("backward", 2, 3),
            ("optimizer", 1, 2),
            ("saving", 0, 3),
            ("saving", 1, 2),
            ("evaluation", 0, 2),
            ("loader", 3, 4),
        ],
    ),
)
def test_a_rank_that_is_stopped_is_named_by_all_others(
    place: str, rank: int, world_size: int, tmp_path: Path
) -> None:
    case = Case(deed="stop", place=place, rank=rank, folder=str(tmp_path / "saved"))
    outcomes = run_ranks_expecting_failure(
        train, world_size, world_size, case, within_s=WITHIN_S
    )
    check(outcomes, case, "has given no sign of life", "stopped (SIGSTOP")
    assert outcomes[rank].exit_code == -signal.SIGKILL
    assert "has given no sign of life" in (tmp_path / "saved.panel").read_text()


@pytest.mark.parametrize(
    ("deed", "place", "line"),
    one_in(
        3,
        [
            ("loop", "forward", "forward of unit 'layers.1'"),
            ("loop", "backward", "backward of unit 'layers.1'"),
            ("sleep", "loader", "the program around HetFSDP"),
        ],
    ),
)
def test_a_rank_that_stands_still_is_named_with_its_unit_and_ended(
    deed: Any, place: str, line: str, tmp_path: Path
) -> None:
    case = Case(deed=deed, place=place, rank=1, folder=str(tmp_path / "saved"))
    outcomes = run_ranks_expecting_failure(train, 3, 3, case, within_s=WITHIN_S)
    check(outcomes, case, "stands still: alive", line, "misdeeds.py:", "of step 4")
    assert outcomes[1].exit_code == EXIT_STATUS
    shown = (tmp_path / "saved.panel").read_text()
    assert "a rank stands still" in shown.splitlines()[0]
    assert "case.do()" in shown  # its stack


@pytest.mark.parametrize("place", one_in(6, PLACES))
def test_a_slow_rank_is_not_accused(place: str, tmp_path: Path) -> None:
    case = Case(deed="slow", place=place, rank=1, folder=str(tmp_path / "saved"))
    assert run_ranks(train, 2, 2, case, fresh_world=True) == [STEP + 2] * 2


def wait_for_a_long_phase(rank: int) -> None:
    watch_ranks(hang_timeout_s=1.0)
    model, x = small_model(2)
    model.backward(*model(x))
    if rank == 1:
        with may_take_long("evaluating on rank 1"):
            time.sleep(4.0)
    dist.barrier()
    model.backward(*model(x))


def small_model(world_size: int) -> tuple[HetFSDP, torch.Tensor]:
    torch.manual_seed(1)
    model = HetFSDP(Net(), Plan.even(world_size, microbatch_size=2))
    return model, torch.randn(2, 4, dtype=torch.float64)


def be_slow_before_the_first_step(rank: int) -> None:
    watch_ranks(hang_timeout_s=1.0)
    model, x = small_model(2)
    if rank == 1:
        time.sleep(4.0)  # builds kernels, reads files, ...
    model.backward(*model(x))
    model.backward(*model(x))


def wait_for_own_collectives(rank: int) -> None:
    """Rank 1 is always found computing, and rank 0 waiting, in calls that have no marks."""
    watch_ranks(hang_timeout_s=1.0)
    model, x = small_model(2)
    model.backward(*model(x))
    for _ in range(25):
        if rank == 1:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(1))


def leave_the_others_without_work(rank: int) -> None:
    """Nobody waits for rank 1, which stands still, or for rank 0, which is done."""
    watch_ranks(hang_timeout_s=1.0)
    model, x = small_model(2)
    model.backward(*model(x))
    if rank == 1:
        time.sleep(4.0)


@on_ranks(2, fresh_world=True)
def test_a_watch_that_has_ended_watches_no_longer(rank: int) -> None:
    with watch_ranks(hang_timeout_s=60.0):
        assert progress.is_watched
    assert not progress.is_watched  # calls keep their own limits again


def save_late(rank: int) -> None:
    """Rank 1 comes to the save later than ranks may without having said so."""
    watch_ranks(hang_timeout_s=1.0)
    ranks.SECONDS_FOR_ALL_TO_COME = 1.0
    model, x = small_model(2)
    model.backward(*model(x))
    if rank == 1:
        with may_take_long("evaluating on rank 1"):
            time.sleep(4.0)
    with TemporaryDirectory() as folder:
        save(model, None, dist_folder(model, folder))
        model.exchange([])


def dist_folder(model: HetFSDP, folder: str) -> str:
    """One folder for all ranks."""
    return str(model.exchange_objects(folder)[0]) + "/saved"


@pytest.mark.parametrize(
    "honest",
    only(
        [wait_for_a_long_phase, be_slow_before_the_first_step],
        [
            save_late,
            wait_for_a_long_phase,
            be_slow_before_the_first_step,
            wait_for_own_collectives,
            leave_the_others_without_work,
        ],
    ),
)
def test_an_honest_run_is_left_alone(honest: Callable[[int], None]) -> None:
    run_ranks(honest, 2, fresh_world=True)


@on_ranks(2, fresh_world=True)
def test_a_model_starts_the_watch_unless_the_program_has_decided(rank: int) -> None:
    """HetFSDP alone starts the watch; the program's own calls change it, or switch it off."""
    watch._is_decided.clear()  # as in a program that has not called watch_ranks
    small_model(2)
    [started] = watch._running
    assert started.hang_timeout_s == watch.HANG_TIMEOUT_S <= 60.0
    small_model(2)
    assert watch._running == [started]
    assert watch_ranks(hang_timeout_s=7.0) is started
    assert started.hang_timeout_s == 7.0
    watch_ranks(hang_timeout_s=0)
    small_model(2)
    assert not watch._running


def test_the_watch_can_be_switched_off_and_costs_no_thread_then() -> None:
    assert not watch_ranks(hang_timeout_s=None).is_running
    assert not watch_ranks().is_running  # there is one process
    assert "shardhet watch" not in [thread.name for thread in threading.enumerate()]
