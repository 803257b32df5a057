"""Optimizers on rows train what they train on whole parameters, or are refused by name."""

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.functional import cosine_similarity, normalize

from shardhet import Plan
from shardhet.fsdp.params.optimizer_check import ELEMENT_WISE, ROWS
from tests.checkpoint_cases import with_gradients
from tests.edge_plans import ALONE, UNEVEN, every_plan
from tests.ordinary import Pair
from tests.worlds import ends_all_ranks, on_ranks, run_ranks, run_ranks_expecting_failure

WITHIN_S = 10.0
DIFFERENTLY = "optimizer Deciding updates rows of a parameter differently"
EVEN = Plan.by_hand(microbatch_sizes=[3, 3], state_shares=[0.5, 0.5])


class Lion(optim.Optimizer):
    """Element by element, and no class that anybody knows."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            mean.lerp_(param.grad, 1 - self.beta)
            param -= group["lr"] * mean.sign()


class Lamb(Lion):
    """Steps as long as the parameter is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            length = param.norm() / (param.grad.norm() + 1e-9)
            param -= group["lr"] * length * param.grad


class Deciding(Lion):
    """Leaves a parameter out by what is so of all its rows."""

    def __init__(self, params: Iterable[Any], leaves_out: Callable[..., Any]) -> None:
        super().__init__(params)
        self.leaves_out = leaves_out

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            if not self.leaves_out(param.grad, param):
                param -= group["lr"] * (param.grad.sign() + param)


def is_bad(grad: Tensor, _: Tensor) -> bool:
    return not grad.isfinite().all()


def is_large(grad: Tensor, _: Tensor) -> bool:
    return float(grad.norm()) > 1e5


def is_zero(grad: Tensor, _: Tensor) -> bool:
    return not grad.any()


def is_across(grad: Tensor, param: Tensor) -> bool:
    """Whether each row is almost orthogonal, as of weights whose norms do not matter."""
    if param.dim() < 2:
        return False
    return float(cosine_similarity(grad.flatten(1), param.flatten(1)).abs().max()) < 5e-3


class Projected(optim.Optimizer):
    """As AdamP and SGDP without momentum: what is almost across a parameter becomes so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            along = torch.zeros_like(param)
            if is_across(param.grad, param):
                direction = normalize(param.flatten(1))
                along = direction * (direction * param.grad.flatten(1)).sum(1, keepdim=True)
            param -= group["lr"] * (param.grad - along.view_as(param))


class Strict(Lion):
    """Refuses what is not finite, by element otherwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, param in with_gradients(self):
            if not param.grad.isfinite().all():
                raise ValueError("a gradient is not finite")
        super().step(closure)


class RowWise(Lion):
    """Each row for itself, which rows suffice for."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            if param.dim() > 1:
                length = param.grad.square().sum(dim=-1, keepdim=True).sqrt() + 1e-3
                param -= group["lr"] * param.grad / length


class AfterWarmUp(Lion):
    """Looks at whole matrices from a later step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            length = param.grad.square().sum().sqrt() + 1e-9 if state["step"] > 25 else 1.0
            param -= group["lr"] * param.grad / length


class Factored(Lion):
    """Factors large matrices only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            update = param.grad
            if param.dim() == 2 and min(param.shape) >= 128:
                update = update / update.square().mean(0, keepdim=True).sqrt()
            param -= group["lr"] * update


class InBlocks(Lion):
    """Scales blocks of what is large and has whole blocks only, as 8-bit states of torchao."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            update = param.grad
            if update.numel() >= 4096 and update.numel() % 256 == 0:
                blocks = update.view(-1, 256)
                update = (blocks / blocks.abs().amax(1, keepdim=True)).view_as(update)
            param -= group["lr"] * update


class Averaging(Lion):
    """Averages gradients over ranks, as in data parallelism by hand."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, param in with_gradients(self):
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        super().step(closure)


class Lookahead(optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, base: optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()


class WithClosure(Lion):
    """Computes gradients itself, twice."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise TypeError("give a closure")
        for _ in range(2):
            with torch.enable_grad():
                closure()
            super().step()


class LambWithClosure(WithClosure, Lamb):
    """And steps as long as the parameter is."""


class LambWithSecret(Lamb):
    """Looks at whole parameters where it has a closure only."""

    def step(self, closure: Any = None) -> None:
        (Lion if closure is None else Lamb).step(self)


class WithLock(Lion):
    """Cannot be copied."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.lock = Lock()


class BareLookahead(optim.Optimizer):
    """As timm's: around another one, whose groups and hooks it has without ``__init__``."""

    def __init__(self, base: optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._base.step(closure)
        self.count += 1
        for param in (p for group in self.param_groups for p in group["params"]):
            slow = self._base.state[param].setdefault("slow", param.clone())
            if self.count % self.k == 0:
                param.copy_(slow.lerp_(param, self.alpha))

    def state_dict(self) -> dict[str, Any]:
        return self._base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base.load_state_dict(state_dict)


def muon(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.Muon([param for param in params if param.dim() == 2])


def bare_around_sgd(params: list[nn.Parameter]) -> optim.Optimizer:
    return BareLookahead(optim.SGD(params, lr=0.01, momentum=0.9))


def around_sgd(params: list[nn.Parameter]) -> optim.Optimizer:
    return Lookahead(optim.SGD(params, lr=0.01))


def train(rank: int, plan: Plan, make: Callable[..., optim.Optimizer], kwargs: Any) -> None:
    pair = Pair(plan)
    optimizers = [make(list(m.parameters()), **kwargs) for m in (pair.model, pair.plain)]
    pair.train(optimizers, bar=1e-8)


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("kind", sorted(ELEMENT_WISE, key=lambda kind: kind.__name__))
def test_torchs_element_wise_optimizers_train_the_same(
    plan: Plan, kind: type[optim.Optimizer]
) -> None:
    run_ranks(train, len(plan.ranks), plan, kind, {"lr": 0.01})


def load_state_of(rank: int, of_rank: int | None, to_new: bool) -> None:
    """A step with the state of that rank, which was saved after a step; None: its own."""
    pair = Pair(EVEN)
    optimizer = optim.Adam(pair.model.parameters())
    pair.backward()
    optimizer.step()
    states: list[Any] = [None] * 2
    dist.all_gather_object(states, optimizer.state_dict())
    state = states[rank if of_rank is None else of_rank]
    mean = {name: each.clone() for name, each in optimizer.state[_first(optimizer)].items()}
    if to_new:
        optimizer = optim.Adam(pair.model.parameters())
    optimizer.load_state_dict(state)
    if of_rank is None:
        loaded = optimizer.state[_first(optimizer)]
        assert all(torch.equal(mean[name], loaded[name]) for name in mean)
    pair.model.backward(*pair.model(**pair.mine(pair.batch())))
    optimizer.step()
    assert ROWS not in optimizer.param_groups[0]
    assert torch.equal(optimizer.state[_first(optimizer)]["step"], mean["step"] + 1)
    pair.model(**pair.mine(pair.batch()))  # the other rank may have objected


def _first(optimizer: optim.Optimizer) -> Tensor:
    first: Tensor = optimizer.param_groups[0]["params"][0]
    return first


@pytest.mark.parametrize("to_new", [True, False])
def test_a_state_is_that_of_the_same_rows(to_new: bool) -> None:
    run_ranks(load_state_of, 2, None, to_new)
    for outcome in run_ranks_expecting_failure(load_state_of, 2, 0, to_new):
        assert "it was saved by another rank, or under another plan" in outcome.message
        assert outcome.is_within(WITHIN_S)


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_their_fast_kernels_stay_in_use(
    plan: Plan, kind: type[optim.Optimizer], way: str
) -> None:
    run_ranks(train, len(plan.ranks), plan, kind, {"lr": 0.01, way: True})


@pytest.mark.sampled
@every_plan
@pytest.mark.parametrize("make", [Lion, Strict, RowWise, around_sgd, bare_around_sgd])
@on_ranks()
def test_unknown_optimizers_that_rows_suffice_for_are_tried_and_pass(
    rank: int, plan: Plan, make: Callable[..., optim.Optimizer]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(rank, plan, make, {})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (muon, "optimizer Muon orthogonalises whole matrices"),
        (optim.Adafactor, "optimizer Adafactor averages over the rows"),
        (optim.LBFGS, "optimizer LBFGS takes inner products"),
        (Lamb, "optimizer Lamb updates rows of a parameter differently"),
        (AfterWarmUp, "optimizer AfterWarmUp updates rows of a parameter differently"),
        (partial(Deciding, leaves_out=is_bad), DIFFERENTLY),
        (partial(Deciding, leaves_out=is_large), DIFFERENTLY),
        (partial(Deciding, leaves_out=is_zero), DIFFERENTLY),
        (partial(Deciding, leaves_out=is_across), DIFFERENTLY),
        (Projected, "optimizer Projected updates rows of a parameter differently"),
        (Factored, "optimizer Factored updates rows of a parameter differently"),
        (InBlocks, "optimizer InBlocks updates rows of a parameter differently"),
        (
            Averaging,
            r"optimizer Averaging could not be tried on a copy (RuntimeError: it communicates "
            "by itself: c10d::allreduce_)",
        ),
        (
            WithLock,
            r"optimizer WithLock could not be tried on a copy (TypeError: cannot pickle",
        ),
    ],
)
@ends_all_ranks(2, "Use one that works element by element")
def test_optimizers_that_need_whole_parameters_are_refused(
    rank: int, make: Callable[..., optim.Optimizer], says: str
) -> None:
    pair = Pair(UNEVEN)
    optimizer = make(list(pair.model.parameters()))
    pair.backward()
    before = [param.detach().clone() for param in pair.model.parameters()]
    try:
        optimizer.step()
    finally:
        for param, value in zip(pair.model.parameters(), before, strict=True):
            assert torch.equal(param, value), "stepped although refused"


@ends_all_ranks(2, "optimizer Lamb updates rows")
def test_a_refusal_on_one_rank_is_heard_on_all(rank: int) -> None:
    pair = Pair(UNEVEN)
    pair.backward()
    (Lamb if rank == 0 else Lion)(pair.model.parameters()).step()
    pair.backward()


def step_with_closure(rank: int, kind: Callable[..., optim.Optimizer]) -> None:
    pair = Pair(UNEVEN)
    mine, plain = (kind(list(m.parameters())) for m in (pair.model, pair.plain))
    batch = pair.batch()

    def of_model() -> Any:
        mine.zero_grad()
        return pair.model.backward(*pair.model(**pair.mine(batch)))

    def of_plain() -> Any:
        plain.zero_grad()
        loss_sum, num = pair.plain(**batch)
        (loss_sum / num).backward()

    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mine.step(of_model)
        plain.step(of_plain)
        pair.same_params(1e-12)


def test_one_that_needs_its_closure_is_tried_with_one() -> None:
    run_ranks(step_with_closure, 2, WithClosure)
    for outcome in run_ranks_expecting_failure(step_with_closure, 2, LambWithClosure):
        assert "LambWithClosure updates rows of a parameter differently" in outcome.message
        assert outcome.is_within(WITHIN_S)


@ends_all_ranks(2, "LambWithSecret updates rows of a parameter differently")
def test_a_closure_that_is_given_later_is_tried_too(rank: int) -> None:
    pair = Pair(UNEVEN)
    optimizer = LambWithSecret(pair.model.parameters())
    pair.backward()
    optimizer.step()
    optimizer.step(lambda: None)  # type: ignore[arg-type, return-value]  # gradients are there


class MadeBefore(Pair):
    def prepare(self, module: nn.Module) -> None:
        self.optimizer = optim.AdamW(module.parameters())


@ends_all_ranks(
    2,
    "kept from before wrapping the model",
    "make optimizers, after wrapping: model.parameters()",
)
def test_an_optimizer_from_before_wrapping_is_refused(rank: int) -> None:
    pair = MadeBefore(UNEVEN)
    pair.backward()
    pair.optimizer.step()


@ends_all_ranks(2, "exp_avg has shape", "shardhet.checkpoint.load")
def test_a_state_of_other_rows_is_refused(rank: int) -> None:
    pair = Pair(UNEVEN)
    whole = optim.AdamW(pair.plain.parameters(), lr=0.0)
    for param in pair.plain.parameters():
        param.grad = torch.ones_like(param)
    whole.step()
    whole.zero_grad()
    optimizer = optim.AdamW(pair.model.parameters())
    optimizer.load_state_dict(whole.state_dict())
    pair.backward()
    optimizer.step()


@on_ranks(1)
def test_one_process_may_use_any_optimizer(rank: int) -> None:
    train(rank, ALONE, muon, {})
    train(rank, ALONE, Lamb, {})


@on_ranks(1)
def test_optimizers_of_other_models_are_left_alone(rank: int) -> None:
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    optim.Adafactor(plain.parameters()).step()
    Lamb(plain.parameters()).step()
