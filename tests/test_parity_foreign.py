"""Models that know nothing of HetFSDP are trained as one process would train them."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan
from tests.parity import Batch, Course, Problem, Result, check_covered_once, check_parity
from tests.selection import one_in
from tests.worlds import run_ranks

NUM_CLASSES = 5
NUM_WORDS = 13
SEQ_LEN = 11  # no rank's batch has as many samples, so masks are not taken for batches

PLANS = {
    "alone": Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[5], state_shares=[1.0]),
    "uneven": Plan.by_hand(
        microbatch_sizes=[2, 1],
        rank_batch_sizes=[5, 2],
        state_shares=[0.7, 0.3],
        recompute=[True, False],
        reshard_after_forward=False,
    ),
    "apart": Plan.by_hand(  # one only computes, one only stores
        microbatch_sizes=[3, 2, 0], rank_batch_sizes=[4, 3, 0], state_shares=[0.4, 0.0, 0.6]
    ),
    "mixed": Plan.by_hand(
        microbatch_sizes=[3, 0, 1, 2],
        rank_batch_sizes=[4, 0, 2, 3],
        state_shares=[0.0, 0.5, 0.2, 0.3],
        recompute=[True, False, False, True],
    ),
}


def _problem(
    make_module: Callable[[], nn.Module],
    make_inputs: Callable[[int], Tensor],
    *,
    num_targets: int | None = None,  # per sample; None is one class for all of it
    takes_loss_fn: bool = False,
    **options: Any,
) -> Problem:
    """Classification of samples or of tokens, with the loss outside or as ``loss_fn``."""

    def make_batch(num_samples: int) -> Batch:
        size = (num_samples,) if num_targets is None else (num_samples, num_targets)
        targets = torch.randint(0, NUM_CLASSES, size)
        return {"inputs": make_inputs(num_samples), "targets": targets}

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | int]:
        if takes_loss_fn and isinstance(model, HetFSDP):
            return model(batch["inputs"], loss_inputs=batch["targets"])
        return _summed_loss(model(batch["inputs"]), batch["targets"])

    if takes_loss_fn:
        options["loss_fn"] = _summed_loss
    return Problem(
        make_module=lambda: make_module().double(),
        make_batch=make_batch,
        loss=loss,
        options=options,
    )


def _summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    targets = targets.reshape(-1)
    loss_sum = F.cross_entropy(logits.reshape(-1, NUM_CLASSES), targets, reduction="sum")
    return loss_sum, torch.tensor(targets.numel())


def _words(num_samples: int) -> Tensor:
    return torch.randint(0, NUM_WORDS, (num_samples, SEQ_LEN))


def _images(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 3, 9, 9, dtype=torch.float64)


class EncoderModel(nn.Module):
    """``nn.TransformerEncoder`` with a causal mask between an embedding and a head."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 12)
        layer = nn.TransformerEncoderLayer(
            12, 3, 20, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(12, NUM_CLASSES)

    def forward(self, words_BT: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ_LEN, dtype=torch.float64)
        x_BTD = self.encoder(self.embedding(words_BT), mask=mask, is_causal=True)
        return self.head(x_BTD)


def _mlp() -> nn.Module:
    blocks = [
        nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 6))
        for _ in range(3)
    ]
    head = nn.Linear(6 * SEQ_LEN, NUM_CLASSES)
    return nn.Sequential(
        nn.Embedding(NUM_WORDS, 6), *blocks, nn.LayerNorm(6), nn.Flatten(), head
    )


def _conv_net() -> nn.Module:
    def stage(num_in: int, num_out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(2, num_out), nn.ReLU()
        )

    return nn.Sequential(
        stage(3, 8),
        nn.MaxPool2d(2),
        stage(8, 8),
        stage(8, 10),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, NUM_CLASSES),
    )


class Recurrent(nn.Module):
    """A recurrent layer without its last state, which has no batch in dim 0."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.layer(x_BTD)[0]


class RecurrentModel(nn.Module):
    """Embedding, recurrent layers, head on the last token."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 7)
        self.layers = nn.Sequential(
            Recurrent(kind(7, 6, batch_first=True, bidirectional=True)),
            Recurrent(kind(12, 5, num_layers=2, batch_first=True)),
        )
        self.head = nn.Linear(5, NUM_CLASSES)

    def forward(self, words_BT: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(words_BT))[:, -1])


_post_norm_encoder = partial(EncoderModel, norm_first=False)
_pre_norm_encoder = partial(EncoderModel, norm_first=True)
_gru, _lstm = partial(RecurrentModel, nn.GRU), partial(RecurrentModel, nn.LSTM)
LAYER = nn.TransformerEncoderLayer
PROBLEMS: dict[str, Problem] = {
    "encoder": _problem(_post_norm_encoder, _words, num_targets=SEQ_LEN),
    "encoder, layers": _problem(_pre_norm_encoder, _words, num_targets=SEQ_LEN, units=(LAYER,)),
    "encoder, loss_fn": _problem(
        _pre_norm_encoder, _words, num_targets=SEQ_LEN, takes_loss_fn=True
    ),
    "mlp": _problem(_mlp, _words),
    "mlp, loss_fn": _problem(_mlp, _words, takes_loss_fn=True),
    "mlp, linear": _problem(_mlp, _words, units=(nn.Linear,), takes_loss_fn=True),
    "conv": _problem(_conv_net, _images),
    "conv, by name": _problem(_conv_net, _images, units=("0", "2.0", "6"), takes_loss_fn=True),
    "gru": _problem(_gru, _words),
    "gru, layers": _problem(_gru, _words, units=(Recurrent,)),
    "lstm, loss_fn": _problem(_lstm, _words, takes_loss_fn=True),
}


def _train(rank: int, name: str, plan_name: str, optimizer: str) -> Result:
    plan = PLANS[plan_name]
    course = Course.of(plan, optimizer=optimizer, clip_at=0.5)
    return check_parity(rank, PROBLEMS[name], plan, course)


@pytest.mark.parametrize("name, plan_name", one_in(14, product(PROBLEMS, PLANS)))
def test_a_step_is_the_step_of_one_process(name: str, plan_name: str) -> None:
    for optimizer in ("sgd", "adamw"):
        results = run_ranks(_train, PLANS[plan_name].world_size, name, plan_name, optimizer)
        check_covered_once(results)
