"""What a checkpoint fits: other dtypes, groups, names; and what it gives back besides."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.checkpoint import CheckpointError, load, save, save_async
from shardhet.checkpoint.format.reading import SavedCheckpoint
from tests.checkpoint_cases import (
    Odd,
    Together,
    check_same,
    draw_plan,
    make_optimizer,
    train,
    whole_state,
    wrap,
)
from tests.selection import one_in
from tests.test_checkpoint_failures import THREE, all_refuse, trained
from tests.worlds import on_ranks, run_ranks

TWO = Plan.by_hand(microbatch_sizes=[1, 4], rank_batch_sizes=[2, 4], state_shares=[0.0, 1.0])


@pytest.mark.parametrize("kind", one_in(3, ["adamw", "sgd", "nadam"]))
@on_ranks(3)
def test_under_the_same_plan_the_next_losses_are_bit_equal(
    rank: int, tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(0)
    model = wrap(Odd().double(), THREE, seed=7)
    optimizer = make_optimizer(model, kind)
    train(model, optimizer, range(3))
    save(model, optimizer, tmp_path / "saved")
    expected = train(model, optimizer, range(3, 6))
    torch.manual_seed(1)
    again = wrap(Odd().double(), THREE, seed=7)
    other = make_optimizer(again, kind)
    load(again, other, tmp_path / "saved")
    assert train(again, other, range(3, 6)) == expected
    check_same(whole_state(again, other), whole_state(model, optimizer))


KINDS = ("slow", "fast", "large")  # as ranks announce themselves, in another order than planned
BY_KIND = Plan.by_hand(
    microbatch_sizes=[2, 1, 1],
    rank_batch_sizes=[3, 1, 2],
    state_shares=[0.6, 0.0, 0.4],
    devices=[DeviceSpec(kind=kind) for kind in ("large", "slow", "fast")],
)


def save_and_load_by_kind(rank: int, folder: Path) -> list[str]:
    torch.manual_seed(0)
    model = wrap(Odd().double(), BY_KIND, device_spec=DeviceSpec(kind=KINDS[rank]))
    assert model.position == (1, 2, 0)[rank]
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(2))
    state = whole_state(model, optimizer)
    save_async(model, optimizer, folder / "saved", extra=rank)
    train(model, optimizer, range(1))
    assert load(model, optimizer, folder / "saved") == 0
    check_same(whole_state(model, optimizer), state)
    return sorted(path.name for path in (folder / "saved").glob("*.distcp"))


def test_ranks_may_be_in_another_order_than_the_plan(tmp_path: Path) -> None:
    names = run_ranks(save_and_load_by_kind, 3, tmp_path)
    assert names == [["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]] * 3


def save_in(rank: int, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrap(Odd().to(dtype), THREE)
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(2))
    save(model, optimizer, folder / "saved")
    return whole_state(model, optimizer)


def load_in(rank: int, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    model = wrap(Odd().to(dtype), TWO)
    optimizer = make_optimizer(model, "adamw")
    load(model, optimizer, folder / "saved")
    state = whole_state(model, optimizer)
    train(model, optimizer, range(2, 3))
    return state


@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    one_in(
        2,
        [
            (torch.float32, torch.float64),
            (torch.float64, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ],
    ),
)
def test_another_precision_rounds_once(
    tmp_path: Path, saved_in: torch.dtype, loaded_in: torch.dtype
) -> None:
    saved, *_ = run_ranks(save_in, 3, tmp_path, saved_in)
    loaded, *_ = run_ranks(load_in, 2, tmp_path, loaded_in)
    expected = {
        name: value.to(loaded_in)
        if isinstance(value, Tensor) and value.is_floating_point() and "step" not in name
        else value
        for name, value in saved.items()
    }
    check_same(loaded, expected)


class HighPrecision(optim.Optimizer):
    """Keeps a float64 mean of parameters of any dtype, and counts in integers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            mean = state.setdefault("mean", torch.zeros_like(param, dtype=torch.float64))
            count = state.setdefault("count", torch.zeros_like(param, dtype=torch.int32))
            mean += param.grad.double() / 3
            count += 1
            param -= mean.to(param.dtype)


@on_ranks(3)
def test_states_keep_a_dtype_that_is_not_the_parameters(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = wrap(Odd().float(), THREE)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = HighPrecision(params)
    train(model, optimizer, range(2))
    save(model, optimizer, tmp_path / "saved")
    saved = whole_state(model, optimizer)
    train(model, optimizer, range(1))
    load(model, optimizer, tmp_path / "saved")
    check_same(whole_state(model, optimizer), saved)


@on_ranks(3)
def test_groups_may_be_finer_and_else_are_named(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = tmp_path / "saved"
    save(model, optimizer, folder)
    params = [param for param in model.parameters() if param.requires_grad]
    # States are found by name; torch's own load_state_dict finds them by position.
    split = optim.AdamW([{"params": [param]} for param in params[::-1]])
    load(model, split, folder)
    states, saved = (
        {name: state for name, state in whole_state(model, each).items() if "group" not in name}
        for each in (split, optimizer)
    )
    check_same(states, saved)
    for group, param in zip(split.param_groups, params[::-1], strict=True):
        whole = len(model.sharded_state_dict()[name_of(model, param)].global_shape)
        assert group["lr"] == (0.001 if whole > 1 else 0.02)
    frozen = model.get_parameter("frozen.weight")
    for other, says in (
        (optim.AdamW(params), "saved with different options"),
        (optim.AdamW(params[:4]), "were trained but are not in any group|different options"),
        (optim.AdamW([*params, frozen]), "has no options for frozen.weight"),
        (optim.SGD(params, lr=0.1, momentum=0.9), "holds the state of AdamW, not of SGD"),
    ):
        all_refuse(model, lambda other=other: load(model, other, folder), says)


def name_of(model: HetFSDP, param: nn.Parameter) -> str:
    return next(fqn for fqn, each in model.named_parameters() if each is param)


def two_of(model: nn.Module, first: Any = optim.AdamW, second: Any = optim.SGD) -> Together:
    """Two optimizers, each of every other parameter."""
    params = [param for param in model.parameters() if param.requires_grad]
    momentum = {"momentum": 0.9} if second is optim.SGD else {}
    halves = [{"params": params[1:4:2]}, {"params": params[5::2], "lr": 0.02}]
    return Together(first(params[::2], lr=0.01), second(halves, lr=0.01, **momentum))


@on_ranks(3)
def test_several_optimizers_are_saved_and_loaded_together(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    model = wrap(Odd().double(), THREE, seed=7)
    two = two_of(model)
    train(model, two, range(2))
    save(model, two.each, folder)
    manifest = SavedCheckpoint.open(folder).manifest
    assert manifest is not None
    assert manifest.optimizer == "AdamW, SGD, SGD"
    saved = [whole_state(model, each) for each in two.each]
    expected = train(model, two, range(2, 4))
    again = wrap(Odd().double(), draw_plan(random.Random(1), 3), seed=8)
    others = two_of(again)
    load(again, others.each[::-1], folder)  # each has the states of its parameters
    for each, state in zip(others.each, saved, strict=True):
        check_same(whole_state(again, each), state)
    assert train(again, others, range(2, 4)) == pytest.approx(expected, rel=1e-12)
    plain = Odd().double()
    load(plain, two_of(plain).each, folder)
    one = optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    save(model, one, tmp_path / "one")
    # of one class they are one
    load(model, two_of(model, second=optim.AdamW).each, tmp_path / "one")
    exchanged, elsewhere = two_of(model, optim.SGD, optim.AdamW).each, tmp_path / "others"
    for call, says in (
        (lambda: load(model, two.each[0], folder), "were trained but are not in any group"),
        (lambda: load(model, exchanged, folder), "holds the state of AdamW, not of SGD, for"),
        (lambda: save(model, [*two.each, one], elsewhere), "are in two optimizers"),
        (
            lambda: save(model, two.each[: 1 + (rank == 2)], elsewhere),
            "groups: positions 0 and 2 of the plan have",
        ),
    ):
        all_refuse(model, call, says)


def test_another_class_is_seen_by_its_options_in_what_torch_wrote(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = nn.Linear(3, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "dcp", no_dist=True)
    again = optim.SGD(model.parameters(), lr=9.0)
    load(model, again, tmp_path / "dcp")
    assert again.param_groups[0]["momentum"] == 0.9
    with pytest.raises(CheckpointError, match="was saved with dampening, momentum, nesterov"):
        load(model, optim.AdamW(model.parameters()), tmp_path / "dcp")


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    save(Odd(), None, tmp_path / "saved")
    other = Odd(has_scalar=False, has_unused=True)
    other.extra = nn.Linear(2, 2)
    other.frozen = nn.Linear(5, 4)
    other.num_words = torch.tensor(1.0)
    with pytest.raises(CheckpointError) as raised:
        load(other, None, tmp_path / "saved")
    for said in (
        "missing: extra.bias, extra.weight",
        "unexpected: blocks.0.scale, blocks.1.scale",
        "frozen.weight (5, 5) instead of (4, 5)",
        "frozen.bias (5,) instead of (4,)",
        "num_words torch.int64 instead of torch.float32",
    ):
        assert said in str(raised.value)


def test_a_models_state_dict_alone_is_read_too(tmp_path: Path) -> None:
    model = Odd()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    again = Odd()
    assert load(again, None, tmp_path / "dcp") is None
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5, 5])
    scaler = torch.amp.GradScaler("cpu")
    extra = {
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "random": random.getstate(),
        "torch": torch.get_rng_state(),
        "nested": [
            {"a": (1, 2.5, None, True, "text")},
            {3: torch.ones(2, 2, dtype=torch.bool)},
        ],
        "empty": [torch.empty(0, 3), {}, (), []],
        "odd": {"$tensor": "not one", "inf": float("inf")},
        "scalar": torch.tensor(3),
    }
    save(model, optimizer, tmp_path / "saved", extra=extra)
    found = load(model, optimizer, tmp_path / "saved")
    assert same(found, extra), found
    assert type(found["scheduler"]["milestones"]) is Counter
    scheduler.load_state_dict(found["scheduler"])
    random.setstate(found["random"])
    torch.set_rng_state(found["torch"])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    save(model, optimizer, tmp_path / "saved")
    again = optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    load(model, again, tmp_path / "saved")
    assert isinstance(again.param_groups[0]["lr"], Tensor)
    assert again.param_groups[0]["lr"] == 0.5
