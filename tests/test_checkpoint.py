"""Checkpoints written under one plan and read under another, or without one.

SHARDHET_CHECKPOINT_CASES=150 draws more cases than the ordinary thirty.
"""

import os
from pathlib import Path

import pytest
from torch import nn

from shardhet.checkpoint import CheckpointError, save
from tests.checkpoint_cases import (
    check_ends,
    draw_case,
    sharded_by_fsdp2,
)
from tests.selection import one_in
from tests.worlds import run_ranks

NUM_CASES = int(os.environ.get("SHARDHET_CHECKPOINT_CASES", "30"))


def refuse_dtensors(rank: int, folder: Path) -> None:
    module = sharded_by_fsdp2(nn.Linear(4, 4), 2)
    with pytest.raises(CheckpointError, match=r"Save and load .* torch.distributed"):
        save(module, None, folder / "saved")


def test_a_model_of_fsdp2_is_left_to_torch(tmp_path: Path) -> None:
    run_ranks(refuse_dtensors, 2, tmp_path)
    with pytest.raises(CheckpointError, match="on the meta device"):
        save(nn.Linear(2, 2, device="meta"), None, tmp_path / "saved")


@pytest.mark.parametrize("seed", one_in(16, range(NUM_CASES)))
def test_any_plan_loads_what_any_other_saved(seed: int, tmp_path: Path) -> None:
    check_ends(draw_case(seed), tmp_path)
