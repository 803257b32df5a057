"""What a run finds in its folder when it starts again, and what it makes of it."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from shardhet.apps.launch import joining
from shardhet.apps.launch.crash import is_repeated, read_failures, save_failure
from shardhet.apps.launch.leaving import End, agree_on_end
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.comm.failure import Failure, FailureKind
from shardhet.planner.present import positions_of
from shardhet.training.hooks.hooks import StopOnSignal
from tests.test_elastic import there


def elastic_env(rank: int, world_size: int = 2) -> RankEnv:
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        store_host="localhost",
        store_port=0,
        is_elastic=True,
        may_start_again=True,
    )


class _Model:
    """Exchanges with ranks that say what they are given."""

    def __init__(self, *others: tuple[int, str | None, bool, bool]) -> None:
        self._others = others

    def exchange_objects(self, mine: Any) -> list[Any]:
        return [mine, *self._others]


@pytest.mark.parametrize(
    ("mine", "others", "goes_on"),
    [
        (None, [(1, "SIGTERM", False, True)], True),
        (None, [(1, "SIGTERM", False, False)], True),  # it need not be started again
        ("SIGTERM", [(1, None, False, True)], True),
        ("SIGTERM", [(1, None, False, False)], False),  # its agent has started it too often
        ("SIGTERM", [(1, None, False, True), (2, None, False, False)], False),
        (None, [(1, "stop exists", True, True)], False),  # for the whole run
        ("SIGTERM", [(1, "SIGTERM", False, True)], False),  # nobody is left
        (None, [(1, None, False, True)], False),
    ],
)
def test_all_ranks_decide_alike_whether_the_run_goes_on(
    mine: str | None, others: list[Any], goes_on: bool, tmp_path: Path
) -> None:
    rows = [(0, mine, False, True), *others]
    found = set()
    for i, (rank, reason, ends_run, may_start) in enumerate(rows):
        file = tmp_path / f"stop_{i}"
        if ends_run:
            file.touch()
        notice = StopOnSignal(file)
        notice.reason = reason
        model: Any = _Model(*rows[:i], *rows[i + 1 :])
        env = replace(elastic_env(rank), may_start_again=may_start)
        found.add(agree_on_end(model, notice, env, is_complete=False))
        assert not agree_on_end(model, notice, env, is_complete=True).goes_on
    told = tuple(f"rank {rank}: {reason}" for rank, reason, _, _ in rows if reason)
    assert found == {End(asked_by=told, goes_on=goes_on)}


def test_a_copied_folder_is_another_run(tmp_path: Path) -> None:
    one, other = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "other")
    one.path.mkdir()
    name = one.identity()
    assert one.identity() == name
    shutil.copytree(one.path, other.path)
    assert other.identity() not in (name, "")
    assert one.identity() == name
    moved = RunFolder(tmp_path / "moved")
    one.path.rename(moved.path)
    assert moved.identity() == name


def test_what_was_measured_of_something_else_is_not_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "measured" / "old").mkdir(parents=True)
    (tmp_path / "measured" / "old" / "profile.json").touch()
    assert folder.measured_dirs("a") == []
    for subject in "aba":
        path = folder.new_measured_dir(subject)
        assert path not in folder.measured_dirs(subject)  # not yet whole
        (path / "profile.json").touch()
    assert [each.name for each in folder.measured_dirs("a")] == ["1", "3"]
    assert [each.name for each in folder.measured_dirs("b")] == ["2"]


def test_a_failure_of_the_start_before_is_no_cause_but_tells_a_repetition(
    tmp_path: Path,
) -> None:
    folder, cfg = RunFolder(tmp_path), OmegaConf.create({"seed": 1})
    failure = Failure(
        kind=FailureKind.RAISED,
        ranks=(1,),
        name="rank 1 (cpu)",
        what="KeyError: 17",
        where="a.py:1",
        at_s=1.0,
        step=3,
    )
    assert not is_repeated(failure, folder)
    save_failure(failure, folder)
    folder.begin(cfg)
    assert read_failures(folder) == []
    assert is_repeated(replace(failure, at_s=2.0), folder)
    assert not is_repeated(replace(failure, step=4), folder)
    assert not is_repeated(replace(failure, ranks=(0,)), folder)
    assert not is_repeated(replace(failure, kind=FailureKind.LOST), folder)
    folder.begin(cfg)
    assert not is_repeated(failure, folder)


def test_the_device_with_most_memory_chooses_first() -> None:
    small, large = (
        replace(each, memory_capacity_bytes=size)
        for each, size in zip(there("s@a", "s@b"), (2**34, 2**36), strict=True)
    )
    measured: Any = SimpleNamespace(devices=(small, large))
    elsewhere = [replace(large, host="x"), replace(small, host="y")]
    assert positions_of(elsewhere, measured) == (1, 0)
    assert positions_of(elsewhere[::-1], measured) == (0, 1)


@pytest.mark.parametrize(
    ("error", "ends"), [(KeyError("17"), True), (OSError("no net"), False)]
)
def test_what_fails_twice_in_the_same_way_ends_its_node_unless_it_may_heal(
    error: Exception, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(joining, "end_agent", lambda: ended.append(True))
    folder = RunFolder(tmp_path)
    for num_failures in (1, 2):
        with pytest.raises(type(error)), joining._report_failure(folder, elastic_env(0), "cpu"):
            raise error
        assert ended == ([True] if ends and num_failures == 2 else [])
