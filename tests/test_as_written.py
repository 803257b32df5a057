"""Programs of others that look like any other and were once computed wrongly, or not at all."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from tests.test_probe import WIDTH, Net, check, compare_grads, draw, plan_for, squared
from tests.worlds import run_ranks, run_ranks_expecting_failure

ALONE = plan_for(recomputes=False)
WITHOUT_SAMPLES = Plan.by_hand(
    microbatch_sizes=[2, 1, 0], rank_batch_sizes=[3, 2, 0], state_shares=[0.5, 0.2, 0.3]
)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


# Attributes that the program sets


class Scaled(Net):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_an_attribute_that_is_set_is_the_models() -> None:
    reference = Scaled(linear)
    model = HetFSDP(copy.deepcopy(reference), ALONE, units=["units.0", "units.1"])
    for scale in (2.0, 0.5):
        x = draw(5, WIDTH)
        reference.scale = model.scale = scale
        assert model.scale == model.module.scale == scale
        reference.zero_grad()
        model.zero_grad()
        (squared(reference, x) / 5).backward()
        model.backward(squared(model, x), 5)
        compare_grads(model, reference)
    del model.scale
    assert model.scale == 1.0
    model.training = True  # HetFSDP's own
    for name, value in (("head", linear()), ("weight", nn.Parameter(torch.ones(1)))):
        with pytest.raises(RuntimeError, match=f"{name!r} is a parameter.*before wrapping"):
            setattr(model, name, value)


# What a forward does once


class HooksItself(Net):
    """Collects what its units return, with hooks that it adds when it is first called."""

    is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        self.kept: list[Tensor] = []
        if not self.is_hooked:
            self.is_hooked = True
            for unit in self.units:
                unit.register_forward_hook(lambda *call: self.kept.append(call[2]))
        x = super().forward(x)
        states, self.kept = self.kept, []
        return torch.cat([x.square(), *(state.square() for state in states)], -1)


def test_hooks_that_the_first_forward_adds_are_there_once() -> None:
    check(
        ALONE,
        HooksItself(linear),
        [draw(5, WIDTH) for _ in range(2)],
        lambda model, x: model(x).sum(),
        units=["units.0", "units.1"],
    )


class Packs(Net):
    """Keeps packed sequences apart, as positions tell, but not if it is to keep a cache."""

    def __init__(self, *, use_cache: bool) -> None:
        super().__init__(linear)
        self.config = SimpleNamespace(use_cache=use_cache)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().forward(x)
        if positions is None or self.config.use_cache:
            return x.cumsum(1)
        begins = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
        same = begins[:, :, None] == begins[:, None, :]
        return (same.to(x.dtype).tril()) @ x


def test_a_cache_that_changes_the_result_is_refused() -> None:
    x, positions = draw(5, 4, WIDTH), torch.arange(4).repeat(5, 1)
    units = ["units.0", "units.1"]
    with pytest.raises(ValueError, match=r"use_cache = False before wrapping"):
        HetFSDP(Packs(use_cache=True), ALONE, units=units)(x, positions)
    HetFSDP(Packs(use_cache=True), ALONE, units=units)(x)
    check(ALONE, Packs(use_cache=False), [x], lambda m, x: squared(m, x), units=units)


class Normalised(Net):
    """The last layer's outputs are normalised over the samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x / x.norm(dim=0)


def test_an_output_that_mixes_samples_is_refused() -> None:
    model = HetFSDP(Normalised(linear), ALONE, units=["units.0", "units.1"])
    with pytest.raises(ValueError, match=r"output 0.*depends for one sample on the other"):
        model(draw(5, WIDTH))


# A rank without samples


class ConvNet(nn.Module):
    """A small ResNet: reshapes, pools, and has batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(2)
        )
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, pixels: Tensor, labels: Tensor | None = None, **extra: Any) -> Any:
        x = self.stem(pixels)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x.mean((2, 3)).view(x.shape[0], -1))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), logits


def _empty_rows(rank: int, kind: str) -> float | None:
    torch.manual_seed(0)
    model = HetFSDP(ConvNet(), WITHOUT_SAMPLES, batch_dim={"table": None})
    n = WITHOUT_SAMPLES.ranks[model.position].rank_batch_size
    means = []
    for _ in range(2):
        x, y = draw(n, 3, 6, 6), torch.randint(3, (n,))
        table = draw(4, 2)
        if kind == "positional":
            loss = model(x, y)[0]
        elif kind == "keywords":
            loss = model(pixels=x, labels=y, masks={"a": draw(n, 1), "b": (draw(n, 2),)})[0]
        elif kind == "a table first":
            loss = model(table=table, labels=y, pixels=x)[0]
        else:
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        means.append(model.backward(loss, n))
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    return means[-1]


@pytest.mark.parametrize("kind", ["positional", "keywords", "a table first", "loss outside"])
def test_rows_of_length_zero_are_no_samples(kind: str) -> None:
    means = run_ranks(_empty_rows, 3, kind)
    assert means[0] == means[1] == means[2]
    assert means[0] is not None


def _half_empty(rank: int) -> None:
    model = HetFSDP(ConvNet(), WITHOUT_SAMPLES)
    n = WITHOUT_SAMPLES.ranks[model.position].rank_batch_size
    model(draw(n, 3, 6, 6), torch.zeros(0 if rank == 1 else n, dtype=torch.long))


def test_some_arguments_without_rows_are_refused() -> None:
    for outcome in run_ranks_expecting_failure(_half_empty, 3):
        assert "'labels' has no rows but 'pixels' has 2" in outcome.message


# What has no rows, or no gradient


def test_complex_parameters_are_refused_by_name() -> None:
    module = nn.Sequential(linear(), linear())
    module.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match=r"phase: it is torch.complex64.*view_as_real"):
        HetFSDP(module, ALONE, units=[nn.Linear])


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=sparse)
        self.head = linear()
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words)).square().sum()


@pytest.mark.parametrize("recomputes", [False, True])
def test_sparse_gradients_are_the_dense_ones(recomputes: bool) -> None:
    torch.manual_seed(0)
    reference = Words(sparse=False)
    module = Words(sparse=True)
    module.load_state_dict(reference.state_dict())
    model = HetFSDP(module, plan_for(recomputes), units=["table", "head"])
    words = torch.randint(7, (5, 3))
    (reference(words) / 5).backward()
    model.backward(model(words), 5)
    compare_grads(model, reference)


def test_nested_tensors_are_refused() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    model = HetFSDP(nn.TransformerEncoder(layer, 2), ALONE)
    padding = torch.tensor([False, False, True]).repeat(5, 1)
    model.eval()
    with torch.no_grad(), pytest.raises(ValueError, match="enable_nested_tensor=False"):
        model(torch.randn(5, 3, WIDTH), src_key_padding_mask=padding)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda loss: SimpleNamespace(loss=loss), TypeError, "Pass output.loss"),
        (lambda loss: {"loss": loss}, TypeError, "Pass output.loss"),
        (lambda loss: (loss, loss), TypeError, "is a tuple but must be a tensor"),
        (lambda loss: loss[None], ValueError, r"has shape \(1,\).*Call .sum\(\)"),
    ],
)
def test_a_loss_is_one_number(make: Any, error: type[Exception], words: str) -> None:
    model = HetFSDP(Net(linear), ALONE)
    with pytest.raises(error, match=words):
        model.backward(make(squared(model, draw(5, WIDTH))), 5)


def test_what_a_model_without_samples_and_a_gradient_penalty_are_told() -> None:
    model = HetFSDP(Net(linear), ALONE)
    with pytest.raises(RuntimeError, match="no rank has given the model samples"):
        model.backward(model()[0], 1)
    model = HetFSDP(Net(linear), ALONE)
    x = draw(5, WIDTH).requires_grad_()
    with pytest.raises(RuntimeError, match=r"gradients of gradients.*gradient penalty"):
        torch.autograd.grad(squared(model, x), x, create_graph=True)
