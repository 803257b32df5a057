"""Quotas of experiments: dealt out to cores, reached, and gone afterwards."""

import os
import time
from pathlib import Path

import pytest

from experiments.common import control_groups
from experiments.common.control_groups import (
    Controller,
    Group,
    NoControlGroupsError,
    find_controller,
    quotas,
)
from tests.worlds import run_ranks


def why_not() -> str | None:
    try:
        find_controller()
    except NoControlGroupsError as error:
        return str(error)
    return None


needs_groups = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@needs_groups
def test_a_process_gets_its_quota_and_its_group_goes_away() -> None:
    with quotas([0.3]) as groups:
        [used] = run_ranks(_use_of_a_core, 1, groups[0])
        assert groups[0].folder.exists()
    assert not groups[0].folder.exists()
    assert used < 0.36  # less on a machine that is busy with other things


def _use_of_a_core(rank: int, group: Group) -> float:
    allowed = os.sched_getaffinity(0)
    group.join()
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start_s < 0.3:
        pass
    used = (time.thread_time() - start_cpu_s) / (time.perf_counter() - start_s)
    group.leave()
    assert os.sched_getaffinity(0) == allowed
    return used


@needs_groups
def test_groups_go_away_with_an_error_and_with_processes_left_in_them() -> None:
    seen: list[Group] = []
    cores = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError):
        _fail_in_a_group(seen)
    assert os.sched_getaffinity(0) == cores  # or all tests to come would share one
    assert len(seen) == 2
    assert not any(group.folder.exists() for group in seen)


def _fail_in_a_group(seen: list[Group]) -> None:
    with quotas([0.5, 0.5]) as groups:
        seen += groups
        groups[0].join()
        raise ZeroDivisionError


@needs_groups
def test_groups_of_runs_that_were_killed_are_removed() -> None:
    controller = find_controller()
    no_process = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    orphan = controller.make_group(f"{control_groups.PREFIX}_{no_process}_0", 0.5)
    with quotas([0.5]):
        assert not orphan.folder.exists()


@needs_groups
def test_a_quota_below_the_kernels_own_least_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cores: 0.01 but at least 0.1"), quotas([0.01]):
        pass


def test_without_the_rights_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "nothing here"
    monkeypatch.setattr(control_groups, "_mounted", lambda: [Controller(missing, 1)])
    with pytest.raises(NoControlGroupsError, match=r"nothing here.*Run as root"):
        find_controller()


def test_the_second_version_is_written_to_in_its_own_words(
    tmp_path: Path,
) -> None:
    group = Controller(tmp_path, 2).make_group("one", 0.25)
    assert (group.folder / "cpu.max").read_text() == "2500 10000"
    assert (group.folder / "cpu.weight").read_text() == "1000"
