"""``shardhet doctor`` as its user types it, and what it holds to be in the way."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardhet.apps import doctor_rank
from shardhet.apps.doctor import GIB, Facts, Gpu, find_facts, troubles_of
from shardhet.apps.rank_env import RankEnv

ROOT = Path(__file__).parent.parent
CARD = Gpu(name="NVIDIA RTX 4090", memory_bytes=24 * GIB, free_bytes=23 * GIB, has_bf16=True)
HEALTHY = Facts(
    versions=(("torch", "2.13.0"),),
    torch_cuda="13.0",
    has_nccl=True,
    has_driver=True,
    gpus=(CARD, replace(CARD, name="NVIDIA RTX 3090")),
    processor="x86",
    num_cores=16,
    memory_bytes=64 * GIB,
    free_bytes=50 * GIB,
    open_files=4096,
    has_host_name=True,
    num_threads=None,
)


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardhet.apps.main", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ranks_are_started_and_take_a_right_step() -> None:
    done = doctor("--ranks", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch {torch.__version__}" in done.stdout.replace("\n", " ")
    assert "3 ranks met over gloo" in done.stdout
    assert "links within a host: " in done.stdout
    assert "the losses of one process" in done.stdout
    assert "Nothing is in the way" in done.stdout
    assert not done.stderr.strip()


def test_trouble_ends_with_1_and_a_wrong_number_of_ranks_with_2() -> None:
    done = doctor("--ranks", "1", OMP_NUM_THREADS="999")
    assert done.returncode == 1
    assert "In the way: OMP_NUM_THREADS is 999" in done.stdout
    assert "the losses of one process" in done.stdout  # the rest is looked at all the same
    done = doctor("--ranks", "0")
    assert done.returncode == 2
    assert "--ranks: 0 but it must be at least 1" in done.stderr


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    assert troubles_of(HEALTHY) == []
    assert HEALTHY.num_ranks == 2


@pytest.mark.parametrize(
    ("changed", "what", "mend"),
    [
        ({"gpus": ()}, "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": (), "torch_cuda": None}, "a build for CPUs", "nvidia-smi"),
        ({"has_nccl": False}, "no NCCL", "another build"),
        ({"gpus": (replace(CARD, free_bytes=12 * GIB),)}, "12.0 GiB of GPU 0", "memory_gib=11"),
        ({"free_bytes": GIB // 2}, "0.5 GiB of the host's memory", "half a GiB"),
        ({"open_files": 256}, "256 files", "ulimit -n"),
        ({"has_host_name": False}, "has no address", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_each_trouble_comes_with_its_mend(
    changed: dict[str, object], what: str, mend: str
) -> None:
    [trouble] = troubles_of(replace(HEALTHY, **changed))  # type: ignore[arg-type]
    assert what in trouble.what
    assert mend in trouble.mend


def test_this_host_is_described() -> None:
    facts = find_facts()
    assert facts.num_cores == len(os.sched_getaffinity(0))
    assert 0 < facts.free_bytes < facts.memory_bytes
    assert ("torch", torch.__version__) in facts.versions


def test_another_loss_than_that_of_one_process_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = RankEnv(rank=0, world_size=1, local_rank=0, store_host="localhost", store_port=0)
    doctor_rank._check_step(env, torch.device("cpu"))
    monkeypatch.setattr(doctor_rank, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="that of one process"):
        doctor_rank._check_step(env, torch.device("cpu"))
