"""Checkpoints that are written while training goes on."""

import sys
import time
from pathlib import Path
from threading import Event, Thread
from typing import IO
from unittest.mock import Mock

import pytest

from shardhet.checkpoint import CheckpointError, load, save, save_async
from shardhet.checkpoint.format import files
from shardhet.checkpoint.state import job
from tests.checkpoint_cases import check_same, train, whole_state
from tests.test_checkpoint_failures import full_disk, message_of, trained
from tests.worlds import on_ranks, run_ranks, wait_until

SLOWLY_S = 0.5


def slowly(path: Path) -> IO[bytes]:
    """A file of a disk that takes its time."""
    time.sleep(SLOWLY_S)
    return path.open("xb")


@on_ranks(3)
def test_what_is_written_is_the_state_of_the_call(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    expected = whole_state(model, optimizer)
    usual, files.open_new = files.open_new, slowly
    pending = save_async(model, optimizer, tmp_path / "first", extra=[rank])
    assert not (tmp_path / "first").exists()
    train(model, optimizer, range(2, 5))
    pending.wait()
    pending.wait()  # it is over
    files.open_new = usual
    assert load(model, optimizer, tmp_path / "first") == [0]
    check_same(whole_state(model, optimizer), expected)


@on_ranks(3)
def test_it_is_complete_before_anybody_waits(rank: int, tmp_path: Path) -> None:
    pending = save_async(*trained(), tmp_path / "alone")
    wait_until((tmp_path / "alone").exists, seconds=10)  # no collective call until then
    pending.wait()


def test_a_thread_of_a_program_that_has_failed_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "last_value", KeyError("sample 17"), raising=False)
    stopped = Event()
    monkeypatch.setattr(job, "break_connections", lambda _: stopped.set())
    thread = Thread(target=stopped.wait)
    job._channels[thread] = Mock()
    thread.start()
    job._end()
    assert not thread.is_alive()


@on_ranks(3)
def test_the_next_call_waits_for_the_previous_one(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    states = []
    for name in ("first", "second"):
        train(model, optimizer, range(1))
        states.append(whole_state(model, optimizer))
        save_async(model, optimizer, tmp_path / name)
    train(model, optimizer, range(1))
    assert (tmp_path / "first").is_dir()  # the second save has waited for it
    load(model, optimizer, tmp_path / "second")
    check_same(whole_state(model, optimizer), states[1])
    load(model, optimizer, tmp_path / "first")
    check_same(whole_state(model, optimizer), states[0])


def fail_in_the_thread(rank: int, folder: Path, bad_rank: int, how: str) -> str:
    model, optimizer = trained()
    save(model, optimizer, folder / "earlier")
    usual = files.open_new
    if rank == bad_rank:
        files.open_new = full_disk
    pending = save_async(model, optimizer, folder / "failing")
    train(model, optimizer, range(2, 3))
    if how == "save":
        message = message_of(lambda: save(model, optimizer, folder / "later"))
    elif how == "load":
        message = message_of(lambda: load(model, optimizer, folder / "earlier"))
    else:
        message = message_of(pending.wait)
    files.open_new = usual
    assert [each.name for each in folder.iterdir()] == ["earlier"]
    model.exchange([0.0])
    save(model, optimizer, folder / "later")
    load(model, optimizer, folder / "later")
    return message


@pytest.mark.sampled
@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("how", ["save", "load", "wait"])
def test_a_failure_in_a_thread_is_raised_at_the_next_call_on_every_rank(
    tmp_path: Path, bad_rank: int, how: str
) -> None:
    messages = run_ranks(fail_in_the_thread, 3, tmp_path, bad_rank, how)
    assert len(set(messages)) == 1
    assert f"rank {bad_rank}: " in messages[0]
    assert "No space left on device" in messages[0]


@on_ranks(1)
def test_a_plain_module_is_saved_in_a_thread_too(rank: int, tmp_path: Path) -> None:
    from tests.checkpoint_cases import Odd, make_optimizer

    model = Odd()
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(1))
    pending = save_async(model, optimizer, tmp_path / "plain")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        save(model, optimizer, tmp_path)
    pending.wait()
    load(model, optimizer, tmp_path / "plain")
