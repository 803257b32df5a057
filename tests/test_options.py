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


class OfOneMemory(nn.Module):
    """Two layers of which one was given the data of the other, or a part of one tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        whole = torch.rand(4, 6)
        if kind == "transposed":
            self.decoder.weight.data = self.encoder.weight.data.T
        if kind == "buffer":
            self.register_buffer("start", self.encoder.weight.data)
        if kind == "rows":
            self.decoder.weight.data = whole[:, :3]
            self.encoder.bias.data = whole[1, 2:5]
        if kind == "columns apart":
            self.decoder.weight.data = whole[:, :3]
            self.encoder.weight.data = whole[:, 3:].T
        if kind == "frozen":
            self.decoder.weight.data = self.encoder.weight.data.T
            self.requires_grad_(False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["transposed", "buffer", "rows"])
def test_parameters_that_share_memory_without_being_one_are_refused(
    kind: str, device: str
) -> None:
    with torch.device(device):
        module = OfOneMemory(kind)
    with pytest.raises(ValueError, match="have the same memory"):
        HetFSDP(module, ALONE)


@pytest.mark.parametrize("kind", ["columns apart", "frozen"])
def test_tensors_in_one_storage_may_be_apart_or_frozen(kind: str) -> None:
    HetFSDP(OfOneMemory(kind), ALONE)
