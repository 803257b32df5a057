"""Programs of others that look like any other and were once computed wrongly, or not at all."""

import copy
import warnings
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardhet import HetFSDP, Plan
from shardhet.fsdp.microbatch.caches import tell_of_caches
from tests.selection import one_in
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


class Frozen(dict[str, Any]):
    """A configuration that cannot be written, nor copied, as those of some libraries."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError("a configuration is frozen")

    __setitem__ = __delitem__ = clear = update = pop = setdefault = __reduce_ex__ = _refuse

    def __deepcopy__(self, _memo: Any) -> "Frozen":
        return self


class Configured(Net):
    """Reads a frozen configuration, and notes in ordinary containers what it has called."""

    def __init__(self) -> None:
        super().__init__(linear)
        self.config = Frozen(scale=0.5)
        self.called: dict[int, int] = {}
        for unit in self.units:
            unit.config = self.config

    def forward(self, x: Tensor) -> Tensor:
        self.called[len(self.called)] = len(x)
        return super().forward(x) * self.config["scale"]


def test_a_frozen_configuration_is_never_written() -> None:
    recomputes = plan_for(recomputes=True)
    samples = [draw(5, WIDTH) for _ in range(2)]
    for plan in (ALONE, recomputes):
        model = check(plan, Configured(), samples, squared, units=["units.0", "units.1"])
        assert model.module.called == {0: 5, 1: 5}
        assert model.module.config == {"scale": 0.5}


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


class Marks(Net):
    """Reads its argument once more after a unit has had it; a part asks for a cache."""

    def __init__(self, part: Any) -> None:
        super().__init__(linear)
        self.config = SimpleNamespace(text_config=part)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(x[:, :1] == 0, 0.0)


@dataclass(frozen=True)
class Fixed:
    use_cache: bool = True


def test_caches_that_change_nothing_are_off_and_said_to_be_so(caplog: Any) -> None:
    units, samples = ["units.0", "units.1"], [draw(5, WIDTH) for _ in range(2)]
    tell_of_caches.cache_clear()
    for _ in range(2):
        model = check(
            ALONE, Marks(SimpleNamespace(use_cache=True)), samples, squared, units=units
        )
        assert model.module.config.text_config.use_cache
    assert len([each for each in caplog.records if "without KV caches" in each.message]) == 1
    with pytest.raises(ValueError, match=r"Fixed.use_cache is True and cannot be set"):
        HetFSDP(Marks(Fixed()), ALONE, units=units)
    HetFSDP(Marks(Fixed(use_cache=False)), ALONE, units=units)(samples[0])


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


class Gives(Net):
    """Returns something around its last layer's outputs."""

    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__(linear)
        self.give = give

    def forward(self, x: Tensor) -> Any:
        return self.give(super().forward(x))


def _local(logits: Tensor) -> Any:
    @dataclass
    class Local:
        logits: Tensor

    return Local(logits)


GIVEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], str]] = {
    "object": (
        lambda logits: torch.distributions.Categorical(logits=logits),
        lambda out: out.logits.square().sum(),
        "returns a Categorical, which cannot be made without",
    ),
    "local": (_local, lambda out: out.logits.sum(), "returns a Local, which cannot be made"),
    "unpacked": (
        lambda logits: namedtuple("Pair", "logits")(logits),
        lambda out: out[0].sum(),
        "returns a Pair, which cannot be made",
    ),
}


def _gives(rank: int, kind: str) -> None:
    give, loss_of, words = GIVEN[kind]
    model = HetFSDP(Gives(give), WITHOUT_SAMPLES, units=["units.0", "units.1"])
    size = WITHOUT_SAMPLES.ranks[model.position].rank_batch_size
    output = model(draw(size, WIDTH))
    with nullcontext() if size else pytest.raises(AttributeError, match=words):
        loss_of(output)


@pytest.mark.parametrize("kind", GIVEN)
def test_an_output_that_cannot_be_made_without_samples_is_named(kind: str) -> None:
    run_ranks(_gives, 3, kind)


def test_an_output_without_samples_may_hold_an_object_and_needs_gradients() -> None:
    run_ranks(_gives_both, 3)


def _gives_both(rank: int) -> None:
    def give(logits: Tensor) -> Any:
        return {"of": torch.distributions.Categorical(logits=logits), "loss": logits.sum()}

    model = HetFSDP(Gives(give), WITHOUT_SAMPLES, units=["units.0", "units.1"])
    size = WITHOUT_SAMPLES.ranks[model.position].rank_batch_size
    for _ in range(2):
        loss = model(draw(size, WIDTH))["loss"]
        assert loss.requires_grad
        model.backward(loss, size)


@pytest.mark.parametrize(
    "kind", one_in(4, ["keywords", "positional", "loss outside", "a table first"])
)
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


# What other libraries would take, and was once refused


class Block(nn.Module):
    """Adds to its input; counts its calls, and computes with the count if ``scales``."""

    def __init__(self, *, scales: bool = False) -> None:
        super().__init__()
        self.linear, self.count, self.scales = linear(), 0, scales

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.linear(x).tanh() * (self.count if self.scales else 1)


class Reads(nn.Module):
    """Multiplies with a parameter of another module."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear, self.others = linear(), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.others[0].weight.sum(-1)


class TiedByProduct(nn.Module):
    """Scores words by products with their embeddings."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.uses_second = True
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks[0](self.table(words))
        if self.uses_second:
            x = self.blocks[1](x)
        return x @ self.table.weight.T


class TakesOther(TiedByProduct):
    """A unit reads the parameter of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Reads(self.blocks[0].linear).double()


class Scaling(nn.Module):
    """A unit reads a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(7, WIDTH), nn.Parameter(torch.rand(WIDTH, 2))
        self.blocks = nn.ModuleList([Reads(self), Block()])
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.table(words)))


TAKEN = {
    "tied by a product": TiedByProduct,
    "another unit's parameter": TakesOther,
    "the root's parameter": Scaling,
}


def _takes_what_others_take(rank: int, plan: Plan, kind: str) -> None:
    torch.manual_seed(0)
    reference = TAKEN[kind]()
    units = ["table", "blocks.0", "blocks.1"]
    model = HetFSDP(copy.deepcopy(reference), plan, units=units)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    first = plan.first_sample(model.position)
    for step in range(3):
        words = torch.randint(7, (5, 3))
        reference.uses_second = model.uses_second = step != 1
        own = words[first : first + plan.ranks[model.position].rank_batch_size]
        (squared(reference, words) / 5).backward()
        model.backward(squared(model, own), len(own))
        compare_grads(model, reference)
        counts = [[block.__dict__.get("count") for block in each.blocks] for each in (
            model.module, reference)]  # fmt: skip
        assert counts[0] == counts[1]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(own), reference(own), rtol=1e-9, atol=1e-9)
    with model.unit_by_unit():
        found = model.module(words)
    with torch.no_grad():
        torch.testing.assert_close(found, reference(words), rtol=1e-9, atol=1e-9)


STAYS = pytest.warns(UserWarning, match="stay unsharded for the whole step")


@pytest.mark.parametrize("kind", TAKEN)
def test_what_others_take_is_exact(kind: str) -> None:
    run_ranks(_takes_what_others_take, 3, WITHOUT_SAMPLES, kind)
    with STAYS if kind != "the root's parameter" else nullcontext():
        _takes_what_others_take(0, plan_for(recomputes=True), kind)


def _reads_rows_of_a_unit(rank: int) -> None:
    model = HetFSDP(TiedByProduct(), WITHOUT_SAMPLES, units=["table", "blocks.0", "blocks.1"])
    with model.unit_by_unit():
        model.module(torch.zeros(1, 1, dtype=torch.long))


def test_rows_of_a_unit_are_not_read_unit_by_unit() -> None:
    for outcome in run_ranks_expecting_failure(_reads_rows_of_a_unit, 3):
        assert "table.weight is used inside unit_by_unit() while" in outcome.message


class CountsSamples(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        return self.linear(x)


@pytest.mark.parametrize("make", [CountsSamples, lambda: Block(scales=True)])
def test_a_count_in_a_unit_that_would_depend_on_microbatches_is_refused(make: Any) -> None:
    model = HetFSDP(Net(make), ALONE, units=["units.0", "units.1"])
    with pytest.raises(ValueError, match=r"'units.0' changes its attribute 'count'"):
        model(draw(5, WIDTH))


class KeepsWeight(Net):
    """Has put a parameter aside before wrapping."""

    def __init__(self, kept: Callable[[Tensor], Tensor]) -> None:
        super().__init__(linear)
        self.double()
        self.aside = [kept(self.units[0].weight)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.aside[0])


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (lambda weight: weight, "this parameter was"),
        (lambda weight: weight.T, "requires a gradient"),
        (lambda weight: weight.data, "is the data of one"),
        (lambda weight: weight.detach().T, "is the data of one"),
    ],
)
def test_a_parameter_that_was_put_aside_before_wrapping_is_refused(
    kept: Callable[[Tensor], Tensor], words: str
) -> None:
    model = HetFSDP(KeepsWeight(kept), ALONE, units=["units.0", "units.1"])
    with pytest.raises(ValueError, match=f"{words}.*kept from before wrapping"):
        model(draw(5, WIDTH))
    check(
        ALONE,
        KeepsWeight(lambda weight: weight.detach().clone()),
        [draw(5, WIDTH).double()] * 2,
        squared,
        units=["units.0", "units.1"],
    )


class AsksAside(Net):
    """Computes with what it holds aside, where there are no gradients."""

    def __init__(self, *, is_own: bool) -> None:
        super().__init__(linear)
        self.double()
        self.aside = [self.units[0] if is_own else linear().double()]
        self.weights = [self.aside[0].weight]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            told = (x @ self.weights[0]).sum(-1, keepdim=True)
        return super().forward(x + told)


def test_another_model_that_is_kept_aside_may_be_asked_where_there_are_no_gradients() -> None:
    units = ["units.0", "units.1"]
    check(ALONE, AsksAside(is_own=False), [draw(5, WIDTH).double()] * 2, squared, units=units)
    model = HetFSDP(AsksAside(is_own=True), ALONE, units=units)
    with pytest.raises(ValueError, match="kept from before wrapping"):
        model(draw(5, WIDTH).double())


@dataclass
class Batch:
    """What a data loader may give."""

    pixels: Tensor
    labels: Tensor | None


class OfBatches(ConvNet):
    def forward(self, batch: Batch) -> Any:
        return super().forward(batch.pixels, batch.labels)


class Opaque:
    """Holds tensors where nobody sees them."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels, self.labels = pixels, None


def _dataclasses(rank: int) -> float | None:
    torch.manual_seed(0)
    model = HetFSDP(OfBatches(), WITHOUT_SAMPLES)
    n = WITHOUT_SAMPLES.ranks[model.position].rank_batch_size
    batch = Batch(draw(n, 3, 6, 6), torch.zeros(n, dtype=torch.long))
    return model.backward(model(batch)[0], n)


def test_dataclasses_hold_samples_or_none() -> None:
    means = run_ranks(_dataclasses, 3)
    assert means[0] == means[1] == means[2] is not None
    with pytest.raises(ValueError, match=r"objects \(Opaque\) whose tensors"):
        HetFSDP(OfBatches(), ALONE)(Opaque(draw(5, 3, 6, 6)))


def test_batch_norms_are_named_with_the_sizes_of_their_microbatches() -> None:
    with pytest.warns(UserWarning, match=r"stem.1, blocks.0.1.*\[\[2, 2, 1\]\] samples"):
        HetFSDP(ConvNet(), ALONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HetFSDP(ConvNet(), Plan.by_hand(microbatch_sizes=[5]))


class Checkpointing(Net):
    """As Hugging Face's layers do it."""

    gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = (
                checkpoint(unit, x, use_reentrant=False)
                if self.gradient_checkpointing
                else unit(x)
            )
        return self.head(x)


def test_checkpointing_of_the_model_gives_way_to_the_plan() -> None:
    with pytest.warns(UserWarning, match="gradient_checkpointing of the model has no effect"):
        model = check(
            plan_for(recomputes=True),
            Checkpointing(linear),
            [draw(5, WIDTH)],
            squared,
            units=["units.0", "units.1"],
        )
    assert model.module.gradient_checkpointing


# A model that judges another


class Gan(nn.Module):
    """A generator and its critic as one model, which says whose step it is by a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(linear(), nn.Tanh(), linear())
        self.critic = nn.Sequential(linear(), nn.Tanh(), linear())
        self.double()

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        if real is None:
            return self.critic(self.generator(noise)).square().sum()
        fake = self.generator(noise).detach()
        return (self.critic(fake) - self.critic(real)).square().sum()


def _train_two(rank: int) -> None:
    torch.manual_seed(0)
    reference = Gan()
    model = HetFSDP(copy.deepcopy(reference), WITHOUT_SAMPLES, units=["generator", "critic"])
    optimizers = [
        torch.optim.SGD(
            [p for fqn, p in each.named_parameters() if fqn.startswith(part)], lr=0.1
        )
        for each in (model, reference)
        for part in ("critic", "generator")
    ]
    first = WITHOUT_SAMPLES.first_sample(model.position)
    own = slice(first, first + WITHOUT_SAMPLES.ranks[model.position].rank_batch_size)
    for step in range(6):
        noise, real = draw(5, WIDTH), draw(5, WIDTH)
        is_critics = step % 2 == 0
        (reference(noise, real if is_critics else None) / 5).backward()
        loss = model(noise[own], real[own] if is_critics else None)
        model.backward(loss, len(noise[own]))
        compare_grads(model, reference)
        for optimizer in optimizers[1 - is_critics :: 2]:
            optimizer.step()
        model.zero_grad()
        reference.zero_grad()


def test_two_optimizers_train_a_generator_and_its_critic() -> None:
    run_ranks(_train_two, 3)


def test_a_loss_through_two_wrapped_models_is_told_to_wrap_both() -> None:
    generator, critic = (
        HetFSDP(nn.Sequential(linear(), linear()).double(), ALONE) for _ in range(2)
    )
    loss = squared(critic, generator(draw(5, WIDTH)))
    with pytest.raises(RuntimeError, match="Wrap both in one module"):
        generator.backward(loss, 5)


# What a forward sets before it calls a unit, and sets back


class Switched(nn.Module):
    """A unit that computes as its attributes say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.function = nn.Linear(WIDTH, WIDTH), 1.0, torch.tanh
        self.active = ["linear"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) if self.active else x
        return x + self.function(y) * self.scale * (1 if self.training else 2)


class Switches(Net):
    """Calls its unit in other ways, as adapters are switched off for a part of a forward."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.units
        first.scale, first.function = 0.5, torch.relu
        x = first(x)
        first.scale, first.function = 1.0, torch.tanh
        second.eval()
        x = second(x)
        second.train()
        second.active.clear()
        x = second(x)
        second.active.append("linear")
        return self.head(x)


def test_a_recomputation_finds_what_was_set_before_the_call() -> None:
    check(
        plan_for(recomputes=True),
        Switches(Switched),
        [draw(5, WIDTH) for _ in range(2)],
        squared,
        units=["units.0", "units.1"],
    )


class Freezes(Net):
    """Freezes a unit while it is called without gradients, as peft switches adapters off."""

    def forward(self, x: Tensor) -> Tensor:
        self.units[0].requires_grad_(False)
        with torch.no_grad():
            before = self.units[0](x)
        self.units[0].requires_grad_(True)
        return super().forward(x - before)


def test_parameters_that_a_forward_freezes_are_refused_in_several_rounds() -> None:
    plan = Plan.by_hand(microbatch_sizes=[2], state_shares=[1.0], num_rounds=2)
    model = HetFSDP(Freezes(linear), plan, units=["units.0", "units.1"])
    with pytest.raises(RuntimeError, match=r"unit 'units.0': requires_grad of its parameters"):
        model(draw(2, WIDTH))
