"""What a program changes in a model between its steps is seen: it is right, or refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from tests.beside import Beside
from tests.selection import one_in
from tests.worlds import on_ranks, run_ranks

WIDTH = 4
UNITS = ["layers.0", "layers.1", "layers.2", "side"]


class Side(nn.Module):
    """A unit whose parameters are those of a module inside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


class Net(nn.Module):
    """Four units, dropout between them, and a loss with a part that mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.side = Side(nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.0)
        self.mixing = 0.0
        self.config = SimpleNamespace(mixes=False)
        self.seen: Any = None
        self.keeps: type | None = None  # in what it keeps something for a log

    def forward(self, x: Tensor, mixing: float = 0.0) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = self.dropout(layer(x).tanh())
        x = self.side(x)
        if self.keeps is not None:
            self.seen = self.keeps([("loss", 1)])
        loss = x.square().sum()
        if mixing or self.mixing or self.config.mixes:
            loss = loss + len(x) * x.mean(0).square().sum()
        return loss, len(x)


def make(num_rounds: int = 1) -> tuple[Beside, Tensor]:
    """A model that has taken a step, beside its module in one process, and its samples."""
    plan = Plan.by_hand(microbatch_sizes=[2, 1], num_microbatches=[2, 1], num_rounds=num_rounds)
    torch.manual_seed(7)
    both = Beside(Net().double(), plan, units=UNITS)
    x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
    both.step(x)
    return both, x


def num_probes(model: HetFSDP) -> int:
    return len(model._runtime.known._findings)


@on_ranks(2)
def test_hooks_and_logs_are_followed(rank: int) -> None:
    both, x = make(num_rounds=2)
    for each in (both.model.module, both.plain):
        each.layers[1].register_forward_hook(lambda _module, _args, out: 2 * out)  # type: ignore[index]
    both.step(x)
    before = num_probes(both.model)
    for kind in (list, dict):  # neither is hashable
        both.model.module.keeps = kind
        for _ in range(3):
            both.step(x)
    assert num_probes(both.model) <= before + 3


@on_ranks(2)
def test_units_may_be_frozen_while_the_model_is_evaluated(rank: int) -> None:
    """As peft does to evaluate a model without its adapters."""
    both, x = make()
    model, module = both.model, both.plain
    for _ in range(2):
        for each in (model.module, module):
            each.layers[0].requires_grad_(False)  # type: ignore[index]
            each.layers[0].register_forward_hook(lambda _module, _args, out: 2 * out)  # type: ignore[index]
        with torch.no_grad():
            loss_sum, _ = model(*both.part(x))
            expected, _ = module(x)
        losses = model.exchange([float(loss_sum)])
        assert sum(loss for (loss,) in losses) == pytest.approx(float(expected), rel=1e-12)
        for each in (model.module, module):
            each.layers[0]._forward_hooks.clear()  # type: ignore[index, union-attr]
            each.layers[0].requires_grad_(True)  # type: ignore[index]
        both.step(x)


def _dropout_begins(rank: int) -> list[float]:
    losses = []
    for numbers in ([4, 1], [2, 1]):  # of microbatches
        plan = Plan.by_hand(microbatch_sizes=[1, 1], num_microbatches=numbers)
        torch.manual_seed(7)
        model = HetFSDP(Net().double(), plan, units=UNITS)
        x = torch.randn(3, WIDTH, dtype=torch.float64)
        mine = plan.sample_indices(model.position, 3)
        whole = model.forward_backward(x[mine])
        model.module.dropout.p = 0.5  # type: ignore[union-attr]
        some = model.forward_backward(x[mine])
        assert whole is not None
        assert some is not None
        assert some != whole
        losses.append(some)
    return losses


def test_dropout_outside_of_units_may_begin_later() -> None:
    for losses in run_ranks(_dropout_begins, 2):
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def _clip(_module: nn.Module, grads: Any, _: Any) -> Any:
    return tuple(grad.clamp(-1e-3, 1e-3) for grad in grads)


def _center(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    return out - out.mean(0)


def _edit(what: str, model: HetFSDP) -> tuple[Any, ...]:
    """Change the model; what it is called with from now on."""
    module: Any = model.module
    if what == "a new parameter":
        module.side.base = Adapted(module.side.base)
    elif what == "another unit":
        module.layers[1] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    elif what == "another parameter":
        module.layers[1].weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float64))
    elif what == "a hook that mixes":
        module.layers[1].register_forward_hook(_center)
    elif what == "a hook that clips":
        module.layers[1].register_full_backward_hook(_clip)
    elif what == "an attribute":
        module.mixing = 0.5
    elif what == "a configuration":
        module.config.mixes = True
    return (0.5,) if what == "an argument" else ()


REFUSED = {
    "a new parameter": "of module 'side.base.adapter' was added after HetFSDP",
    "another unit": "unit 'layers.1' was taken out of the model",
    "another parameter": "layers.1.weight: a module holds another parameter",
    "a hook that mixes": "depends for one sample on the other samples",
    "a hook that clips": "do not grow as the gradient",
    "an attribute": "no sum or mean over samples",
    "a configuration": "no sum or mean over samples",
    "an argument": "no sum or mean over samples",
}


@pytest.mark.parametrize("what", one_in(2, REFUSED))
@on_ranks(2, fresh_world=True)
def test_what_would_depend_on_the_plan_is_refused_when_it_comes(rank: int, what: str) -> None:
    both, x = make(num_rounds=2)
    args = _edit(what, both.model)
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[what]):
        both.model.forward_backward(*both.part(x), *args)


class Gated(nn.Module):
    """Mixes samples behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(1))
        self.flags = SimpleNamespace(centers=False)
        self.act: Any = torch.tanh
        self.gives_loss = True

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.first(x))
        x = x + self.gate * (x.mean(0) if self.flags.centers else 1)
        x = self.second(x)
        return (x.square().sum(), len(x)) if self.gives_loss else x


class Criterion:
    """A loss with a flag."""

    def __init__(self) -> None:
        self.mixes = False

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = _centered(x) if self.mixes else x
        return x.square().sum(), torch.tensor(len(x))


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


@pytest.mark.parametrize(
    "what",
    [
        "a closed gate",
        "samples that are the same",
        "a flag of an object",
        "a flag of the loss",
        "another function",
        "another forward",
    ],
)
@on_ranks(2, fresh_world=True)
def test_what_hides_that_samples_are_mixed_does_not_last(rank: int, what: str) -> None:
    """What would mix samples is hidden in the first step, or comes after it."""
    plan = Plan.by_hand(microbatch_sizes=[2, 1], num_microbatches=[2, 1])
    torch.manual_seed(7)
    module = Gated().double()
    criterion = Criterion()
    loss_fn = criterion if what == "a flag of the loss" else None
    module.gives_loss = loss_fn is None
    model = HetFSDP(module, plan, units=["first", "second"], loss_fn=loss_fn)
    x = torch.randn(len(plan.sample_indices(model.position)), WIDTH, dtype=torch.float64)
    if what == "a closed gate":
        module.flags.centers = True
    else:
        if what == "samples that are the same":
            module.act, x = _centered, torch.ones_like(x)
        else:
            model.forward_backward(x)
        assert not module.gate.any()  # as it was before the probe
        if what == "a flag of an object":
            module.flags.centers = True
        elif what == "a flag of the loss":
            criterion.mixes = True
        elif what == "another function":
            module.act = _centered
        elif what == "another forward":
            module.forward = lambda x: (_centered(module.first(x)).square().sum(), len(x))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"(other|over) samples|load-balancing loss"):
        model.forward_backward(x)
