"""A folder with a checkpoint for each of some steps: the newest whole one, and which stay."""

import logging
from pathlib import Path

import pytest
import torch

from shardhet.checkpoint import CheckpointError, Checkpoints
from tests.checkpoint_cases import Odd, check_same, make_optimizer, train, whole_state
from tests.test_checkpoint_failures import trained
from tests.worlds import run_ranks


def fill(folder: Path, steps: list[int], **kept: int | None) -> Checkpoints:
    checkpoints = Checkpoints(folder, **kept)
    model = Odd()
    for step in steps:
        path = checkpoints.save(model, None, step=step, extra=step)
        assert path == folder / f"step_{step:08d}"
    return checkpoints


def damage(path: Path) -> None:
    [file] = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6]),
        ({"keep_every": 3}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_which_ones_stay(
    tmp_path: Path, kept: dict[str, int | None], expected: list[int]
) -> None:
    assert fill(tmp_path, [1, 2, 3, 4, 5, 6], **kept).steps() == expected


def test_those_of_later_steps_are_of_another_history_and_stay(tmp_path: Path) -> None:
    fill(tmp_path, [10, 20, 30])
    assert fill(tmp_path, [12, 14], keep_last=1).steps() == [14, 20, 30]


def test_what_killed_programs_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, [1, 2])
    (tmp_path / ".step_00000003.unfinished").mkdir()
    (tmp_path / ".step_00000001.removed").mkdir()
    (tmp_path / "step_00000002").rename(tmp_path / ".step_00000002.replaced")
    (tmp_path / ".notes").mkdir()
    assert checkpoints.steps() == [1]
    resumed = checkpoints.load_latest(Odd(), None)
    assert resumed is not None
    assert resumed.step == resumed.extra == 2  # it has its name again
    fill(tmp_path, [4])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".notes",
        *(f"step_0000000{step}" for step in (1, 2, 4)),
    ]


def test_the_newest_whole_one_is_found_and_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = fill(tmp_path, [1, 2, 3])
    assert checkpoints.latest() is not None
    damage(checkpoints.path_of(3))
    (checkpoints.path_of(2) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.path) == (1, checkpoints.path_of(1))
    assert "step_00000003" in latest.skipped[0]
    assert "step_00000002" in latest.skipped[1]
    assert caplog.text.count("skipped an incomplete checkpoint") == 2
    damage(checkpoints.path_of(1))
    with pytest.raises(CheckpointError, match="none of its 3 checkpoints is complete"):
        checkpoints.latest()


def test_an_empty_folder_has_no_latest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").latest() is None
    assert Checkpoints(tmp_path).load_latest(Odd(), None) is None


def test_a_broken_one_is_replaced_when_its_step_is_saved_again(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, [1, 2])
    damage(checkpoints.path_of(2))
    checkpoints = fill(tmp_path, [2])
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.skipped) == (2, ())


def test_a_plain_module_needs_a_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Pass step"):
        Checkpoints(tmp_path).save(Odd(), None)
    with pytest.raises(ValueError, match="keep_last: 0"):
        Checkpoints(tmp_path, keep_last=0)


def resume(rank: int, folder: Path, is_async: bool) -> list[int]:
    model, optimizer = trained()
    checkpoints = Checkpoints(folder, keep_last=2)
    states = {}
    for step in range(2, 7):
        train(model, optimizer, range(step, step + 1))
        states[model.step] = whole_state(model, optimizer)
        save = checkpoints.save_async if is_async else checkpoints.save
        save(model, optimizer, extra={"at": model.step})
    checkpoints.wait(model)
    if rank == 0:
        (checkpoints.path_of(model.step) / "__1_0.distcp").unlink()
    model.exchange([0.0])
    torch.manual_seed(9)
    resumed = Checkpoints(folder).load_latest(model, optimizer)
    assert resumed is not None
    assert resumed.extra == {"at": resumed.step}
    assert model.step == resumed.step
    check_same(whole_state(model, optimizer), states[resumed.step])
    return [resumed.step, *checkpoints.steps()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_async", [False, True])
def test_all_ranks_resume_from_the_newest_whole_one(tmp_path: Path, is_async: bool) -> None:
    assert run_ranks(resume, 3, tmp_path, is_async) == [[6, 6, 7]] * 3


def test_with_an_optimizer_that_was_not_saved(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, [1])
    model = Odd()
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        checkpoints.load_latest(model, make_optimizer(model, "adamw"))
