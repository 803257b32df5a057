"""Programs of others that look like any other and were once computed wrongly, or not at all."""

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
from shardhet.fsdp.microbatch.surroundings import tell_of_caches
from tests.beside import Beside, check, refuses, squared, summed
from tests.edge_plans import both_ways, plan_for
from tests.selection import one_in
from tests.small_models import UNITS, WIDTH, Net, Unit, draw, kind, linear
from tests.worlds import ends_all_ranks, on_ranks, run_ranks

ALONE = plan_for(recomputes=False)
WITHOUT_SAMPLES = plan_for(recomputes=False, world_size=3)
forward = Net.forward


def wrap(module: nn.Module, **options: Any) -> HetFSDP:
    return HetFSDP(module, ALONE, **{"units": UNITS, **options})


def own_size(model: HetFSDP) -> int:
    return model.plan.ranks[model.position].rank_batch_size


# Attributes that the program sets


def test_an_attribute_that_is_set_is_the_models() -> None:
    scaled = kind(lambda self, x: forward(self, x) * self.scale, scale=1.0)
    both = Beside(scaled(), ALONE, loss=squared, units=UNITS)
    model = both.model
    for scale in (2.0, 0.5):
        both.plain.scale = model.scale = scale
        assert model.scale == model.module.scale == scale
        both.step(draw(5, WIDTH))
    del model.scale
    assert model.scale == 1.0
    model.training = True  # HetFSDP's own
    for name, value in (("head", linear()), ("weight", nn.Parameter(torch.ones(1)))):
        with pytest.raises(RuntimeError, match=f"{name!r} is a parameter.*before wrapping"):
            setattr(model, name, value)


# What a forward does once


def hooks_itself(self: Net, x: Tensor) -> Tensor:
    """Collects what its units return, with hooks that it adds when it is first called."""
    self.kept: list[Tensor] = []
    if not self.is_hooked:
        self.is_hooked = True
        for unit in self.units:
            unit.register_forward_hook(lambda *call: self.kept.append(call[2]))
    x = forward(self, x)
    states, self.kept = self.kept, []
    return torch.cat([x.square(), *(state.square() for state in states)], -1).sum()


def test_hooks_that_the_first_forward_adds_are_there_once() -> None:
    samples = [draw(5, WIDTH) for _ in range(2)]
    check(ALONE, kind(hooks_itself, is_hooked=False)(), samples, summed, units=UNITS)


class Frozen(dict[str, Any]):
    """A configuration that cannot be written, nor copied, as those of some libraries."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError("a configuration is frozen")

    __setitem__ = __delitem__ = clear = update = pop = setdefault = __reduce_ex__ = _refuse

    def __deepcopy__(self, _memo: Any) -> "Frozen":
        return self


def configured(self: Net, x: Tensor) -> Tensor:
    """Reads a frozen configuration, and notes in ordinary containers what it has called."""
    self.called[len(self.called)] = len(x)
    return forward(self, x) * self.config["scale"]


@both_ways
def test_a_frozen_configuration_is_never_written(recomputes: bool) -> None:
    config = Frozen(scale=0.5)
    net = kind(configured)(lambda: Unit(config=config), config=config, called={})
    samples = [draw(5, WIDTH) for _ in range(2)]
    module = check(plan_for(recomputes), net, samples, units=UNITS).module
    assert module.called == {0: 5, 1: 5}
    assert module.config == {"scale": 0.5}


def packs(self: Net, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Keeps packed sequences apart, as positions tell, but not if it is to keep a cache."""
    x = forward(self, x)
    if positions is None or self.config.use_cache:
        return x.cumsum(1)
    begins = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    same = begins[:, :, None] == begins[:, None, :]
    return (same.to(x.dtype).tril()) @ x


def test_a_cache_that_changes_the_result_is_refused() -> None:
    x, positions = draw(5, 4, WIDTH), torch.arange(4).repeat(5, 1)

    def net(use_cache: bool) -> Net:
        return kind(packs)(config=SimpleNamespace(use_cache=use_cache))

    refuses(wrap(net(True)), ValueError, r"use_cache = False before wrapping", x, positions)
    wrap(net(True))(x)
    check(ALONE, net(False), [x], units=UNITS)


def marks(part: Any) -> Net:
    """Reads its argument once more after a unit has had it; a part asks for a cache."""
    marked = kind(lambda self, x: forward(self, x).masked_fill(x[:, :1] == 0, 0.0))
    return marked(config=SimpleNamespace(text_config=part))


@dataclass(frozen=True)
class Fixed:
    use_cache: bool = True


def test_caches_that_change_nothing_are_off_and_said_to_be_so(caplog: Any) -> None:
    samples = [draw(5, WIDTH) for _ in range(2)]
    tell_of_caches.cache_clear()
    for _ in range(2):
        model = check(ALONE, marks(SimpleNamespace(use_cache=True)), samples, units=UNITS)
        assert model.module.config.text_config.use_cache
    assert len([each for each in caplog.records if "without KV caches" in each.message]) == 1
    with pytest.raises(ValueError, match=r"Fixed.use_cache is True and cannot be set"):
        wrap(marks(Fixed()))
    wrap(marks(Fixed(use_cache=False)))(samples[0])


def test_an_output_that_mixes_samples_is_refused() -> None:
    normalised = kind(lambda self, x: (y := forward(self, x)) / y.norm(dim=0))
    words = r"output 0.*depends for one sample on the other"
    refuses(wrap(normalised()), ValueError, words, draw(5, WIDTH))


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
    n = own_size(model)
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


def gives(give: Callable[[Tensor], Any]) -> HetFSDP:
    """Returns something around its last layer's outputs."""
    net = kind(lambda self, x: give(forward(self, x)))()
    return HetFSDP(net, WITHOUT_SAMPLES, units=UNITS)


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


@pytest.mark.parametrize("what", GIVEN)
@on_ranks(3)
def test_an_output_that_cannot_be_made_without_samples_is_named(rank: int, what: str) -> None:
    give, loss_of, words = GIVEN[what]
    model = gives(give)
    output = model(draw(own_size(model), WIDTH))
    with nullcontext() if own_size(model) else pytest.raises(AttributeError, match=words):
        loss_of(output)


@on_ranks(3)
def test_an_output_without_samples_may_hold_an_object_and_needs_gradients(rank: int) -> None:
    model = gives(lambda y: {"of": torch.distributions.Categorical(logits=y), "loss": y.sum()})
    for _ in range(2):
        loss = model(draw(own_size(model), WIDTH))["loss"]
        assert loss.requires_grad
        model.backward(loss, own_size(model))


@pytest.mark.parametrize(
    "kind", one_in(4, ["keywords", "positional", "loss outside", "a table first"])
)
def test_rows_of_length_zero_are_no_samples(kind: str) -> None:
    means = run_ranks(_empty_rows, 3, kind)
    assert means[0] == means[1] == means[2]
    assert means[0] is not None


@ends_all_ranks(3, "'labels' has no rows but 'pixels' has 2")
def test_some_arguments_without_rows_are_refused(rank: int) -> None:
    model = HetFSDP(ConvNet(), WITHOUT_SAMPLES)
    n = own_size(model)
    model(draw(n, 3, 6, 6), torch.zeros(0 if rank == 1 else n, dtype=torch.long))


# What has no rows, or no gradient


def test_complex_parameters_are_refused_by_name() -> None:
    module = nn.Sequential(linear(), linear())
    module.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match=r"phase: it is torch.complex64.*view_as_real"):
        HetFSDP(module, ALONE, units=[nn.Linear])


@both_ways
def test_sparse_gradients_are_the_dense_ones(recomputes: bool) -> None:
    def words_net(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        table = nn.Embedding(7, WIDTH, sparse=sparse)
        return kind(lambda self, words: self.linear(self.table(words)), Unit)(
            table=table
        ).double()

    both = Beside(
        words_net(True), plan_for(recomputes), loss=squared, units=["table", "linear"]
    )
    both.plain = words_net(False)
    both.step(torch.randint(7, (5, 3)))


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
    model = HetFSDP(Net(), ALONE)
    with pytest.raises(error, match=words):
        model.backward(make(squared(model, draw(5, WIDTH))[0]), 5)


def test_what_a_model_without_samples_and_a_gradient_penalty_are_told() -> None:
    model = HetFSDP(Net(), ALONE)
    with pytest.raises(RuntimeError, match="no rank has given the model samples"):
        model.backward(model()[0], 1)
    model = HetFSDP(Net(), ALONE)
    x = draw(5, WIDTH).requires_grad_()
    with pytest.raises(RuntimeError, match=r"gradients of gradients.*gradient penalty"):
        torch.autograd.grad(squared(model, x)[0], x, create_graph=True)


# What other libraries would take, and was once refused


def counted(self: Unit, x: Tensor) -> Tensor:
    """Adds to its input; counts its calls, and computes with the count if ``scales``."""
    self.count += 1
    return x + self.linear(x).tanh() * (self.count if self.scales else 1)


COUNTED = kind(counted, Unit)


def block(scales: bool = False) -> Unit:
    return COUNTED(count=0, scales=scales)


def reads(other: nn.Module) -> Unit:
    """Multiplies with a parameter of another module."""
    multiplies = kind(lambda self, x: self.linear(x) * self.others[0].weight.sum(-1), Unit)
    return multiplies(others=[other])


class TiedByProduct(nn.Module):
    """Scores words by products with their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
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
        self.blocks[1] = reads(self.blocks[0].linear).double()


class Scaling(TiedByProduct):
    """A unit reads a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, 2))
        self.blocks[0] = reads(self)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.table(words)))


TAKEN = {
    "tied by a product": TiedByProduct,
    "another unit's parameter": TakesOther,
    "the root's parameter": Scaling,
}


BLOCKS = ["table", "blocks.0", "blocks.1"]


def _takes_what_others_take(rank: int, plan: Plan, what: str) -> None:
    torch.manual_seed(0)
    both = Beside(TAKEN[what](), plan, loss=squared, units=BLOCKS)
    model, reference = both.model, both.plain
    optimizers = both.optimizers(torch.optim.SGD, lr=0.01)
    for step in range(3):
        words = torch.randint(7, (5, 3))
        reference.uses_second = model.uses_second = step != 1
        both.step(words)
        counts = [[block.__dict__.get("count") for block in each.blocks] for each in (
            model.module, reference)]  # fmt: skip
        assert counts[0] == counts[1]
        for optimizer in optimizers:
            optimizer.step()
    model.eval()
    [own] = both.part(words)
    with torch.no_grad():
        torch.testing.assert_close(model(own), reference(own), rtol=1e-9, atol=1e-9)
    with model.unit_by_unit():
        found = model.module(words)
    with torch.no_grad():
        torch.testing.assert_close(found, reference(words), rtol=1e-9, atol=1e-9)


STAYS = pytest.warns(UserWarning, match="stay unsharded for the whole step")


@pytest.mark.parametrize("what", TAKEN)
def test_what_others_take_is_exact(what: str) -> None:
    run_ranks(_takes_what_others_take, 3, WITHOUT_SAMPLES, what)
    with STAYS if what != "the root's parameter" else nullcontext():
        _takes_what_others_take(0, plan_for(recomputes=True), what)


@ends_all_ranks(3, "table.weight is used inside unit_by_unit() while")
def test_rows_of_a_unit_are_not_read_unit_by_unit(rank: int) -> None:
    model = HetFSDP(TiedByProduct(), WITHOUT_SAMPLES, units=BLOCKS)
    with model.unit_by_unit():
        model.module(torch.zeros(1, 1, dtype=torch.long))


def counts_samples(self: Unit, x: Tensor) -> Tensor:
    self.count += len(x)
    return self.linear(x)


COUNTS_SAMPLES = kind(counts_samples, Unit)


@pytest.mark.parametrize(
    "make",
    [lambda: COUNTS_SAMPLES(count=0), lambda: block(scales=True)],
    ids=["samples", "calls"],
)
def test_a_count_in_a_unit_that_would_depend_on_microbatches_is_refused(make: Any) -> None:
    words = r"'units.0' changes its attribute 'count'"
    refuses(wrap(Net(make)), ValueError, words, draw(5, WIDTH))


def keeps_weight(kept: Callable[[Tensor], Tensor]) -> Net:
    """Has put a parameter aside before wrapping."""
    net = kind(lambda self, x: forward(self, x @ self.aside[0]))()
    net.aside = [kept(net.units[0].weight)]
    return net


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
    words = f"{words}.*kept from before wrapping"
    refuses(wrap(keeps_weight(kept)), ValueError, words, draw(5, WIDTH))


def asks_aside(is_own: bool) -> Net:
    """Computes with what it holds aside, where there are no gradients."""

    def asks(self: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            told = (x @ self.weights[0]).sum(-1, keepdim=True)
        return forward(self, x + told)

    net = kind(asks)()
    net.aside = [net.units[0] if is_own else linear().double()]
    net.weights = [net.aside[0].weight]
    return net


@pytest.mark.parametrize(
    "make",
    [
        lambda: keeps_weight(lambda weight: weight.detach().clone()),
        lambda: asks_aside(is_own=False),
    ],
    ids=["a copy", "another model"],
)
def test_what_is_kept_aside_may_be_computed_with(make: Callable[[], Net]) -> None:
    check(ALONE, make(), [draw(5, WIDTH)] * 2, units=UNITS)


def test_its_own_unit_may_not_be_asked_from_aside() -> None:
    words = "kept from before wrapping"
    refuses(wrap(asks_aside(is_own=True)), ValueError, words, draw(5, WIDTH))


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
    n = own_size(model)
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


def test_checkpointing_of_the_model_gives_way_to_the_plan() -> None:
    """As Hugging Face's layers do it."""

    def checkpoints(self: Net, x: Tensor) -> Tensor:
        for unit in self.units:
            does = self.gradient_checkpointing
            x = checkpoint(unit, x, use_reentrant=False) if does else unit(x)
        return self.head(x)

    net = kind(checkpoints)(gradient_checkpointing=True)
    with pytest.warns(UserWarning, match="gradient_checkpointing of the model has no effect"):
        model = check(plan_for(recomputes=True), net, [draw(5, WIDTH)], units=UNITS)
    assert model.module.gradient_checkpointing


# A model that judges another


def test_a_loss_through_two_wrapped_models_is_told_to_wrap_both() -> None:
    generator, critic = (
        HetFSDP(nn.Sequential(linear(), linear()).double(), ALONE) for _ in range(2)
    )
    loss, _ = squared(critic, generator(draw(5, WIDTH)))
    with pytest.raises(RuntimeError, match="Wrap both in one module"):
        generator.backward(loss, 5)


# What a forward sets before it calls a unit, and sets back


def switched(self: Unit, x: Tensor) -> Tensor:
    """Computes as its attributes say."""
    y = self.linear(x) if self.active else x
    return x + self.function(y) * self.scale * (1 if self.training else 2)


def switches(self: Net, x: Tensor) -> Tensor:
    """Calls its unit in other ways, as adapters are switched off for a part of a forward."""
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
    unit = kind(switched, Unit)
    net = kind(switches)(lambda: unit(scale=1.0, function=torch.tanh, active=["linear"]))
    check(plan_for(recomputes=True), net, [draw(5, WIDTH) for _ in range(2)], units=UNITS)


def freezes(self: Net, x: Tensor) -> Tensor:
    """Freezes a unit while it is called without gradients, as peft switches adapters off."""
    self.units[0].requires_grad_(False)
    with torch.no_grad():
        before = self.units[0](x)
    self.units[0].requires_grad_(True)
    return forward(self, x - before)


def test_parameters_that_a_forward_freezes_are_refused_in_several_rounds() -> None:
    plan = Plan.by_hand(microbatch_sizes=[2], state_shares=[1.0], num_rounds=2)
    model = HetFSDP(kind(freezes)(), plan, units=UNITS)
    words = r"unit 'units.0': requires_grad of its parameters"
    refuses(model, RuntimeError, words, draw(2, WIDTH))
