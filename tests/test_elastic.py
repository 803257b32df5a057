"""Whichever of the measured devices are there: a plan for them, and a run that goes on."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from experiments.recovery.elastic import run as elastic
from shardhet.apps.launch import sole_writer as sole_writers
from shardhet.apps.launch.leaving import STARTS_AGAIN, leave
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.launch.sole_writer import sole_writer
from shardhet.apps.run.plan_here import unlike_measured
from shardhet.apps.train import checked_world_size
from shardhet.config.checks import ConfigError
from shardhet.config.compose import register_schemas, to_conf
from shardhet.planner import PlanError, find_plan
from shardhet.planner.present import part_for, plan_for, positions_of
from shardhet.pricing.part import part_of
from shardhet.records.cluster import DeviceSpec
from tests.test_config import compose_with
from tests.test_fewer import FAST_LINKS, scenario_of

BATCH = 12
HOLDER = """
import sys, time
from pathlib import Path
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.launch.sole_writer import sole_writer
with sole_writer(RunFolder(Path(sys.argv[1])), 0):
    print("held", flush=True)
    time.sleep(60)
"""


def there(*described: str) -> list[DeviceSpec]:
    """Devices by kind and host, as they announce themselves: "f@a" is a fast one on host a."""
    return [
        DeviceSpec(kind=each[0], host=each[2:], memory_capacity_bytes=2**34, uuid=f"card {i}")
        for i, each in enumerate(described)
    ]


MEASURED = scenario_of("fsst", s_per_byte=FAST_LINKS, hosts="aabb")


@pytest.mark.parametrize(
    ("present", "positions"),
    [
        (["f@a", "s@a", "s@b", "t@b"], (0, 1, 2, 3)),
        (["t@b", "s@b", "f@a"], (3, 2, 0)),
        (["s@b", "s@a"], (2, 1)),  # each is the one of its host
        (["s@new", "s@b"], (1, 2)),  # another host: any that is left
        (["t@a"], (3,)),
    ],
)
def test_a_device_is_the_measured_one_of_its_host_or_any_of_its_kind(
    present: list[str], positions: tuple[int, ...]
) -> None:
    assert positions_of(there(*present), MEASURED.cluster) == positions


@pytest.mark.parametrize("present", [["x@a"], ["f@a", "f@b"]])
def test_a_device_that_was_not_measured_is_refused_by_name(present: list[str]) -> None:
    with pytest.raises(ValueError, match="Measured: 1 x f") as refusal:
        positions_of(there(*present), MEASURED.cluster)
    assert present[-1][0] in str(refusal.value)
    assert "shardhet measure" in str(refusal.value)


def test_a_device_with_less_memory_than_was_measured_is_another() -> None:
    small = [replace(there("f@a")[0], memory_capacity_bytes=2**33)]
    with pytest.raises(ValueError, match="not among the measured"):
        positions_of(small, MEASURED.cluster)


def test_the_plan_is_that_of_the_devices_that_are_there() -> None:
    present = there("t@b", "f@new", "s@b")
    plan = plan_for(present, MEASURED, global_batch_size=BATCH)
    expected = find_plan(part_of(MEASURED, (0, 2, 3)), global_batch_size=BATCH)
    assert [rank.state_share for rank in plan.ranks] == [
        rank.state_share for rank in expected.ranks
    ]
    assert [rank.microbatch_sizes for rank in plan.ranks] == [
        rank.microbatch_sizes for rank in expected.ranks
    ]
    # In the measured order, named as the ranks announce themselves, so that each finds its own.
    assert [(rank.device.kind, rank.device.host) for rank in plan.ranks] == [
        ("f", "new"),
        ("s", "b"),
        ("t", "b"),
    ]
    assert [rank.device.uuid for rank in plan.ranks] == ["card 1", "card 2", "card 0"]
    assert part_for(present, MEASURED) == part_of(MEASURED, (0, 2, 3))


def test_devices_that_cannot_hold_the_model_are_refused() -> None:
    tiny = scenario_of("fs", s_per_byte=FAST_LINKS, capacity=2**12)
    present = [replace(each, memory_capacity_bytes=2**12) for each in there("f@n0", "s@n1")]
    with pytest.raises(PlanError):
        plan_for(present, tiny, global_batch_size=BATCH)


def test_as_many_ranks_as_were_measured_start_unless_something_says_how_many(
    tmp_path: Path,
) -> None:
    OmegaConf.register_new_resolver("run_stamp", lambda: "stamp", replace=True)
    register_schemas()
    MEASURED.save(tmp_path)
    keys = ["plan=measured", f"plan.measured={tmp_path}", "cluster.device=CPU"]
    conf = to_conf(compose_with(keys))
    assert checked_world_size(conf, num_launched=None) == 4
    assert checked_world_size(conf, num_launched=3) == 3
    assert checked_world_size(conf, num_launched=5) == 5  # the fifth will be measured
    with pytest.raises(ConfigError, match=r"plan.measured: 'nowhere' has no cluster.json"):
        to_conf(compose_with(["plan=measured", "plan.measured=nowhere"]))


def test_what_was_measured_in_another_way_is_named(tmp_path: Path) -> None:
    OmegaConf.register_new_resolver("run_stamp", lambda: "stamp", replace=True)
    register_schemas()
    conf = to_conf(compose_with(["cluster.device=CPU", "data.seq_len=64", "precision=FP32"]))
    as_here = replace(
        MEASURED,
        workload=replace(MEASURED.workload, tokens_per_sample=64, num_moments=2),
        profile=replace(
            MEASURED.profile,
            devices=tuple(
                replace(each, note=f"f on a, 2026-01-01, torch {torch.__version__}, Python 3")
                for each in MEASURED.profile.devices
            ),
        ),
    )
    assert unlike_measured(conf, as_here) == []
    old = replace(as_here.profile.devices[0], note="f on a, 2025-01-01, torch 2.9.0, Python 3")
    otherwise = replace(
        as_here,
        workload=replace(
            as_here.workload, tokens_per_sample=16, param_dtype="bfloat16", num_moments=0
        ),
        profile=replace(as_here.profile, devices=(old,)),
    )
    assert unlike_measured(conf, otherwise) == [
        "data.seq_len 16, here 64",
        "precision bfloat16, here float32",
        "tensors that the optimizer keeps for each parameter 0, here 2",
        f"torch 2.9.0, here {torch.__version__}",
    ]


@pytest.mark.campaign  # waits
def test_a_folder_has_one_writer_until_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    with sole_writer(folder, rank=1, timeout_s=0):
        pass  # only rank zero writes
    monkeypatch.setattr(sole_writers, "NAMES_HOLDER_AFTER_S", 0.1)
    with (
        pytest.raises(RuntimeError, match=rf"in use by another run, process {held.pid} on"),
        sole_writer(folder, rank=0, timeout_s=0.5),
    ):
        pass
    assert f"is held by process {held.pid} on" in capfd.readouterr().err
    held.kill()
    held.wait()
    with sole_writer(folder, rank=0, timeout_s=5):
        assert f"process {os.getpid()} on" in folder.lock_path.read_text()


def test_a_launcher_that_may_restart_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for num_restarts, expected in (("0", True), ("2", True), ("3", False)):
        again = {"TORCHELASTIC_RESTART_COUNT": num_restarts}
        monkeypatch.setattr(os, "environ", {**variables, **again})
        env = RankEnv.from_environment()
        assert env is not None
        assert env.may_start_again == expected


def test_who_leaves_tells_its_agent_and_the_others_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
    with pytest.raises(SystemExit) as ending:
        leave(None)
    assert ending.value.code == STARTS_AGAIN
    leave("SIGTERM")  # which the agent has sent
    assert told == []
    leave("/run/notice exists")
    assert told == [(os.getppid(), signal.SIGTERM)]


def test_a_folder_that_cannot_be_locked_is_written_to_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with sole_writer(RunFolder(tmp_path), rank=0):
        assert "cannot be locked" in caplog.text


@pytest.mark.campaign  # a minute, most of which is spent on starts
def test_a_run_goes_on_without_a_node_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "SPEEDS", (0.6, 0.45))
    measured = elastic.measure(tmp_path, max_microbatch_size=2)
    nodes = elastic.Nodes(tmp_path / "a" / "run", measured)
    nodes.folder.mkdir(parents=True)
    metrics = elastic.Metrics(nodes.folder)
    try:
        nodes.start(0)
        nodes.start(1)
        metrics.wait_until_all_take_part(2)
        last_step = metrics.wait_for_steps(4)
        times = metrics.times_gone_on
        nodes.lose(1)
        went_on = metrics.wait_until_it_goes_on(times + 1)
        metrics.wait_for_steps(2)
    finally:
        nodes.end()
    assert not (nodes.folder / "checkpoints").exists()
    assert went_on["step"] > last_step - elastic.STEPS_ON_THEIR_WAY
    losses = metrics.losses()
    expected = elastic.undisturbed(tmp_path / "alone", max(losses))
    assert sorted(losses) == list(range(1, max(losses) + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=elastic.ROUNDING)
