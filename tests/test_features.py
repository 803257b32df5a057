"""Losses that compare samples of all ranks, and models that compare those of one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardhet
from shardhet import HetFSDP, Plan
from tests.parity import compare_grads
from tests.worlds import ends_all_ranks, on_ranks, run_ranks, run_ranks_expecting_failure

PLAN = Plan.by_hand(
    microbatch_sizes=[2, 1, 0], rank_batch_sizes=[3, 2, 0], state_shares=[0.5, 0.2, 0.3]
)
WIDTH = 4


class Towers(nn.Module):
    """Two towers; gives features, or their products with each other."""

    def __init__(self, *, gives_pairs: bool = False) -> None:
        super().__init__()
        self.image, self.text = (nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.gives_pairs = gives_pairs
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        image, text = (
            F.normalize(tower(each).tanh(), dim=-1)
            for tower, each in ((self.image, x), (self.text, y))
        )
        return self.scale * image @ text.T if self.gives_pairs else (self.scale * image, text)


def contrastive(
    images: Tensor, texts: Tensor, own: range, all_images: Tensor, all_texts: Tensor
) -> Tensor:
    """The terms of the samples ``own``, of both directions."""
    targets = torch.arange(own.start, own.stop)
    one = F.cross_entropy(images @ all_texts.T, targets, reduction="sum")
    return one + F.cross_entropy(texts @ all_images.T, targets, reduction="sum")


@on_ranks(3)
def test_a_contrastive_loss_is_that_of_one_process(rank: int) -> None:
    torch.manual_seed(0)
    reference = Towers()
    model = HetFSDP(copy.deepcopy(reference), PLAN, units=["image", "text"])
    for _ in range(2):
        x, y = torch.randn(2, 5, WIDTH, dtype=torch.float64)
        images, texts = reference(x, y)
        reference.zero_grad()
        model.zero_grad()
        expected = contrastive(images, texts, range(5), images, texts) / 5
        expected.backward()
        first = PLAN.first_sample(model.position)
        mine = slice(first, first + PLAN.ranks[model.position].rank_batch_size)
        image, text = model(x[mine], y[mine])
        assert list(model.own_samples) == list(range(5))[mine]
        all_images, all_texts = map(shardhet.gather_features, (image, text))
        unused = shardhet.gather_features(image)  # no rank's loss depends on it
        assert torch.equal(unused, all_images)
        torch.testing.assert_close(all_texts, texts, rtol=1e-12, atol=0)
        loss_sum = contrastive(image, text, model.own_samples, all_images, all_texts)
        mean = model.backward(loss_sum, len(image))
        assert mean == pytest.approx(float(expected.detach()), rel=1e-12)
        compare_grads(model, reference)
        model.eval()
        with torch.no_grad():
            assert len(shardhet.gather_features(model(x[mine], y[mine])[0])) == 5
        model.train()


def _pairs(rank: int, world_size: int) -> Any:
    plan = (
        PLAN
        if world_size > 1
        else Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[5], state_shares=[1.0])
    )
    model = HetFSDP(Towers(gives_pairs=True), plan, units=["image", "text"])
    x = torch.randn(plan.ranks[model.position].rank_batch_size, WIDTH, dtype=torch.float64)
    return tuple(model(x, x).shape)


def test_a_model_that_compares_a_ranks_samples_is_refused_unless_one_rank_has_all() -> None:
    for outcome in run_ranks_expecting_failure(_pairs, 3, 3):
        assert "gather_features" in outcome.message
    assert run_ranks(_pairs, 1, 1) == [(5, 5)]


@ends_all_ranks(3, "between model(...) and model.backward")
def test_gathering_inside_of_a_model_is_refused(rank: int) -> None:
    class Inside(Towers):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return shardhet.gather_features(super().forward(x, y)[0])

    model = HetFSDP(Inside(), PLAN, units=["image", "text"])
    x = torch.randn(PLAN.ranks[model.position].rank_batch_size, WIDTH, dtype=torch.float64)
    model(x, x)


@ends_all_ranks(2, "the plan has several rounds")
def test_features_of_one_round_are_not_those_of_the_batch(rank: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[2, 1], num_rounds=2)
    model = HetFSDP(Towers(), plan, units=["image", "text"])
    x = torch.randn(plan.ranks[model.position].rank_batch_size, WIDTH, dtype=torch.float64)
    features = model(x, x)[0]
    with torch.no_grad():
        assert len(shardhet.gather_features(features)) == 3
    shardhet.gather_features(features)


def _whole_loss_on_every_rank(rank: int, counts_everywhere: bool) -> None:
    torch.manual_seed(0)
    reference = Towers()
    model = HetFSDP(copy.deepcopy(reference), PLAN, units=["image", "text"])
    x, y = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    images, texts = reference(x, y)
    (contrastive(images, texts, range(5), images, texts) / 5).backward()
    first = PLAN.first_sample(model.position)
    mine = slice(first, first + PLAN.ranks[model.position].rank_batch_size)
    features = model(x[mine], y[mine])
    images, texts = map(shardhet.gather_features, features)
    mean = contrastive(images, texts, range(5), images, texts) / 5
    number = 1 if counts_everywhere else len(features[0])
    model.backward(mean * number, number)
    compare_grads(model, reference)


def test_a_rank_may_compute_the_mean_over_all_but_counts_its_own_samples() -> None:
    run_ranks(_whole_loss_on_every_rank, 3, False)
    for outcome in run_ranks_expecting_failure(_whole_loss_on_every_rank, 3, True):
        assert "has no samples, so its loss does not count" in outcome.message


@ends_all_ranks(3, "rows of shapes ((4,), (3,), (4,))")
def test_features_of_other_shapes_are_refused_on_every_rank(rank: int) -> None:
    model = HetFSDP(Towers(), PLAN, units=["image", "text"])
    x = torch.randn(PLAN.ranks[model.position].rank_batch_size, WIDTH, dtype=torch.float64)
    features = model(x, x)[0]
    shardhet.gather_features(features[:, rank:] if rank == 1 else features)
