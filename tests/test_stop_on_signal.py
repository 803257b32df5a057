"""A run that is told to end soon saves its state, ends, and goes on as if untouched."""

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardhet.apps.launch.run_folder import RunFolder
from shardhet.checkpoint import Checkpoints
from shardhet.training.hooks.checkpoints import Timer
from tests.programs import TORCHRUN
from tests.selection import one_in
from tests.test_resume import losses
from tests.test_train import ALONE, FAILING_RANK, SMALL, run, start

NUM_STEPS = 8
RUN = (*SMALL, "cluster.num_ranks=2", f"num_steps={NUM_STEPS}", "precision=FP64")
# Each step takes long enough for a signal to arrive in the middle of the run.
SLOW_STEPS = """
import time
import shardhet.training.trainer

take_fast_step = shardhet.training.trainer.Trainer.train_step

def slowly(trainer, **options):
    time.sleep(0.4)
    return take_fast_step(trainer, **options)

shardhet.training.trainer.Trainer.train_step = slowly
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that nothing has happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run([*ALONE, *RUN, f"run_dir={folder}/run"], folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


def check_ended(folder: Path, undisturbed: dict[int, float]) -> int:
    """The run in ``folder`` has ended early, like the other until then; the step it saved."""
    step = int(json.loads(RunFolder(folder).end_path.read_text())["step"])
    assert 1 <= step < NUM_STEPS
    assert losses(folder) == {each: undisturbed[each] for each in range(1, step + 1)}
    latest = Checkpoints(folder / "checkpoints").latest()
    assert latest is not None
    assert latest.step == step
    return step


def check_goes_on(folder: Path, undisturbed: dict[int, float]) -> None:
    """It has, and goes on to the losses of the other."""
    step = check_ended(folder, undisturbed)
    (folder.parent / "sitecustomize.py").unlink(missing_ok=True)
    done = run([*ALONE, *RUN, f"run_dir={folder}", "resume=auto"], folder.parent)
    assert done.returncode == 0, done.stderr
    assert f"goes on after step {step}" in done.stdout
    assert losses(folder) == undisturbed
    assert json.loads(RunFolder(folder).end_path.read_text())["step"] == NUM_STEPS


def wait_for_step(folder: Path, step: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if (folder / "metrics.jsonl").exists() and step in losses(folder):
            return
        time.sleep(0.05)
    pytest.fail(f"no step {step}")


@pytest.mark.parametrize(
    ("number", "status"),
    one_in(3, [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGUSR1, 0)]),
)
def test_a_signal_to_the_program_ends_it_with_a_checkpoint(
    number: signal.Signals, status: int, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_STEPS)
    folder = tmp_path / "run"
    process = start([*ALONE, *RUN, f"run_dir={folder}"], tmp_path)
    wait_for_step(folder, 2)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "checkpoint.every=0: checkpoints every 30 minutes" in output
    assert re.search(r"the run ends after step .*\ngo on with: .* resume=run\n\Z", output)
    assert "Traceback" not in errors
    check_goes_on(folder, undisturbed)


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    standing_still = SLOW_STEPS.replace("0.4", "1000 * trainer.model.step")
    (tmp_path / "sitecustomize.py").write_text(standing_still)
    folder = tmp_path / "run"
    process = start([*ALONE, *RUN, f"run_dir={folder}"], tmp_path)
    wait_for_step(folder, 1)
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any(line.startswith("Ctrl-C: this step is finished") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began_s < 20  # the grace of ranks that are told to end is 30
    assert (process.returncode, errors) == (1, "stopped by SIGINT\n")


def test_checkpoints_by_time_are_at_the_same_step_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of ten seconds; the ranks ask each other seldom."""
    now_s, asked_at = [0.0], []

    def exchange(mine: float) -> list[float]:
        asked_at.append(now_s[0] // 10)
        return [mine, 1e9]

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    model: Any = SimpleNamespace(step=3, exchange_objects=exchange)
    for limit_s, due in ((0.0, []), (1000.0, [103, 203, 303])):
        now_s[0], found = 30.0, []
        timer = Timer(model, limit_s)
        for step in range(4, 350):
            now_s[0] = 10.0 * step
            assert timer.is_due(step) == timer.is_due(step)
            if timer.is_due(step):
                found.append(step)
                timer.restart(step)
        assert found == due
    assert len(asked_at) < 40


@pytest.mark.parametrize("number", one_in(2, ["SIGINT", "SIGTERM", "SIGUSR1"]))
def test_a_signal_to_one_rank_ends_all(
    number: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    deed = f"import signal; os.kill(os.getpid(), signal.{number})"
    (tmp_path / "sitecustomize.py").write_text(FAILING_RANK.format(failure=deed))
    folder = tmp_path / "run"
    done = run([*ALONE, *RUN, f"run_dir={folder}"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"as it was asked to (rank 1: {number})" in done.stdout
    check_ended(folder, undisturbed)


@pytest.mark.campaign  # two launches of torchrun
def test_torchrun_passes_its_sigterm_on_and_no_step_is_lost(
    undisturbed: dict[int, float], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_STEPS)
    folder = tmp_path / "run"
    torchrun = [*TORCHRUN, "--nproc-per-node=2", "-m", "shardhet.apps.train"]
    process = start([*torchrun, *RUN, f"run_dir={folder}"], tmp_path)
    wait_for_step(folder, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0  # torchrun reports that it was told to end
    assert "the run ends after step" in output
    check_goes_on(folder, undisturbed)
