"""``shardhet doctor`` as its user types it, and the problems that it finds."""

import re
import shutil
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardhet.apps.launch.rank_env import RankEnv
from shardhet.extras import doctor, doctor_rank
from shardhet.extras.doctor_rank import GIB
from tests.programs import SHARDHET, run

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


@pytest.mark.parametrize(
    ("cuda", "hides", "files", "what", "fix"),
    [
        ("13.0", False, ("nvidia0",), "Error: torch is for CUDA 13.0", "a newer driver"),
        (None, False, ("nvidia0",), "Error: there is an NVIDIA driver", "nvidia-smi names"),
        ("13.0", True, ("nvidia0",), "Note: CUDA_VISIBLE_DEVICES hides", "Unset it"),
        ("13.0", False, ("nvidiactl",), "Note: the container hides", "--gpus all"),
    ],
)
def test_a_driver_without_a_device_comes_with_what_to_do(
    cuda: str | None,
    hides: bool,
    files: tuple[str, ...],
    what: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if not hides:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert doctor.why_no_gpu() is None
    for name in ("version", *files):
        (tmp_path / name).touch()
    text = doctor.why_no_gpu()
    assert text is not None
    assert text.startswith(what)
    assert fix in text


@pytest.mark.parametrize(
    ("free_gib", "gib", "said"),
    [
        (23, 24, None),
        (12, 24, "12.0 of 24.0 GiB of cuda:0 of .* are taken.*limits.3.memory_gib=10.8"),
        (0.5, 4, r"3.5 of 4.0 GiB of .* Stop the processes on it\.$"),
        (None, 24, None),  # it cannot be asked
    ],
)
def test_a_card_that_others_use_is_planned_for_with_less(
    free_gib: float | None, gib: int, said: str | None
) -> None:
    env = RankEnv(rank=3, world_size=4, local_rank=0, store_host="localhost", store_port=0)
    memory = None if free_gib is None else (free_gib * GIB, gib * GIB)
    asked = mock.Mock(return_value=memory, side_effect=None if memory else RuntimeError)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.mem_get_info", asked),
        mock.patch.object(doctor_rank, "choose_device", return_value=torch.device("cuda", 0)),
    ):
        found = doctor_rank.taken_here(env)
    assert found is None if said is None else re.search(said, str(found))


def test_another_loss_than_that_of_one_process_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = RankEnv(rank=0, world_size=1, local_rank=0, store_host="localhost", store_port=0)
    doctor_rank._check_step(env, torch.device("cpu"))
    monkeypatch.setattr(doctor_rank, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="that of one process"):
        doctor_rank._check_step(env, torch.device("cpu"))
