"""Models that look both ways: shapes, what they look at, and exactness under uneven plans."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardhet import HetFSDP, Plan
from shardhet.models.encoder import EncoderConfig, MaskedLm, Vit
from shardhet.training.data import Batch, TokenBatch, deal
from shardhet.training.samples import ImageBatch, masked
from tests.worlds import run_ranks

SHAPE = EncoderConfig(width=8, num_layers=2, num_heads=2, hidden_width=16)
GENERATOR = np.random.Generator(np.random.Philox(key=3))
TOKENS = GENERATOR.integers(0, 256, (6, 5))
BATCHES: dict[str, Batch] = {
    "masked_lm": masked(
        TokenBatch(tokens=TOKENS, targets=TOKENS), fraction=0.4, seed=0, step=0
    ),
    "vit": ImageBatch(
        images=GENERATOR.random((6, 8, 8)).astype(np.float32),
        labels=GENERATOR.integers(0, 10, 6),
    ),
}
PLAN = Plan.by_hand(
    microbatch_sizes=[2, 0, 1],
    rank_batch_sizes=[5, 0, 1],
    state_shares=[0.2, 0.8, 0],
    recompute=[True, False, False],
)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "vit":
        return Vit(SHAPE, image_side=8, patch_side=2, num_classes=10).double()
    return MaskedLm(SHAPE, vocab_size=257, seq_len=5).double()


def step_rank(rank: int, name: str) -> Any:
    model = HetFSDP(build(name), PLAN)
    mine = deal(BATCHES[name], PLAN, model.position)
    outputs = model(*map(torch.from_numpy, mine.arrays))
    loss = model.backward(*outputs[:2])
    norm = model.clip_grad_norm_(1e9)
    return loss, float(norm), [float(output) for output in outputs[2:]]


@pytest.mark.parametrize("name", BATCHES)
def test_a_step_is_that_of_one_process(name: str) -> None:
    module = build(name)
    loss_sum, num_targets, *rest = module(*map(torch.from_numpy, BATCHES[name].arrays))
    assert int(num_targets) == BATCHES[name].num_targets
    mean_loss = loss_sum / num_targets
    mean_loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    results = run_ranks(step_rank, 3, name)
    for loss, rank_norm, _ in results:
        assert loss == pytest.approx(mean_loss.item(), rel=1e-12)
        assert rank_norm == pytest.approx(float(norm), rel=1e-10)
    if rest:
        assert sum(sum(counts) for *_, counts in results) == int(rest[0])


def test_a_masked_place_is_predicted_from_both_sides() -> None:
    module = build("masked_lm")
    tokens = torch.from_numpy(TOKENS)
    hidden = torch.full_like(tokens, -1)
    hidden[:, 2] = tokens[:, 2]
    losses = [module(changed(tokens, place), hidden)[0].item() for place in (None, 0, 4)]
    assert len(set(losses)) == 3


def changed(tokens: torch.Tensor, place: int | None) -> torch.Tensor:
    other = tokens.clone()
    if place is not None:
        other[:, place] = 7
    return other


def test_patches_must_divide_the_image() -> None:
    with pytest.raises(ValueError, match="patch_side: 3 but it must divide the images' 8"):
        Vit(SHAPE, image_side=8, patch_side=3, num_classes=10)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width: 8 but it must be a multiple of num_heads 3"):
        EncoderConfig(width=8, num_layers=1, num_heads=3, hidden_width=8)
