"""What HetFSDP is given that it cannot use is refused by the argument's name."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardhet import HetFSDP, Plan
from tests.worlds import run_ranks

ALONE = Plan.even(1, microbatch_size=2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"param_dtype": "bfloat16"}, "param_dtype is 'bfloat16' but must be None, torch"),
        ({"param_dtype": torch.complex64}, "param_dtype is torch.complex64"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype is torch.int32"),
        ({"loss_fn": "mse"}, "loss_fn is 'mse' but must be a function"),
        ({"seed": None}, "seed is None but must be a whole number"),
        ({"device": "gpu"}, "device is 'gpu', which is none"),
        ({"batch_dim": -1}, "batch_dim is -1 but must be the dimension"),
        ({"batch_dim": {"input": 0.5}}, r"batch_dim\['input'\] is 0.5 but must be"),
        ({"batch_dim": {"inputs": 1}}, r"'inputs', which is no argument .*mean 'input'\?"),
        ({"units": "0"}, r"Write units=\['0'\]"),
        ({"units": nn.Linear}, r"Write units=\[Linear\]"),
        ({"units": [nn.Linear(3, 3)]}, "neither the name of a module nor a class"),
    ],
)
def test_options_of_a_wrong_type_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HetFSDP(net(), ALONE, **options)


def test_devices_and_dimensions_may_be_said_in_other_ways() -> None:
    model = HetFSDP(net(), ALONE, device="cpu", batch_dim=np.int64(0))
    assert model.device == torch.device("cpu")
    assert model(torch.ones(2, 3)).shape == (2, 3)


def test_a_dimension_that_no_argument_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no argument has the dimension .*5.*\(2, 3\)"):
        HetFSDP(net(), ALONE, batch_dim=5)(torch.ones(2, 3))


def test_what_is_no_module_or_no_plan_is_refused() -> None:
    given: list[tuple[Any, Any, str]] = [
        (torch.relu, ALONE, "is no module"),
        (ALONE, net(), "is no module"),
        (net(), "plan.json", r"Plan.load\(path\)"),
    ]
    for module, plan, words in given:
        with pytest.raises(TypeError, match=words):
            HetFSDP(module, plan)
    with pytest.raises(ValueError, match="wrapped already"):
        HetFSDP(nn.Sequential(HetFSDP(net(), ALONE)), ALONE)


def wrap_again(rank: int) -> None:
    plan, module = Plan.even(2, microbatch_size=2), net()
    HetFSDP(module, plan)
    with pytest.raises(ValueError, match=r"wrapped already.*redistribute"):
        HetFSDP(module, plan)


def test_a_module_is_wrapped_once() -> None:
    run_ranks(wrap_again, 2)
