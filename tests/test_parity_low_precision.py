"""In low precision HetFSDP errs no more than plain PyTorch does under the same split.

The truth is the gradient of the same weights in float64.  Plain PyTorch runs the plan's
microbatches one after the other in one process and accumulates, in the low precision.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan, describe
from tests.parity import Batch, part_of, rows_of
from tests.selection import one_in
from tests.worlds import on_ranks, run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"param_dtype": torch.float16},
}
LOSS_SCALE = {"fp16": 2.0**12}
WIDTH = 16
SEQ_LEN = 9
NUM_WORDS = 31
ALLOWED_FACTOR = 3.0
FLOOR = 1e-12  # squared, relative: exact in both is no failure

PLANS = {
    "alone": Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[7], state_shares=[1.0]),
    "uneven": Plan.by_hand(
        microbatch_sizes=[2, 1],
        rank_batch_sizes=[5, 2],
        state_shares=[0.7, 0.3],
        recompute=[True, False],
    ),
    "apart": Plan.by_hand(
        microbatch_sizes=[3, 2, 0], rank_batch_sizes=[8, 3, 0], state_shares=[0.4, 0.0, 0.6]
    ),
    "ones": Plan.by_hand(
        microbatch_sizes=[1, 1, 1, 1],
        num_microbatches=[6, 1, 0, 3],
        state_shares=[0.0, 0.5, 0.2, 0.3],
        recompute=[False, True, False, ("blocks.*",)],
    ),
}
CASES = one_in(5, product(PLANS, ("float32", "bf16", "fp16", "autocast")))


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_BTD)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        x_BTD = x_BTD + scores.softmax(-1) @ v
        return x_BTD + self.down(F.gelu(self.up(x_BTD)))


class Head(nn.Module):
    """Norm, head and the loss in at least float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(self.norm(x_BTD)).flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss_sum = F.cross_entropy(logits, targets_BT.flatten(), reduction="sum")
        return loss_sum, (targets_BT != -100).sum()


class LanguageModel(nn.Module):
    """Embedding, three blocks, head with loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Head()

    def forward(self, words_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = self.embedding(words_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD, targets_BT)


def _batch(num_samples: int) -> Batch:
    words = torch.randint(0, NUM_WORDS, (num_samples, SEQ_LEN + 1))
    return {"words": words[:, :-1], "targets": words[:, 1:]}


def _whole_grads(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    loss_sum, num_tokens = model(*batch.values())
    (loss_sum / num_tokens).backward()
    return _grads(model)


def _split_grads(
    model: nn.Module,
    batch: Batch,
    plan: Plan,
    context: AbstractContextManager[Any],
    scale: float,
) -> dict[str, Tensor]:
    """Plain PyTorch, the plan's microbatches one after the other."""
    num_tokens = batch["targets"].numel()
    first = 0
    for size in (size for rank in plan.ranks for size in rank.microbatch_sizes):
        with context:
            loss_sum, _ = model(*(t[first : first + size] for t in batch.values()))
        (scale * loss_sum / num_tokens).backward()
        first += size
    return {fqn: grad.float() / scale for fqn, grad in _grads(model).items()}


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}


def _het_grads(
    model: HetFSDP,
    batch: Batch,
    plan: Plan,
    context: AbstractContextManager[Any],
    scale: float,
) -> dict[str, Tensor]:
    sizes = [rank.rank_batch_size for rank in plan.ranks]
    with context:
        loss_sum, num_tokens = model(*part_of(batch, sizes, model.position).values())
    model.backward(loss_sum if scale == 1 else scale * loss_sum, num_tokens)
    return {fqn: grad / scale for fqn, grad in _grads(model).items()}


def squared_errors(
    model: HetFSDP, grads: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, is_cut: bool
) -> dict[str, tuple[float, float]]:
    """Per unit, over the rows that this rank stores: squared error, squared truth."""
    sums: dict[str, tuple[float, float]] = {}
    for fqn, box in model.sharded_state_dict().items():
        unit = next((u for u in model.units if u and fqn.startswith(f"{u}.")), "")
        expected = rows_of(truth[fqn], box.rows)
        found = grads[fqn] if is_cut else rows_of(grads[fqn], box.rows)
        error, size = sums.get(unit, (0.0, 0.0))
        error += float((found.double() - expected).square().sum())
        sums[unit] = error, size + float(expected.square().sum())
    return sums


def _errors(
    rank: int, plan_name: str, precision: str
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """Squared errors of HetFSDP's gradients and of plain PyTorch's, on this rank's rows."""
    plan = PLANS[plan_name]
    torch.manual_seed(5)
    master = LanguageModel()
    truth_model = copy.deepcopy(master).double()
    batch = _batch(plan.global_batch_size)
    truth = _whole_grads(truth_model, batch)
    plain_model = copy.deepcopy(master)
    if precision in OPTIONS:
        plain_model = plain_model.to(OPTIONS[precision]["param_dtype"])
    scale = LOSS_SCALE.get(precision, 1.0)
    context: Any = _autocast() if precision == "autocast" else nullcontext()
    plain = _split_grads(plain_model, batch, plan, context, scale)
    model = HetFSDP(master, plan, **OPTIONS.get(precision, {}))
    context = _autocast() if precision == "autocast" else nullcontext()
    grads = _het_grads(model, batch, plan, context, scale)
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert grads.keys() == truth.keys()
    measure = partial(squared_errors, model, truth=truth)
    return measure(grads, is_cut=True), measure(plain, is_cut=False)


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("plan_name, precision", CASES)
def test_errs_no_more_than_plain_pytorch(plan_name: str, precision: str) -> None:
    by_rank = run_ranks(_errors, PLANS[plan_name].world_size, plan_name, precision)
    for unit in by_rank[0][0]:
        ours = sum(found[unit][0] for found, _ in by_rank)
        plain = sum(found[unit][0] for _, found in by_rank)
        size = sum(found[unit][1] for found, _ in by_rank)
        assert size > 0
        assert ours <= ALLOWED_FACTOR**2 * plain + FLOOR**2 * size, (
            f"unit {unit!r}: relative error {(ours / size) ** 0.5:.2e}, "
            f"plain {(plain / size) ** 0.5:.2e}"
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan_name, precision", CASES)
@on_ranks(lambda plan_name, **_: PLANS[plan_name].world_size)
def test_recomputation_gives_the_same_bits(rank: int, plan_name: str, precision: str) -> None:
    plan = PLANS[plan_name]
    torch.manual_seed(5)
    master = LanguageModel()
    batch = _batch(plan.global_batch_size)
    options, scale = OPTIONS.get(precision, {}), LOSS_SCALE.get(precision, 1.0)
    both = []
    for recompute in (False, True):
        as_claimed = Plan.by_hand(
            microbatch_sizes=[max(r.microbatch_sizes, default=0) for r in plan.ranks],
            rank_batch_sizes=[r.rank_batch_size for r in plan.ranks],
            state_shares=plan.state_shares,
            recompute=recompute,
        )
        model = HetFSDP(copy.deepcopy(master), as_claimed, **options)
        context: Any = _autocast() if precision == "autocast" else nullcontext()
        both.append(_het_grads(model, batch, as_claimed, context, scale))
    kept, recomputed = both
    assert kept.keys() == recomputed.keys()
    for fqn in kept:
        assert torch.equal(kept[fqn], recomputed[fqn]), fqn


class RootComputes(nn.Module):
    """Parameters that no unit has are the first to see the input."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.scale = nn.Conv2d(3, 4, 2), nn.Parameter(torch.ones(4))
        self.block, self.seen = nn.Linear(4, 4), list[torch.dtype]()

    def forward(self, image: Tensor, index: Tensor) -> tuple[Tensor, int]:
        self.seen += [image.dtype, index.dtype]
        x = self.block(self.patch(image).mean((2, 3)) * self.scale)
        return (x[:, 0] * index).float().square().sum(), len(x)


def test_arguments_of_the_model_are_cast_as_its_parameters_are() -> None:
    module, batch = RootComputes(), (torch.rand(2, 3, 4, 4), torch.arange(2))
    plain = copy.deepcopy(module).bfloat16()
    plan = Plan.even(1, microbatch_size=2)
    model = HetFSDP(module, plan, units=["block"], param_dtype=torch.bfloat16)
    mean = model.forward_backward(*batch)
    assert mean == plain(batch[0].bfloat16(), batch[1])[0].item() / 2
    assert {*module.seen} == {torch.bfloat16, torch.int64}
    described = describe(RootComputes(), batch, units=["block"], param_dtype=torch.bfloat16)
    assert described.param_dtype == "bfloat16"


@on_ranks(1)
def test_what_the_loss_is_compared_with_keeps_its_precision(rank: int) -> None:
    """Targets of a regression are not rounded to the dtype of the parameters in flight."""
    seen: list[torch.dtype] = []

    def loss_fn(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(targets.dtype)
        difference = output.float() - targets
        return difference.square().sum(), torch.tensor(len(targets))

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    plan = Plan.by_hand(microbatch_sizes=[2], num_microbatches=[2], state_shares=[1.0])
    model = HetFSDP(module, plan, param_dtype=torch.bfloat16, loss_fn=loss_fn)
    targets = torch.full((4, 1), 1000.5)
    loss = model.backward(*model(torch.zeros(4, 4), loss_inputs=targets))
    assert set(seen) == {torch.float32}  # in the probe too
    assert loss is not None
