"""transformers' optimizers that need whole parameters, by a plan that stores them whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainer_options import (
    FIRST_CASE_S,
    PARAM_BAR,
    PLAN,
    arguments,
    llama,
    texts,
    train_by_plan,
    with_option,
)
from tests.worlds import TRANSFORMERS, preload, run_ranks

preload(*TRANSFORMERS)
WHOLE = replace(PLAN, whole_matrices=("*",))
CASES = [("adafactor", "float64"), ("stable adamw", "float64")]


def test_they_train_as_in_one_process(tmp_path: Path) -> None:
    args = (str(tmp_path), CASES, WHOLE)
    found: Any = run_ranks(train_by_plan, 3, *args, timeout_s=2 * FIRST_CASE_S)[0]
    for case, result in zip(CASES, found, strict=True):
        if case[0] == "stable adamw" and isinstance(result, str):
            assert "ImportError" in result  # a package that is not installed
            continue
        assert not isinstance(result, str), result
        expected = with_option(transformers.Trainer, str(tmp_path), *case)
        for fqn, tensor in expected["state"].items():
            torch.testing.assert_close(
                result["state"][fqn], tensor, rtol=PARAM_BAR, atol=PARAM_BAR
            )


def test_rows_are_refused_with_what_to_do(tmp_path: Path) -> None:
    from shardhet.hf import HetTrainer

    args = arguments(tmp_path, optim="adafactor")
    with pytest.raises(ValueError, match=r"or a plan that stores all whole \(whole_matrices="):
        HetTrainer(llama(), args, plan=PLAN, train_dataset=texts(8, seed=1))
