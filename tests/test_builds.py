"""Which GPUs a build of torch serves, and ranks whose builds differ."""

import os
from unittest import mock

import pytest
import torch

from shardhet.apps.launch.builds import (
    check_alike,
    check_serves,
)
from shardhet.comm.channel import Channel
from shardhet.comm.transport import SWITCH
from tests.worlds import run_ranks, run_ranks_expecting_failure


@pytest.mark.parametrize(
    ("launches", "said"),
    [
        (RuntimeError("no kernel image"), "7.0.*sm_75 only: no kernel image.*older CUDA"),
        (None, "bfloat16.*precision=FP16 or FP32"),
    ],
)
def test_a_card_that_is_not_served_is_named(launches: Exception | None, said: str) -> None:
    with (
        mock.patch.object(torch, "ones", side_effect=launches),
        mock.patch.multiple(
            torch.cuda,
            get_device_name=lambda device: "Tesla of old",
            get_device_capability=lambda device: (7, 0),
            get_arch_list=lambda: ["sm_75"],
            is_bf16_supported=lambda including_emulation: False,
        ),
        pytest.raises(ValueError, match=f"Tesla of old.*{said}"),
    ):
        check_serves(torch.device("cuda", 0), needs_bfloat16=True)


def test_hosts_are_always_served() -> None:
    check_serves(torch.device("cpu"), needs_bfloat16=True)


def _start(rank: int) -> None:
    with mock.patch.object(torch, "__version__", f"2.{12 + rank}.0+cu1{rank}"):
        check_alike(torch.device("cpu"), Channel.of_world())


def test_ranks_with_other_versions_are_named() -> None:
    outcomes = run_ranks_expecting_failure(_start, 2)
    for outcome in outcomes:
        assert "versions of torch and NCCL: not the same on all ranks" in outcome.message
        assert "2.13.0" in outcome.message
        assert "cu1" not in outcome.message


def _start_with_gpus(rank: int, hips: tuple[str | None, ...], transport: str) -> None:
    with (
        mock.patch.dict(os.environ, {SWITCH: transport}),
        mock.patch.object(torch.version, "hip", hips[rank]),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 6 + 3 * rank)),
        mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 29, 7)),
    ):
        check_alike(torch.device("cuda", 0), Channel.of_world())


def test_gpus_of_two_makers_meet_over_gloo_alone() -> None:
    makers = (None, "6.4")
    for outcome in run_ranks_expecting_failure(_start_with_gpus, 2, makers, "auto"):
        assert "CUDA, ROCm, in the order of ranks" in outcome.message
        assert "Set transport=gloo" in outcome.message
    assert run_ranks(_start_with_gpus, 2, makers, "gloo") == [None, None]
