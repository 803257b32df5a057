"""Schedules are right at their corners; optimizers are built over rows, empty ones included."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardhet.training.optim import (
    OptimizerSpec,
    Schedule,
    WarmupDecay,
    decay_groups,
)

CASE = WarmupDecay(num_steps=20, num_warmup_steps=4, final_fraction=0.1)
SCHEDULES: dict[str, Schedule] = {
    "constant": replace(CASE, final_fraction=1.0),
    "linear": replace(CASE, is_cosine=False),
    "cosine": CASE,
    "wsd": replace(CASE, num_decay_steps=5, is_cosine=False),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_rises_in_equal_stairs_to_the_peak(name: str) -> None:
    fractions = [SCHEDULES[name](step) for step in range(4)]
    assert fractions == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_the_rate_falls_to_its_final_fraction_and_stays_there(name: str) -> None:
    fractions = [SCHEDULES[name](step) for step in range(3, 30)]
    assert all(b <= a for a, b in itertools.pairwise(fractions))
    assert fractions[20 - 3 :] == pytest.approx([0.1] * 10)


def test_midways() -> None:
    assert SCHEDULES["constant"](10**6) == 1
    assert SCHEDULES["linear"](12) == pytest.approx(0.55)
    assert SCHEDULES["cosine"](12) == pytest.approx(0.55)
    assert [SCHEDULES["wsd"](step) for step in (15, 20)] == pytest.approx([1.0, 0.1])


def test_a_schedule_without_warm_up_begins_at_the_peak() -> None:
    for is_cosine in (True, False):
        assert WarmupDecay(num_steps=3, is_cosine=is_cosine)(0) == 1.0


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_ranks_that_store_nothing_of_a_parameter_can_step(name: str) -> None:
    params = [nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(4, 3))]
    params.append(nn.Parameter(torch.ones(2)))
    optimizer = OptimizerSpec(name=name, learning_rate=0.1, weight_decay=0.1).build(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert params[1].detach().max() < 1
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_fused_kernels_do_what_plain_ones_do() -> None:
    start = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
    fused = nn.Parameter(start.clone())
    plain = nn.Parameter(start.clone())
    one = OptimizerSpec(learning_rate=0.1, weight_decay=0.1).build([fused])
    other = torch.optim.AdamW(decay_groups([plain], 0.1), lr=0.1, foreach=False)
    for _ in range(5):
        fused.grad, plain.grad = fused.detach().sin(), plain.detach().sin()
        one.step()
        other.step()
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"foreach": True}),
        ("Adagrad", {}),
    ],
)
def test_kernels_are_fused_only_where_they_do_what_plain_ones_do(
    name: str, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    start = torch.linspace(0.5, 1, 200, dtype=dtype)
    spec = OptimizerSpec(name=name, learning_rate=0.1, arguments=arguments)
    chosen, plain, exact = (
        nn.Parameter(start.to(each)) for each in (dtype, dtype, torch.float64)
    )
    optimizer = spec.build([chosen])
    is_half = dtype.itemsize == 2
    is_fused = optimizer.param_groups[0].get("fused")
    assert is_fused or is_half or "foreach" in arguments  # where nothing is wrong they are used
    plainly = {**arguments, "foreach": False}
    others = [
        getattr(torch.optim, name)([param], lr=0.1, weight_decay=0, **plainly)
        for param in (plain, exact)
    ]
    for _ in range(3):
        for param in (chosen, plain, exact):
            param.grad = param.detach().cos()
        for each in (optimizer, *others):
            each.step()
    # Fused ones may compute in float32 what the others round in between.
    off, plainly_off = ((each.double() - exact).abs().max().item() for each in (chosen, plain))
    assert off <= plainly_off + torch.finfo(dtype).eps
