"""``shardhet doctor`` as its user types it, and the problems that it finds."""

import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardhet.apps import doctor_rank
from shardhet.apps.doctor import GIB, Facts, Gpu, find_facts, gpu_findings
from shardhet.apps.launch.rank_env import RankEnv
from tests.programs import SHARDHET, TORCHRUN, run

CARD = Gpu(name="NVIDIA RTX 4090", memory_bytes=24 * GIB, free_bytes=23 * GIB, has_bf16=True)
HEALTHY = Facts(
    versions={"torch": "2.13.0"},
    torch_for="CUDA 13.0",
    has_nccl=True,
    has_driver=True,
    has_device_files=True,
    hides_gpus=False,
    gpus=(CARD, replace(CARD, name="NVIDIA RTX 3090")),
    gpu_errors=(),
)
LAUNCHER = (*TORCHRUN, "--nproc-per-node=2", "-m", "shardhet.apps.doctor")
DOCTOR = (*SHARDHET, "doctor")


def test_ranks_are_started_and_take_a_right_step(tmp_path: Path) -> None:
    done = run([*DOCTOR, "--ranks", "3"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch {torch.__version__}" in done.stdout
    assert "3 ranks met over gloo" in done.stdout
    assert f"{socket.gethostname()}: 3 x cpu" in done.stdout
    assert "links within a host: " in done.stdout
    assert "have the losses of one process" in done.stdout
    assert "No problems found" in done.stdout
    assert not done.stderr.strip()


def test_wrong_arguments_end_with_2(tmp_path: Path) -> None:
    done = run([*DOCTOR, "--ranks", "0"], tmp_path)
    assert done.returncode == 2
    assert "--ranks: 0 but it must be at least 1" in done.stderr


def test_a_rank_that_fails_is_in_the_way_and_says_why(tmp_path: Path) -> None:
    done = run([*DOCTOR, "--ranks", "2"], tmp_path, GLOO_SOCKET_IFNAME="nothing0")
    assert done.returncode == 1
    assert "nothing0" in done.stderr  # the panel of what a rank ended with
    assert "Error: ranks cannot train here. Logs: " in done.stdout
    shutil.rmtree(done.stdout.rpartition("Logs: ")[2].strip())


@pytest.mark.campaign  # ranks that the command starts itself are tested beside it
def test_ranks_of_torchrun_check_each_other_and_say_what_failed(tmp_path: Path) -> None:
    done = run(LAUNCHER, tmp_path, is_cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks met over gloo" in done.stdout
    assert "have the losses of one process" in done.stdout
    done = run(LAUNCHER, tmp_path, GLOO_SOCKET_IFNAME="nothing0")
    assert done.returncode == 1
    # torchrun ends the other rank at once, which then may not have said it yet.
    said = [f"rank {rank} on {socket.gethostname()}: " in done.stderr for rank in range(2)]
    assert any(said), done.stderr
    for folder in re.findall(r"Its log is in (\S+)\.", done.stderr):
        shutil.rmtree(folder)


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    assert gpu_findings(HEALTHY) == []


NO_GPU = {"gpus": ()}
OLD_CARD = replace(CARD, name="Tesla V100", capability=(7, 0), has_kernels=False)
FULL_CARD = replace(CARD, free_bytes=12 * GIB)
TINY_CARD = replace(CARD, memory_bytes=4 * GIB, free_bytes=GIB // 2)


@pytest.mark.parametrize(
    ("changed", "what", "fix", "prevents_training"),
    [
        (NO_GPU, "sees no GPU", "a newer driver", True),
        ({**NO_GPU, "torch_for": "CPUs"}, "a build for CPUs", "nvidia-smi", True),
        ({**NO_GPU, "hides_gpus": True}, "CUDA_VISIBLE_DEVICES", "Unset it", False),
        ({**NO_GPU, "has_device_files": False}, "the container", "--gpus all", False),
        ({"gpu_errors": ("GPU 1: busy",)}, "GPU 1: busy.", "nvidia-smi", True),
        ({"has_nccl": False}, "no NCCL", "another build", True),
        (
            {"gpus": (CARD, OLD_CARD), "built_for": ("sm_75", "sm_86")},
            "no kernels for GPU 1, Tesla V100 of compute capability 7.0: it is built for sm_75",
            "an older CUDA",
            True,
        ),
        ({"gpus": (FULL_CARD,)}, "12.0 GiB of GPU 0", "limits.0.memory_gib=10.8", False),
        ({"gpus": (CARD, TINY_CARD)}, "3.5 GiB of GPU 1", "Stop the processes on it", False),
    ],
)
def test_each_finding_comes_with_its_fix(
    changed: dict[str, object], what: str, fix: str, prevents_training: bool
) -> None:
    facts = replace(HEALTHY, **changed)  # type: ignore[arg-type]
    [finding] = gpu_findings(facts)
    assert what in finding.what
    assert fix in finding.fix
    assert finding.prevents_training is prevents_training


def test_a_limit_below_one_gib_is_not_proposed() -> None:
    [finding] = gpu_findings(replace(HEALTHY, gpus=(TINY_CARD,)))
    assert "limits" not in finding.fix


def test_this_host_is_described() -> None:
    assert find_facts().versions["torch"] == torch.__version__


def test_another_loss_than_that_of_one_process_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = RankEnv(rank=0, world_size=1, local_rank=0, store_host="localhost", store_port=0)
    doctor_rank._check_step(env, torch.device("cpu"))
    monkeypatch.setattr(doctor_rank, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="that of one process"):
        doctor_rank._check_step(env, torch.device("cpu"))
