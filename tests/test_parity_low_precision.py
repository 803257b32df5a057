"""In low precision HetFSDP errs no more than plain PyTorch does under the same split.

The truth is the gradient of the same weights in float64.  Plain PyTorch runs the plan's
microbatches one after the other in one process and accumulates, in the low precision.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan, describe
from shardhet.models.decoder import Decoder
from tests.parity import Batch, part_of, rows_of
from tests.selection import one_in
from tests.small_models import small_decoder
from tests.worlds import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"param_dtype": torch.float16},
}
LOSS_SCALE = {"fp16": 2.0**12}
WIDTH = 16
SEQ_LEN = 9
NUM_WORDS = 31
ALLOWED_FACTOR = 3.0

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


LANGUAGE = small_decoder(vocab_size=NUM_WORDS, width=WIDTH, num_layers=3, seq_len=SEQ_LEN)


def make_batch(num_samples: int) -> Batch:
    words = torch.randint(0, NUM_WORDS, (num_samples, SEQ_LEN + 1))
    return {"words": words[:, :-1], "targets": words[:, 1:].clone()}


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}


def _whole_grads(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    loss_sum, num_tokens = model(*batch.values())
    (loss_sum / num_tokens).backward()
    return _grads(model)


def _split_grads(
    model: nn.Module, batch: Batch, plan: Plan, sizes: Sequence[int], precision: str
) -> dict[str, Tensor]:
    """Plain PyTorch in the low precision, the plan's microbatches one after the other."""
    model.to(OPTIONS.get(precision, {}).get("param_dtype", torch.float32))
    scale, num_tokens = LOSS_SCALE.get(precision, 1.0), int((batch["targets"] != -100).sum())
    first = 0
    for rank, size in zip(plan.ranks * plan.num_rounds, sizes, strict=True):
        for microbatch in rank.split(size) if size else ():
            with _context(precision):
                loss_sum, _ = model(*(t[first : first + microbatch] for t in batch.values()))
            (scale * loss_sum / num_tokens).backward()
            first += microbatch
    return {fqn: grad.float() / scale for fqn, grad in _grads(model).items()}


def _het_grads(
    model: HetFSDP, batch: Batch, sizes: Sequence[int], precision: str
) -> tuple[float | None, dict[str, Tensor]]:
    scale = LOSS_SCALE.get(precision, 1.0)
    for place in range(model.position, len(sizes), model.plan.world_size):
        with _context(precision):
            loss_sum, num_tokens = model(*part_of(batch, sizes, place).values())
        mean = model.backward(loss_sum if scale == 1 else scale * loss_sum, num_tokens)
    return mean, {fqn: grad / scale for fqn, grad in _grads(model).items()}


def _context(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")


def squared_errors(
    model: HetFSDP, grads: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, is_cut: bool
) -> "Errors":
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


Errors = dict[str, tuple[float, float]]


def compared(
    master: nn.Module,
    plan: Plan,
    sizes: Sequence[int],
    batch: Batch,
    precision: str,
    **how: Any,
) -> tuple[list[Tensor], Errors, Errors]:
    """Loss and gradients of HetFSDP, whose samples are ``sizes`` by round and position; the
    squared errors of its gradients and of plain PyTorch's, on this rank's rows.
    """
    truth = _whole_grads(copy.deepcopy(master).double(), batch)
    plain = _split_grads(copy.deepcopy(master), batch, plan, sizes, precision)
    model = HetFSDP(master, plan, **OPTIONS.get(precision, {}), **how)
    mean, grads = _het_grads(model, batch, sizes, precision)
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert grads.keys() == truth.keys()
    measure = partial(squared_errors, model, truth=truth)
    bits = [torch.tensor(mean), *grads.values()]
    return bits, measure(grads, is_cut=True), measure(plain, is_cut=False)


def _sizes(plan: Plan) -> list[int]:
    return [rank.rank_batch_size for rank in plan.ranks]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan_name, precision", CASES)
@on_ranks(lambda plan_name, **_: PLANS[plan_name].world_size)
def test_recomputation_gives_the_same_bits(rank: int, plan_name: str, precision: str) -> None:
    plan = PLANS[plan_name]
    torch.manual_seed(5)
    master = Decoder(LANGUAGE)
    batch = make_batch(plan.global_batch_size)
    both = []
    for recompute in (False, True):
        as_claimed = Plan.by_hand(
            microbatch_sizes=[max(r.microbatch_sizes, default=0) for r in plan.ranks],
            rank_batch_sizes=_sizes(plan),
            state_shares=plan.state_shares,
            recompute=recompute,
        )
        model = HetFSDP(copy.deepcopy(master), as_claimed, **OPTIONS.get(precision, {}))
        both.append(_het_grads(model, batch, _sizes(as_claimed), precision)[1])
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
