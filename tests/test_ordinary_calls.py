"""Torch's own calls around a step do on a HetFSDP what they do on the plain model.

Norms and clipping, gradient scalers, hooks on parameters, several forwards and backwards.
"""

import copy
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from shardhet import Plan
from shardhet.extras.shared_host import transport
from tests.edge_plans import PLANS, UNEVEN, every_plan
from tests.ordinary import WIDTH, Net, Pair
from tests.worlds import ends_all_ranks, on_ranks, run_ranks

# Norms


def clip_by_norm(rank: int, plan: Plan, order: float, foreach: bool | None) -> None:
    pair = Pair(plan)
    pair.backward()
    expected = clip_grad_norm_(pair.plain.parameters(), 0.3, order, foreach=foreach)
    norm = clip_grad_norm_(pair.model.parameters(), 0.3, order, foreach=foreach)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
    pair.same_grads()


@pytest.mark.sampled
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf, -1.0, 0.0])
def test_clipping_by_norm_is_that_of_one_process(order: float, foreach: bool | None) -> None:
    for plan in PLANS:
        run_ranks(clip_by_norm, len(plan.ranks), plan, order, foreach)


@every_plan
@on_ranks()
def test_norms_of_gradients_are_those_of_one_process(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    pair.backward()
    params, plain = list(pair.model.parameters()), list(pair.plain.parameters())
    some, same = [p.grad for p in params[::2]], [p.grad for p in plain[::2]]
    torch.testing.assert_close(get_total_norm(some), get_total_norm(same), rtol=1e-12, atol=0)
    for own, other in zip(params, plain, strict=True):
        for norm in (Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm):
            torch.testing.assert_close(norm(own.grad), norm(other.grad), rtol=1e-12, atol=0)
        written_out = float(own.grad.data.norm(2)), own.grad.detach().norm(p=2).item()
        assert written_out == pytest.approx((float(other.grad.norm()),) * 2, rel=1e-12)
    total = sum(float(p.grad.norm()) ** 2 for p in params) ** 0.5
    assert total == pytest.approx(float(get_total_norm([p.grad for p in plain])), rel=1e-12)
    kept = [p.grad.norm() for p in params]  # read only after the gradients have changed
    expected = [p.grad.norm() for p in plain]
    clip_grad_value_(pair.model.parameters(), 1e-3)
    clip_grad_value_(pair.plain.parameters(), 1e-3)
    torch.testing.assert_close(torch.stack(kept), torch.stack(expected), rtol=1e-12, atol=0)
    pair.same_grads()
    total_norm = get_total_norm([p.grad for p in params])
    torch.nn.utils.clip_grads_with_norm_(params, 1e-4, total_norm)
    clip_grad_norm_(plain, 1e-4)
    pair.same_grads()


REDUCTIONS: list[Callable[[Tensor], Tensor]] = [
    Tensor.sum,
    Tensor.mean,
    torch.max,
    Tensor.amin,
    lambda grad: grad.abs().max(),
    lambda grad: (grad**2).mean(),
    lambda grad: (grad == 0).sum(),
    lambda grad: (grad > 0).double().mean(),
    lambda grad: grad.isnan().any(),
    lambda grad: torch.isfinite(grad).all(),
    lambda grad: (~grad.isfinite()).any(),
    lambda grad: torch.count_nonzero(grad),
    lambda grad: grad.count_nonzero(*range(1, grad.dim())).sum(),
    lambda grad: grad.sum(None),
    lambda grad: grad.cpu().clone().contiguous().sum(),
    lambda grad: grad.half().float().double().mean(),
    lambda grad: grad.data.view(-1).sum(dim=-1),
    lambda grad: torch.flatten(grad).amax(0),
    lambda grad: (1 - 2 * grad / 3).sum(),
    lambda grad: (grad.clamp(max=0.0) + grad.nan_to_num()).sum(),
    lambda grad: torch.where(grad > 0, grad, 0.0).sum(),
    lambda grad: torch.max(grad, other=torch.zeros_like(grad)).sum(),
    lambda grad: grad.norm(dim=-1).mean() if grad.dim() > 1 else grad.sum(),
    lambda grad: (
        grad / (1 + grad.norm(dim=-1, keepdim=True)) if grad.dim() > 1 else grad
    ).sum(),
    lambda grad: (grad.square().sum(-1) if grad.dim() > 1 else grad).amax(),
    lambda grad: (grad.T if grad.dim() == 2 else grad).norm(),
    lambda grad: grad.unsqueeze(-1).transpose(0, -1).abs().max(),
    lambda grad: torch.stack([grad, grad + 1]).mean(),
    lambda grad: torch.cat([grad.flatten(), 2 * grad.reshape(-1)]).norm(),
]


def norms_of_all(model: nn.Module) -> list[float]:
    """What loops that put all gradients into one vector compute of it."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    vector = nn.utils.parameters_to_vector(grads)
    return [float(each) for each in (vector.norm(), vector.mean(), vector.abs().amax())]


@every_plan
@on_ranks()
def test_gradients_in_one_vector_are_those_of_one_process(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    pair.backward()
    assert norms_of_all(pair.model) == pytest.approx(norms_of_all(pair.plain), rel=1e-12)
    for model in (pair.model, pair.plain):
        grads = [param.grad for param in model.parameters()]
        vector = torch.cat([grad.flatten() for grad in grads])
        nn.utils.vector_to_parameters(vector / (1 + vector.norm()), grads)
    pair.same_grads()


@every_plan
@on_ranks()
def test_reductions_of_gradients_are_those_of_one_process(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    pair.backward()
    for own, other in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        for reduction in REDUCTIONS:
            found, expected = reduction(own.grad), reduction(other.grad)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        if own.grad.dim() > 1:  # of each row for itself
            assert own.grad.sum(1).shape == own.grad.mean(-1).shape == own.grad.shape[:1]
            for kept in (lambda g: functional.normalize(g, dim=1), lambda g: g.chunk(2, -1)[0]):
                assert float(kept(own.grad).norm()) == pytest.approx(kept(other.grad).norm())
        assert torch.max(own.grad, torch.zeros_like(own.grad)).shape == own.grad.shape
    assert not any(p.grad.isnan().any() for p in pair.model.parameters())
    if pair.model.position == 0:
        first = next(p for p in pair.model.parameters() if p.grad.numel())
        first.grad.as_subclass(Tensor).flatten()[0] = math.nan
    assert any(p.grad.isnan().any() for p in pair.model.parameters())


@on_ranks(2, fresh_world=True)
def test_what_cannot_be_put_together_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    pair.backward()
    grads = [param.grad for param in pair.model.parameters() if param.dim() > 1]
    for reduction in (
        Tensor.std,
        torch.median,
        lambda g: g.sum(0),
        lambda g: g.mean((0, 1), keepdim=True),
        lambda g: g.sum(0, True),
        lambda g: g.count_nonzero(1, 0),
        lambda g: g.max(0),
        lambda g: torch.quantile(g, 0.5),
        lambda g: g.flatten().topk(3),
        lambda g: g @ torch.ones_like(g).T,
        lambda g: g.T.norm(dim=1),
        lambda g: torch.stack([g, g]).sum(1),
        lambda g: torch.cat([g, torch.ones(1, g.shape[1])]),
        lambda g: functional.cosine_similarity(g.flatten(), g.flatten(), dim=0),
        lambda g: functional.mse_loss(torch.zeros_like(g), g),
        lambda g: torch.dist(g, torch.zeros_like(g)),
        lambda g: torch.linalg.matrix_norm(g),
        lambda g: torch.linalg.vecdot(g.flatten(), g.flatten()),
        lambda g: functional.normalize(g.flatten(), dim=0),
        lambda g: functional.softmax(g.flatten(), dim=0),
        lambda g: g.roll(1, 0),
        lambda g: g.triu(),
        lambda g: g.chunk(3),
    ):
        with pytest.raises(RuntimeError, match="this rank has only some rows"):
            reduction(grads[0])


@every_plan
@on_ranks()
def test_a_norm_that_is_not_finite_is_so_on_every_rank(rank: int, plan: Plan) -> None:
    """With one bad element, in the shard of each rank in turn."""
    pair = Pair(plan)
    pair.backward()
    params = list(pair.model.parameters())
    for place in range(plan.world_size):
        for value in (math.inf, -math.inf, math.nan):
            for param in params:
                param.grad.as_subclass(Tensor).fill_(1.0)
            filled = [p for p in params if p.grad.numel()]
            if pair.model.position == place and filled:
                filled[-1].grad.as_subclass(Tensor).view(-1)[-1] = value
            has_rows = bool(pair.model.exchange([float(len(filled))])[place][0])
            expected = str(abs(value)) if has_rows else "finite"
            norms = {}
            for order in (2.0, 1.0, math.inf):
                norms[f"total, {order}"] = get_total_norm([p.grad for p in params], order)
                each = torch.stack([p.grad.norm(order) for p in params])
                norms[f"stacked, {order}"] = torch.linalg.vector_norm(each, order)
            assert any(p.grad.isnan().any() for p in params) == (expected == "nan")
            assert all(p.grad.isfinite().all() for p in params) == (expected == "finite")
            norms["clip_grad_norm_"] = pair.model.clip_grad_norm_(1.0)  # which writes them
            for name, norm in norms.items():
                found = str(float(norm)) if not math.isfinite(norm) else "finite"
                assert found == expected, (name, place, value)
            if expected != "finite":
                with pytest.raises(RuntimeError, match="The total norm of"):
                    clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


@on_ranks(2)
def test_copies_of_gradients_are_plain_tensors(rank: int) -> None:
    pair = Pair(UNEVEN)
    pair.backward()
    grad = next(pair.model.parameters()).grad
    assert type(grad) is not Tensor
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    for copied in (copy.deepcopy(grad), torch.load(file), grad.clone().tolist()):
        copied = torch.as_tensor(copied, dtype=grad.dtype)
        assert type(copied) is Tensor
        assert torch.equal(copied, grad)


@ends_all_ranks(2, "ranks are in different calls", "p.norm", "model(...)")
def test_a_norm_that_one_rank_takes_alone_ends_all(rank: int) -> None:
    pair = Pair(UNEVEN)
    pair.backward()
    if rank == 0:
        float(next(pair.model.parameters()).grad.norm())
    pair.model(**pair.mine(pair.batch()))


@ends_all_ranks(2, "p.sum: this rank called it for", "another rank for another parameter")
def test_reductions_of_different_gradients_end_all(rank: int) -> None:
    pair = Pair(UNEVEN)
    pair.backward()
    params = list(pair.model.parameters())
    float(params[rank].grad.sum())


@ends_all_ranks(2, "inner.weight or its gradient, of which this rank has only some rows")
def test_a_norm_that_rows_cannot_give_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    pair.backward()
    grad = pair.model.get_parameter("blocks.0.inner.weight").grad
    own = pair.rows("blocks.0.inner.weight", pair.plain.blocks[0].inner.weight.grad)
    torch.testing.assert_close(Tensor(grad.norm(dim=1)), own.norm(dim=1))
    torch.linalg.norm(grad, 2)  # the largest singular value


# Scalers


def train_with_scaler(rank: int, plan: Plan, fused: bool, unscales: bool) -> float:
    pair = Pair(plan)
    kwargs = {"lr": 0.01, "fused": fused}
    optimizer = torch.optim.AdamW(pair.model.parameters(), **kwargs)
    plain_optimizer = torch.optim.AdamW(pair.plain.parameters(), **kwargs)
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", growth_interval=2) for _ in range(2))
    for step in range(5):
        batch = pair.batch()
        loss_sum, num = pair.model(**pair.mine(batch))
        scaled_mean = pair.model.backward(scaler.scale(loss_sum), num)
        plain_sum, plain_num = pair.plain(**batch)
        plain_scaler.scale(plain_sum / plain_num).backward()
        assert scaled_mean is not None
        assert scaled_mean / scaler.get_scale() == pytest.approx(float(plain_sum / plain_num))
        if step == 2:  # one element, which one rank stores
            pair.plain.head.weight.grad[2, 1] = math.inf
            pair.model.get_parameter("head.weight").grad[2, 1] = math.inf
        if unscales:
            scaler.unscale_(optimizer)
            plain_scaler.unscale_(plain_optimizer)
            norm = clip_grad_norm_(pair.model.parameters(), 0.5)
            expected = clip_grad_norm_(pair.plain.parameters(), 0.5)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for each, its in ((scaler, optimizer), (plain_scaler, plain_optimizer)):
            each.step(its)
            each.update()
            its.zero_grad()
        pair.same_params(1e-9)
        assert scaler.get_scale() == plain_scaler.get_scale()
    return scaler.get_scale()


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_skips_the_same_steps_on_all_ranks(
    plan: Plan, fused: bool, unscales: bool
) -> None:
    scales = run_ranks(train_with_scaler, len(plan.ranks), plan, fused, unscales)
    assert len(set(scales)) == 1


# Hooks on parameters


def add_hooks(module: nn.Module, seen: list[Any]) -> list[Any]:
    weight, scale = module.get_parameter("head.weight"), module.get_parameter("blocks.0.scale")

    def mask_first_row(grad: Tensor) -> Tensor:
        seen.append(float(grad.square().sum()))
        grad = grad.clone()
        grad[0] = 0.0
        return grad

    def halve(grad: Tensor) -> Tensor:
        return grad / 2

    weight.register_hook(mask_first_row)
    weight.register_hook(halve)
    scale.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    scale.register_post_accumulate_grad_hook(lambda param: seen.append("done"))
    removed = weight.register_hook(lambda grad: grad * 1000)
    removed.remove()
    return seen


class HookedBefore(Pair):
    def prepare(self, module: nn.Module) -> None:
        self.seen = add_hooks(module, [])


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks()
def test_hooks_on_parameters_see_whole_gradients(rank: int, plan: Plan, when: str) -> None:
    if when == "before":
        pair = HookedBefore(plan)
        seen = pair.seen
    else:
        pair = Pair(plan)
        seen = add_hooks(pair.model, [])
    expected = add_hooks(pair.plain, [])
    for _ in range(2):  # the second adds
        pair.backward()
        pair.same_grads()
    numbers = [[each for each in s if isinstance(each, float)] for s in (seen, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-10)
    assert seen.count("done") == expected.count("done") == 2
    assert seen.count(()) == expected.count(()) == 2
    assert not transport._staging._lent  # what peers have read is given back


@every_plan
@on_ranks()
def test_an_optimizer_may_step_in_hooks(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    for module in (pair.model, pair.plain):
        for param in module.parameters():
            optimizer = torch.optim.SGD([param], lr=0.05)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        pair.backward()
        pair.same_params()
    assert all(p.grad is None for p in pair.model.parameters())


@ends_all_ranks(2, "Register the same ones on every rank")
def test_a_hook_on_one_rank_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    if rank == 1:
        next(pair.model.parameters()).register_hook(lambda grad: None)
    pair.backward()


@ends_all_ranks(2, "head.weight: a hook on it returns (1, 6)")
def test_a_hook_of_another_shape_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    pair.model.get_parameter("head.weight").register_hook(lambda grad: grad[:1])
    pair.backward()


# Loops


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks()
def test_several_forwards_and_backwards_accumulate(
    rank: int, plan: Plan, set_to_none: bool
) -> None:
    pair = Pair(plan)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9)
        for each in (pair.model, pair.plain)
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    for _ in range(3):
        for context in (pair.model.no_sync(), nullcontext()):
            with context:
                pair.backward()
            with torch.no_grad():
                pair.model(**pair.mine(pair.batch()))
        pair.same_grads()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            scheduler.step()
        pair.same_params()


@every_plan
@on_ranks()
def test_a_count_of_a_rank_without_samples_is_zero(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    x = torch.arange(sum(pair.sizes), dtype=torch.float64)[:, None].repeat(1, WIDTH)
    batch = pair.batch() | {"x": x}

    def forward(self: Net, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        # On a probe's samples too, both times the same number of them.
        return Net.forward(self, x, y)[0], int((x[:, 0] % 4 < 2).sum())

    for module in (pair.plain, pair.model.module):
        module.forward = partial(forward, module)
    pair.backward(batch)
    pair.same_grads()


@ends_all_ranks(2, "for the output of an earlier model(...)")
def test_a_backward_of_an_earlier_forward_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    batch = pair.mine(pair.batch())
    (first, n), _ = pair.model(**batch), pair.model(**batch)
    pair.model.backward(first, n)


@ends_all_ranks(2, "backward of an earlier forward, or not through HetFSDP")
def test_a_backward_from_inside_is_refused(rank: int) -> None:
    """Of a tensor on the way to the model's output."""
    pair, seen = Pair(UNEVEN), []
    pair.model.module.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    pair.model(**pair.mine(pair.batch()))
    seen[-1].sum().backward()


class Transforming(Pair):
    """A model that calls a unit through torch.func."""

    def prepare(self, module: Net) -> None:
        block = module.blocks[0]
        block.inner.register_forward_pre_hook(lambda _, args: torch.vmap(torch.sin)(*args))
        module.norm.register_forward_pre_hook(lambda _, args: torch.vmap(block)(*args))


@ends_all_ranks(2, "unit 'blocks.0' was called inside a transform of torch.func")
def test_a_unit_in_a_transform_is_refused(rank: int) -> None:
    Transforming(UNEVEN).backward()


@ends_all_ranks(2, "model(...): called inside a transform of torch.func")
def test_the_model_in_a_transform_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    batch = pair.mine(pair.batch())
    x = batch["x"]
    torch.func.jvp(lambda x: pair.model(x, batch["y"])[0], (x,), (torch.ones_like(x),))


class Deciding(Pair):
    """A model that calls an operator which calls functions of the program."""

    def prepare(self, module: Net) -> None:
        def choose(_: nn.Module, args: tuple[Tensor]) -> Any:
            return torch.cond(args[0].sum() > 0, torch.sin, torch.cos, args)

        module.blocks[0].inner.register_forward_pre_hook(choose)


@ends_all_ranks(2, "cond: what it calls, and which samples that reads, cannot be followed")
def test_an_operator_that_calls_functions_is_refused(rank: int) -> None:
    """As ``flex_attention``, which has no backward on CPUs."""
    Deciding(UNEVEN).backward()


# Settings of optimizers


@ends_all_ranks(2, "stepped with different settings or groups", "lr=0.0", "ReduceLROnPlateau")
def test_ranks_that_step_with_different_settings_are_told(rank: int) -> None:
    """A learning rate that follows the loss of this rank's samples."""
    pair = Pair(UNEVEN)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        pair.model.backward(*pair.model(**pair.mine(pair.batch())))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(float(step if rank else -step))


@ends_all_ranks(2, "stepped with different settings or groups", "p.numel()")
def test_ranks_whose_groups_follow_their_rows_are_told(rank: int) -> None:
    """Groups by how many elements of a parameter this rank has, with unlike rates."""
    pair = Pair(Plan.by_hand(microbatch_sizes=[2, 1], state_shares=[0.4, 0.6]))
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for param in pair.model.parameters():
        groups[param.numel() > 30].append(param)
    rates = zip(groups.values(), (0.1, 0.01), strict=True)
    optimizer = torch.optim.SGD([{"params": params, "lr": lr} for params, lr in rates])
    for _ in range(2):
        pair.model.backward(*pair.model(**pair.mine(pair.batch())))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_ranks_without_rows_need_not_step(rank: int) -> None:
    """A rank without rows leaves the step out; another kernel is no other setting."""
    pair = Pair(Plan.by_hand(microbatch_sizes=[2, 1], state_shares=[0.0, 1.0]))
    optimizer = torch.optim.AdamW(pair.model.parameters(), lr=0.01, foreach=bool(rank))
    for _ in range(3):
        pair.model.backward(*pair.model(**pair.mine(pair.batch())))
        if rank:
            optimizer.step()
        optimizer.zero_grad()
