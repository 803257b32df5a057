"""Metrics end up where they were asked to, once each."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.loggers import MetricsLogger, check_logger, open_loggers
from shardhet.config.checks import ConfigError
from shardhet.config.training import LoggerConf, LoggerKind


def log_all(loggers: list[MetricsLogger], step: int, values: dict[str, float | None]) -> None:
    for each in loggers:
        each.log(step, values)


def log_two_steps(kind: LoggerKind, folder: RunFolder) -> None:
    loggers = open_loggers(LoggerConf(kind=kind), folder, first_step=1)
    log_all(loggers, 1, {"loss": 2.5, "lr": 0.1})
    log_all(loggers, 1, {"held_out_loss": 3.0})
    log_all(loggers, 2, {"loss": None, "lr": 0.2})
    for each in loggers:
        each.close()


def test_json_lines_are_always_written(tmp_path: Path) -> None:
    log_two_steps(LoggerKind.NONE, RunFolder(tmp_path))
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert entries == [
        {"step": 1, "loss": 2.5, "lr": 0.1},
        {"step": 1, "held_out_loss": 3.0},
        {"step": 2, "loss": None, "lr": 0.2},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_two_steps(LoggerKind.TENSORBOARD, RunFolder(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5)]


def test_wandb_is_told_every_number_and_stays_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return SimpleNamespace(
            define_metric=lambda *names, **settings: calls.append((names, settings)),
            log=calls.append,
            finish=lambda: calls.append("finished"),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (tmp_path / "config.yaml").write_text("num_steps: 2\n")
    log_two_steps(LoggerKind.WANDB, RunFolder(tmp_path))
    assert calls[0] == {
        "project": "shardhet",
        "name": tmp_path.name,
        "id": RunFolder(tmp_path).identity().rpartition("_")[2],
        "resume": "allow",
        "dir": str(tmp_path),
        "config": {"num_steps": 2},
        "mode": "offline",
    }
    assert calls[1] == (("*",), {"step_metric": "step"})
    assert calls[2] == {"step": 1, "loss": 2.5, "lr": 0.1}
    assert calls[-1] == "finished"


def log_and_roll_back(kind: LoggerKind, folder: RunFolder) -> None:
    """Steps 1 to 4, of which 3 and 4 are taken again."""
    loggers = open_loggers(LoggerConf(kind=kind), folder, first_step=1)
    for step in range(1, 5):
        log_all(loggers, step, {"loss": float(step)})
    for each in loggers:
        each.roll_back(2)
    for step in range(3, 6):
        log_all(loggers, step, {"loss": -float(step)})
    for each in loggers:
        each.close()


def test_after_a_roll_back_every_step_counts_once(tmp_path: Path) -> None:
    log_and_roll_back(LoggerKind.NONE, RunFolder(tmp_path))
    losses = [1.0, 2.0, -3.0, -4.0, -5.0]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == losses
    dropped = (tmp_path / "rolled_back.jsonl").read_text().splitlines()
    assert list(map(json.loads, dropped)) == [{"step": s, "loss": float(s)} for s in (3, 4)]


def test_tensorboard_hides_steps_that_were_rolled_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_and_roll_back(LoggerKind.TENSORBOARD, RunFolder(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, -3.0), (4, -4.0), (5, -5.0)]


def test_tensorboard_hides_steps_that_a_later_start_takes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, sign in ((1, 1.0), (3, -1.0)):
        conf = LoggerConf(kind=LoggerKind.TENSORBOARD)
        loggers = open_loggers(conf, RunFolder(tmp_path), first_step=first)
        for step in range(first, 5):
            log_all(loggers, step, {"loss": sign * step})
        for each in loggers:
            each.close()
        time.sleep(1.1)  # the names of its files have seconds
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, -3.0), (4, -4.0)]


def test_a_real_wandb_run_lies_in_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the package wandb, of the extra of that name")
    (tmp_path / "config.yaml").write_text("num_steps: 2\n")
    log_two_steps(LoggerKind.WANDB, RunFolder(tmp_path))
    [run_dir] = (tmp_path / "wandb").glob("offline-run-*")
    [written] = run_dir.glob("*.wandb")
    deadline_s = time.monotonic() + 30  # a process of wandb's own writes, a little later
    while b"held_out_loss" not in written.read_bytes():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("kind", [LoggerKind.TENSORBOARD, LoggerKind.WANDB])
def test_a_missing_package_is_named_with_its_extra(
    kind: LoggerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind.value, None)
    with pytest.raises(ConfigError, match=rf"pip install 'shardhet\[{kind.value}\]'"):
        check_logger(LoggerConf(kind=kind))
