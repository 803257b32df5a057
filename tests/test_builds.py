"""Which GPUs a build of torch serves, and ranks whose builds differ."""

import os
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from shardhet.apps.launch.builds import (
    check_alike,
    check_serves,
    has_kernels,
    known_troubles,
    processor,
)
from shardhet.comm.calls import SWITCH
from shardhet.comm.channel import Channel
from tests.worlds import run_ranks, run_ranks_expecting_failure

NEW = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "built_for", "serves"),
    [
        ((8, 6), NEW, True),
        ((8, 9), NEW, True),  # code for 8.6 runs on 8.9
        ((7, 0), NEW, False),  # V100
        ((6, 0), NEW, False),  # P100
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((12, 1), NEW, True),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_90a"], False),
        ((7, 5), [], False),
    ],
)
def test_kernels_run_on_later_cards_of_their_generation(
    capability: tuple[int, int], built_for: Sequence[str], serves: bool
) -> None:
    assert has_kernels(capability, built_for) is serves


@pytest.mark.parametrize(
    ("capability", "needs_bfloat16", "said"),
    [
        ((7, 0), False, "7.0.*sm_75.*older CUDA"),
        ((7, 5), True, "bfloat16.*precision=FP16 or FP32"),
    ],
)
def test_a_card_that_is_not_served_is_named(
    capability: tuple[int, int], needs_bfloat16: bool, said: str
) -> None:
    with (
        mock.patch.object(torch.version, "cuda", "12.8"),
        mock.patch.multiple(
            torch.cuda,
            get_device_name=lambda device: "Tesla of old",
            get_device_capability=lambda device: capability,
            get_arch_list=lambda: NEW,
            is_bf16_supported=lambda including_emulation: False,
        ),
        pytest.raises(ValueError, match=f"Tesla of old.*{said}"),
    ):
        check_serves(torch.device("cuda", 0), needs_bfloat16=needs_bfloat16)


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


def test_known_troubles_of_unlike_hosts_are_told() -> None:
    assert not known_troubles([(8, 6)] * 2, ["GenuineIntel", ""])
    assert not known_troubles([(9, 0), (10, 0)], ["AuthenticAMD"] * 2)
    [protocol] = known_troubles([(8, 9), (8, 6), (8, 6)], ["AuthenticAMD"] * 3)
    assert "LL128" in protocol
    found = known_troubles([(7, 0), (8, 0)], ["GenuineIntel", "AuthenticAMD"])
    assert ["LL128" in found[0], "794" in found[1], "1136" in found[2]] == [True] * 3
    assert isinstance(processor(), str)


def _start_with_gpus(rank: int, hips: tuple[str | None, ...], transport: str) -> list[str]:
    with (
        mock.patch.dict(os.environ, {SWITCH: transport}),
        mock.patch.object(torch.version, "hip", hips[rank]),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 6 + 3 * rank)),
        mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 29, 7)),
    ):
        return check_alike(torch.device("cuda", 0), Channel.of_world())


def test_gpus_of_two_makers_meet_over_gloo_alone() -> None:
    makers = (None, "6.4")
    for outcome in run_ranks_expecting_failure(_start_with_gpus, 2, makers, "auto"):
        assert "CUDA, ROCm, in the order of ranks" in outcome.message
        assert "Set transport=gloo" in outcome.message
    assert run_ranks(_start_with_gpus, 2, makers, "gloo") == [[], []]


def test_ranks_with_unlike_cards_are_told_what_is_known() -> None:
    for [trouble] in run_ranks(_start_with_gpus, 2, (None, None), "auto"):
        assert "LL128" in trouble
