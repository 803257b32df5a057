"""Who a process is, read from what its launcher left in the environment."""

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardhet.apps.launch.joining import (
    ALLOCATOR_VARIABLES,
    await_all,
    choose_allocator,
    choose_device,
)
from shardhet.apps.launch.launch import own_store
from shardhet.apps.launch.rank_env import (
    FIRST_SRUN_PORT,
    NUM_SRUN_PORTS,
    RankEnv,
    first_host,
    new_stamp,
)
from shardhet.config.training import ClusterConf

SRUN = {
    "SLURM_JOB_ID": "4321",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head"}


def read(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> RankEnv | None:
    monkeypatch.setattr(os, "environ", dict(variables))
    return RankEnv.from_environment()


def test_a_process_that_nobody_launched_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, {}) is None


def test_tasks_of_srun_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    env = read(monkeypatch, SRUN)
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank) == (5, 6, 1)
    assert env.store_host == "gpu07"
    assert FIRST_SRUN_PORT <= env.store_port < FIRST_SRUN_PORT + NUM_SRUN_PORTS
    others = [SRUN | {"SLURM_JOB_ID": "4322"}, SRUN | {"SLURM_STEP_ID": "3"}]
    for other in others:
        found = read(monkeypatch, other)
        assert found is not None
        assert found.store_port != env.store_port


def test_where_to_meet_may_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    env = read(monkeypatch, SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"})
    assert env is not None
    assert (env.store_host, env.store_port) == ("10.0.0.1", 29501)


def test_a_requeued_job_is_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    env = read(monkeypatch, SRUN | {"SLURM_RESTART_COUNT": "1"})
    assert env is not None
    assert env.is_restarted


def test_torchrun_inside_of_srun_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    env = read(monkeypatch, SRUN | TORCHRUN)
    assert env is not None
    assert (env.rank, env.world_size, env.store_host) == (3, 4, "head")


@pytest.mark.parametrize("tasks", [{}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_batch_script_and_a_single_task_start_their_own_ranks(
    tasks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = {key: value for key, value in SRUN.items() if "STEP" not in key}
    assert read(monkeypatch, batch | tasks) is None


def test_what_is_published_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    env = read(monkeypatch, SRUN)
    assert env is not None
    env.publish()
    assert RankEnv.from_environment() == env


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("localhost", "localhost"),
        ("a.example.org,b.example.org", "a.example.org"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[3,5],cpu[1-2]", "gpu3"),
        ("gpu[07-09]-ib,login", "gpu07-ib"),
        ("rack1-n01,rack[2-3]-n01", "rack1-n01"),
    ],
)
def test_the_first_host_of_a_list_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_stamps_sort_by_time_and_differ() -> None:
    stamps = [new_stamp() for _ in range(50)]
    assert len(set(stamps)) == len(stamps)
    assert all(re.fullmatch(r"[\d_-]{19}_[0-9a-f]{8}", stamp) for stamp in stamps)


@pytest.mark.parametrize(
    ("num_tasks", "local_rank", "num_gpus", "index"),
    [("4", 3, 1, 0), ("4", 3, 4, 3), ("1", 0, 1, 0), ("1", 1, 1, None)],
)
def test_a_task_of_srun_takes_the_only_gpu_that_it_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    num_tasks: str,
    local_rank: int,
    num_gpus: int,
    index: int | None,
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", num_tasks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    env = RankEnv(rank=3, world_size=4, local_rank=local_rank, store_host="here", store_port=1)
    if index is None:
        with pytest.raises(ValueError, match="local rank 1 but this host has 1 GPUs"):
            choose_device(ClusterConf(), env)
    else:
        monkeypatch.setattr(os, "environ", dict(SRUN) | {"SLURM_STEP_NUM_TASKS": num_tasks})
        assert choose_device(ClusterConf(), env) == torch.device("cuda", index)
        assert {os.environ[each] for each in ALLOCATOR_VARIABLES} == {
            "expandable_segments:True"
        }
        # Also where torch has read the variables when it was imported.
        assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()


def test_an_allocator_that_the_user_has_configured_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    monkeypatch.setattr(os, "environ", dict(chosen))
    choose_allocator()
    assert os.environ == chosen


def test_ranks_that_do_not_join_are_named() -> None:
    store = dist.HashStore()
    limit = timedelta(seconds=0.1)
    for rank, absent in ((0, "ranks 1, 2"), (2, "rank 1")):
        with pytest.raises(
            dist.DistStoreError, match=f"rank {rank} waits for {absent} to join"
        ):
            await_all(store, rank, 3, limit)
    await_all(store, 1, 3, limit)


def test_the_store_of_a_launch_on_one_host_listens_on_the_loopback_alone() -> None:
    with own_store() as endpoint:
        host, port = endpoint.split(":")
        as_torch_does = dist.TCPStore(host, int(port), is_master=True, multi_tenant=True)
        as_torch_does.set("from", "rank 0")
        rank = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        assert rank.get("from") == b"rank 0"
        tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
        lines = [line.split() for table in tables for line in table.splitlines()[1:]]
        listening = [line[1] for line in lines if line[3] == "0A"]
        here = [each for each in listening if each.endswith(f":{int(port):04X}")]
        assert here == [f"0100007F:{int(port):04X}"]
