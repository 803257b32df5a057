"""Calls on parameters of which a rank has rows are those on whole parameters, or refused."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm

from shardhet import Plan
from tests.edge_plans import UNEVEN, every_plan
from tests.ordinary import Net, Pair
from tests.worlds import ends_all_ranks, on_ranks

MASK = torch.arange(72).reshape(6, 12) % 3 > 0


def normalize(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(1 / (0.1 + param.norm()))
        param.div_(1 + param.norm())
        param.sub_(param.mean())
        if param.dim() > 1:
            param.copy_(functional.normalize(param, dim=1))
            param /= 1 + param.norm(dim=1, keepdim=True)


def edit_by_element(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.9).add_(0.01)
        param.copy_(torch.where(param > 0, param, param * 2))
        param[param.abs() < 0.05] = 0.01


def meet_whole_tensors(model: Any) -> None:
    weight, bias = model.blocks[1].outer.weight, model.blocks[1].inner.bias
    weight.mul_(MASK + 0.5)
    weight.masked_fill_(~MASK, 0.25)
    weight[MASK] *= 1.5
    weight.copy_(weight + torch.arange(6.0).unsqueeze(1) * torch.ones(12))
    weight.add_(torch.arange(12.0))
    bias.copy_(torch.arange(12.0))
    if weight.grad is not None:
        weight.grad.mul_(MASK)


def scale_in_one_vector(model: nn.Module) -> None:
    params = list(model.parameters())
    vector = nn.utils.parameters_to_vector(params)
    vector /= 1 + vector.norm()
    start = 0
    for param in params:
        param.copy_(vector[start : start + param.numel()].view_as(param))
        start += param.numel()


def write_rows(model: Any) -> None:
    weight = model.blocks[0].outer.weight
    weight[0].fill_(0.5)
    weight[-1] = torch.arange(12.0)
    weight[1:, 2] += 3.0
    weight[..., 4] = 2.0
    weight.sub_(weight[1].clone())
    weight.mul_(1 + weight[:2].norm() + weight[2].sum())


def follow(model: Any) -> None:
    """One part of the model follows another, as a target network does."""
    first, second = model.blocks
    for own, other in zip(second.parameters(), first.parameters(), strict=True):
        own.lerp_(other, 0.3)
        own.data.copy_(0.9 * own.data + 0.1 * other.data)
    torch._foreach_lerp_(list(second.parameters()), list(first.parameters()), 0.1)
    second.inner.weight.mul_(1 + second.inner.weight.norm(dim=1).unsqueeze(1))
    second.inner.weight.mul_(second.inner.bias.unsqueeze(1)).add_(model.norm.bias)
    model.blocks[0].outer.weight.copy_(model.blocks[1].outer.weight)


def measured(model: nn.Module) -> list[float]:
    params = list(model.parameters())
    moments = [torch.zeros_like(p).lerp_(p, 0.1) for p in params]
    numbers = [
        sum(p.square().sum() for p in params),
        sum(float(p.detach().norm()) ** 2 for p in params),
        sum(m.norm() for m in moments),
        sum(p.norm() for p in torch._foreach_sub(params, moments)),
        max(p.detach().abs().max() for p in params),
        sum(p.data.mean() for p in params),
        sum(p[p > 0].square().sum() for p in params),
        model.get_parameter("blocks.1.scale").item() + float(params[0]),
        get_total_norm(params),
        nn.utils.parameters_to_vector(params).norm(),
        torch.linalg.vector_norm(torch.stack([p.norm() for p in params])),
        all(torch.isfinite(p).all() for p in params),
    ]
    return [float(number) for number in numbers]


@every_plan
@pytest.mark.parametrize(
    "edit",
    [normalize, edit_by_element, meet_whole_tensors, scale_in_one_vector, write_rows, follow],
)
@on_ranks()
def test_loops_over_parameters_are_those_of_one_process(
    rank: int, plan: Plan, edit: Callable[[nn.Module], None]
) -> None:
    pair = Pair(plan)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (pair.model, pair.plain)]
    for _ in range(2):
        pair.backward()
        for optimizer, model in zip(optimizers, (pair.model, pair.plain), strict=True):
            with torch.no_grad():
                edit(model.module if model is pair.model else model)
            optimizer.step()
        pair.same_grads()
        pair.same_params(1e-10)
        expected = measured(pair.plain)
        assert measured(pair.model) == pytest.approx(expected, rel=1e-11, abs=1e-11)
        for optimizer in optimizers:
            optimizer.zero_grad()
    state = optimizers[0].state[next(pair.model.parameters())]
    assert type(state["exp_avg"]) is Tensor  # optimizers step plain tensors


@on_ranks(2)
def test_hooks_of_optimizers_see_whole_parameters(rank: int) -> None:
    pair = Pair(UNEVEN)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (pair.model, pair.plain)]
    for optimizer, model in zip(optimizers, (pair.model, pair.plain), strict=True):
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *_, m=model: torch.no_grad()(normalize)(m))
    pair.train(optimizers, bar=1e-11)


@on_ranks(2)
def test_copies_of_parameters_are_plain(rank: int) -> None:
    pair = Pair(UNEVEN)
    param = next(pair.model.parameters())
    assert isinstance(param, nn.Parameter)
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    for other in (copy.deepcopy(param), torch.load(file)):
        assert type(other) is nn.Parameter
        assert other.requires_grad
        assert torch.equal(other, param)
        assert other.data_ptr() != param.data_ptr() or not param.numel()
    assert repr(param) == repr(copy.deepcopy(param))
    weight = pair.module.blocks[1].outer.weight
    for given in (torch.ones(weight.shape).double(), torch.ones(6, 12).double()):
        weight.grad = given
        assert float(weight.grad.sum()) == 72.0
    with pytest.raises(IndexError, match="index 6 is out of bounds for 6 rows"):
        weight[6]


@on_ranks(2, fresh_world=True)
def test_what_rows_cannot_give_is_refused(rank: int) -> None:
    weight = Pair(UNEVEN).module.blocks[1].outer.weight
    for call in (
        lambda w: functional.normalize(w, dim=0),
        lambda w: w.mean(0),
        lambda w: w @ w.T,
        lambda w: functional.linear(torch.ones(3, 12).double(), w),
        lambda w: torch.quantile(w.abs(), 0.5),
        lambda w: w.nonzero(),
        lambda w: torch.fft.fft(w, dim=0),
        lambda w: torch.special.softmax(w, 0),
        lambda w: torch.gradient(w, dim=0),
        lambda w: w.detach().clone().fill_diagonal_(0.0),
        lambda w: w.index_select(0, torch.arange(len(w))),
        lambda w: w.narrow(0, 0, len(w)),
        lambda w: functional.rms_norm(w, w.shape),
        lambda w: w.detach().clone().cumsum_(0),
        lambda w: w.topk(1, 0),
        lambda w: torch.where(w > 0),
        lambda w: torch.svd_lowrank(w, 1),
        lambda w: w.hsplit(3),
        lambda w: torch.histogram(w, 3),
        lambda w: w[[0, 2]],
        lambda w: w[::2],
        lambda w: w.T * w.T.unsqueeze(0)[0],
        lambda w: torch.zeros(6, 12).double().copy_(w),
        lambda w: torch.autograd.grad(
            torch.ones(1).requires_grad_().sum(), w, allow_unused=True
        ),
    ):
        with pytest.raises(RuntimeError, match="or its gradient, of which this rank has"):
            call(weight)


def mean_of_square(param: Tensor) -> Tensor:
    return param.square().mean()


@pytest.mark.parametrize("function", [torch.norm, torch.sum, mean_of_square])
@ends_all_ranks(2, "is used outside of the forward")
def test_a_penalty_outside_of_the_model_is_refused(
    rank: int, function: Callable[[Tensor], Tensor]
) -> None:
    pair = Pair(UNEVEN)
    loss_sum, number = pair.model(**pair.mine(pair.batch()))
    penalty = torch.stack([function(param) for param in pair.model.parameters()]).sum()
    pair.model.backward(loss_sum + penalty, number)


class Listed(Pair):
    def prepare(self, module: Net) -> None:
        self.params = list(module.parameters())


@on_ranks(2, fresh_world=True)
def test_parameters_listed_before_wrapping_are_refused(rank: int) -> None:
    pair = Listed(UNEVEN)
    pair.backward()
    for call in (
        lambda params: clip_grad_norm_(params, 1.0),
        lambda params: params[0].data.zero_(),
        lambda params: sum(p.sum() for p in params),
        lambda params: torch.optim.AdamW(params).step(),
    ):
        with pytest.raises(ValueError, match="scale: this parameter was kept from before"):
            call(pair.params)


@ends_all_ranks(2, "how many rows it has (p.numel()")
def test_a_learning_rate_of_a_number_of_rows_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    optimizer = torch.optim.SGD(pair.model.parameters(), 0.1)
    for group in optimizer.param_groups:
        group["lr"] = 1.0 / sum(p.numel() for p in group["params"])
    pair.backward()
    optimizer.step()
    pair.backward()
