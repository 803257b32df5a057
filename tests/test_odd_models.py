"""Models of others that write parameters, or have backwards of their own: exact, or refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardhet import HetFSDP, Plan
from tests.beside import Beside, check, refuses, squared, summed
from tests.edge_plans import both_ways, plan_for
from tests.small_models import UNITS, WIDTH, Net, Unit, draw, kind, linear
from tests.worlds import on_ranks, run_ranks, run_ranks_expecting_failure

ALONE = plan_for(recomputes=False)
THREE = plan_for(recomputes=False, world_size=3)
forward = Net.forward


def finished(finish: Callable[[Tensor], Any]) -> Net:
    """A net whose outputs go through ``finish``."""
    return kind(lambda self, x: finish(forward(self, x)))()


# Backwards of a model's own


class ByFunction(torch.autograd.Function):
    """Its gradient is what remains of a gradient, or minus it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mixes: bool) -> Tensor:
        ctx.mixes = mixes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        [grad] = grads
        return (grad - grad.mean(0) if ctx.mixes else -grad), None


def by_hook(x: Tensor, mixes: bool) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm() if mixes else grad.clamp(-0.1, 0.1))
    return x


def by_length(x: Tensor, _: bool) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad / len(grad))
    return x


BACKWARDS = {"function": ByFunction.apply, "hook": by_hook}


def with_backward(backward: Any, place: str, mixes: bool) -> Net:
    """A backward of its own: in units, between them, after them, of a loss or beside more."""
    inner = kind(lambda self, x: backward(self.linear(x), mixes).tanh(), Unit)
    if place == "in units":
        return Net(inner)
    if place == "beside more":
        # Units return besides what has no samples and what has no gradient.
        def more(self: Unit, x: Tensor) -> Any:
            return inner.forward(self, x), self.linear.weight.square(), x > 0

        def takes_more(self: Net, x: Tensor) -> Tensor:
            for unit in self.units:
                x, squares, is_positive = unit(x)
                x = x * is_positive + squares.sum(0)
            return self.head(x)

        return kind(takes_more)(kind(more, Unit))

    def around(self: Net, x: Tensor) -> Tensor:
        x = self.units[0](x).tanh()
        x = self.units[1](backward(x * 2, mixes) if place == "between" else x)
        x = self.head(x if place == "between" else backward(x * 2, mixes))
        return x.square().sum() if place == "of a loss" else x

    return kind(around)()


def hooked(*, mixes: bool, before: bool) -> nn.Module:
    """Its second unit has a hook on gradients of its results, or of its arguments."""
    module = Net(lambda: nn.Sequential(linear(), nn.Tanh()))

    def changed(grads: Any) -> Any:
        return tuple(g / g.norm() if mixes else g * 2 for g in grads)

    unit = module.units[1]
    if before:
        unit.register_full_backward_pre_hook(lambda _, grads: changed(grads))
    else:
        unit.register_full_backward_hook(lambda _, grads, __: changed(grads))
    unit.register_full_backward_hook(lambda *_: None)
    return module


def forces(self: Any, x: Tensor) -> Tensor:
    """Gradients of what it computes first, as force fields do."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = self.energy(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def descends(self: Any, x: Tensor) -> Tensor:
    """Moves its input along the gradient of an energy, which is its own to compute."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(self.linear(at)).square().sum()
        return x - torch.autograd.grad(energy, at, create_graph=True)[0]


def of_forces() -> nn.Module:
    energy = nn.Sequential(linear(), nn.Tanh(), linear())
    return kind(forces, Unit)(energy=energy).double()


# What is exact


def penalised(self: Net, x: Tensor) -> Tensor:
    """Adds the squares of all its parameters, those of units among them."""
    squares = [param.square().sum() for param in self.parameters()]
    output = forward(self, x)
    squares += [param.square().sum() for param in self.units[-1].parameters()]
    return output.square().sum() + torch.stack(squares).sum() * len(x)


def of_parameter(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """A parameter that is returned beside the output."""
    output, weight = model(x)
    return (output @ weight).square().sum(), len(x)


def exact(module: nn.Module, shape: tuple[int, ...] = (5, WIDTH), **others: Any) -> Any:
    return module, shape, {"loss": squared, "units": UNITS, **others}


EXACT: dict[str, Callable[[], Any]] = {
    "rows in dim 1": lambda: exact(finished(lambda x: x.flatten(0, 1)), (5, 3, WIDTH)),
    "rows in dim 2": lambda: exact(
        finished(lambda x: x.transpose(0, 1).flatten(0, 1)), (5, 3, WIDTH)
    ),
    "a gradient of its own": lambda: exact(Net(kind(descends, Unit))),
    "a penalty on parameters": lambda: exact(kind(penalised)(), loss=summed),
    "forces in a unit": lambda: exact(
        nn.Sequential(of_forces(), linear()).double(), units=["0", "1"]
    ),
    "a hook before a unit": lambda: exact(hooked(mixes=False, before=True)),
    "a hook of a unit": lambda: exact(hooked(mixes=False, before=False)),
    "a parameter is returned": lambda: exact(
        kind(lambda self, x: (forward(self, x), self.head.weight))(), loss=of_parameter
    ),
    **{
        f"a {name} {place}": lambda b=backward, p=place: exact(with_backward(b, p, mixes=False))
        for name, backward in BACKWARDS.items()
        for place in ("in units", "between", "after", "beside more")
    },
}


@both_ways
@pytest.mark.parametrize("what", EXACT)
def test_what_is_odd_is_exact(what: str, recomputes: bool) -> None:
    module, shape, options = EXACT[what]()
    warns = pytest.warns(UserWarning, match="stay unsharded for the whole step")
    with warns if what == "a penalty on parameters" else nullcontext():
        check(plan_for(recomputes), module, [draw(*shape) for _ in range(2)], **options)


def test_a_loss_may_be_wider_than_the_model() -> None:
    """It is in float32, and computes its loss in float64."""
    wide = kind(lambda self, x, y: (forward(self, x).double() - y).square().sum())().float()
    both = Beside(wide, ALONE, loss=summed, units=UNITS)
    x, y = draw(5, WIDTH).float(), draw(5, 3)
    assert both.model.backward(both.model(x, y), 5) == pytest.approx(
        both.step_of_one(x, y), rel=1e-5
    )


@on_ranks(3)
def test_buffers_may_be_complex(rank: int) -> None:
    """As those of rotary embeddings, by which pairs of features are turned."""
    torch.manual_seed(0)

    def rotating(self: Net, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous())
        return forward(self, torch.view_as_real(pairs * self.turns).flatten(1))

    net = kind(rotating)()
    turns = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) + 1.0)
    net.register_buffer("turns", turns.to(torch.complex128).conj())
    plan = Plan.by_hand(microbatch_sizes=[2, 0, 1], state_shares=[0.2, 0.5, 0.3])
    check(plan, net, [draw(3, WIDTH)] * 2, units=UNITS)


# What is refused


def segments(first: int) -> Net:
    """Units add the sum of those rows that lie in the same of some segments."""

    def adds(self: Unit, x: Tensor) -> Tensor:
        number = (torch.arange(len(x)) >= first).double()
        return self.linear(x + (number[:, None] == number).double() @ x)

    return Net(kind(adds, Unit))


def writing(write: Callable[[nn.Linear], None]) -> Net:
    """Units write their weight before they use it."""

    def writes(self: Unit, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(self.linear)
        return self.linear(x)

    return Net(kind(writes, Unit))


def replaces(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 1.0


def puts_another(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight * 1.0, requires_grad=False)


def words_net(**options: Any) -> nn.Module:
    """Embeddings with options of torch's."""
    table = nn.Embedding(7, WIDTH, **options)
    return kind(lambda self, words: self.linear(self.table(words)), Unit)(table=table)


WORDS = torch.tensor([0, 0, 1, 2, 2])
OTHERS = "depends for one sample on the other samples"
PARTS = "gradients of two parts of a batch do not add up"
ROWS = "rows between steps"
NORM = r"writes to a parameter.*max_norm"
COUNTS = "scale_grad_by_freq=True, which divides"
Refused = tuple[Callable[[], nn.Module], type[Exception], str, Any]
REFUSED: dict[str, Refused] = {
    **{
        f"samples: {name}": (lambda f=f: finished(f), ValueError, OTHERS, UNITS)
        for name, f in {
            "sums up": lambda x: x.cumsum(0),
            "the first": lambda x: x + x[:1],
            "its place": lambda x: x * torch.arange(len(x))[:, None],
            "without rows": lambda x: (x - x.mean(0)).flatten(),
        }.items()
    },
    **{
        f"segments of {n}": (
            lambda n=n: segments(n), ValueError, f"{OTHERS} of the microbatch", UNITS,
        )
        for n in (1, 2)
    },
    **{
        f"writes {name} {'inside' if units is UNITS else 'outside'}": (
            lambda write=write: writing(write), RuntimeError, ROWS, units,
        )
        for units in (UNITS, ["head"])
        for name, write in {
            "in place": lambda layer: layer.weight.clamp_(-0.1, 0.1),
            "its data": lambda layer: layer.weight.data.mul_(1.0),
            "data replaced": replaces,
            "replaced": puts_another,
        }.items()
    },
    **{
        f"{option}, units {len(units)}": (
            lambda option=option, value=value: words_net(**{option: value}),
            error, words, units,
        )
        for units in (["table", "linear"], ["linear"])
        for option, value, error, words in (
            ("max_norm", 0.5, RuntimeError, NORM),
            ("scale_grad_by_freq", True, ValueError, COUNTS),
        )
    },
    **{
        f"a {name} {place}": (
            lambda b=backward, p=place: with_backward(b, p, mixes=True),
            ValueError, PARTS, UNITS,
        )
        for name, backward in BACKWARDS.items()
        for place in ("in units", "between", "after", "of a loss")
    },
    **{
        f"a length {place}": (
            lambda p=place: with_backward(by_length, p, mixes=True), ValueError, PARTS, UNITS,
        )
        for place in ("between", "after")
    },
    **{
        f"a hook, before: {before}": (
            lambda before=before: hooked(mixes=True, before=before),
            ValueError, "unit 'units.1': the gradients of two", UNITS,
        )
        for before in (True, False)
    },
    "forces through units": (
        of_forces, ValueError, "asks for a gradient", ["energy.0", "energy.2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_depend_on_the_plan_is_refused(what: str) -> None:
    make, error, words, units = REFUSED[what]
    model = HetFSDP(make(), ALONE, units=units)
    with pytest.raises(error, match=words):
        squared(model, WORDS if "table" in dict(model.named_children()) else draw(5, WIDTH))


def mean(x: Tensor) -> Any:
    return x.mean()


def number(x: Tensor) -> Any:
    return float(x.mean())


def _keeps(rank: int, keep: Callable[[Tensor], Any], is_used: bool) -> None:
    """Keeps something of each forward, and may compute with it in the next."""

    def keeping(self: Net, x: Tensor) -> Tensor:
        before, x = self.kept, forward(self, x)
        self.kept = keep(x.detach())
        return x + before if is_used else x

    torch.manual_seed(0)
    net = kind(keeping)(kept=keep(draw(1, 3)))
    check(THREE, net, [draw(5, WIDTH) for _ in range(2)], units=UNITS)


@pytest.mark.parametrize("keep", [mean, number])
def test_a_forward_that_computes_with_samples_of_the_one_before_is_refused(
    keep: Callable[[Tensor], Any],
) -> None:
    for outcome in run_ranks_expecting_failure(_keeps, 3, keep, True):
        assert (
            "keeps values of its samples for the next one (attribute kept)" in outcome.message
        )
    run_ranks(_keeps, 3, keep, False)


def _weighs_outside(rank: int, how: str) -> None:
    model = HetFSDP(Net(), THREE, units=UNITS)
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    n = THREE.ranks[model.position].rank_batch_size
    if how == "alone":  # the model's output has nothing to do with it
        loss = squared(model, draw(n, WIDTH))[0] + n * weight.sum()
    else:
        loss = (model(draw(n, WIDTH)) * (weight.detach() if how == "not" else weight)).sum()
    model.backward(loss, n)


@pytest.mark.parametrize("how", ["weighs", "alone"])
def test_a_criterion_with_parameters_of_its_own_is_refused(how: str) -> None:
    for outcome in run_ranks_expecting_failure(_weighs_outside, 3, how):
        assert "the loss depends on a parameter of shape (3,)" in outcome.message
    run_ranks(_weighs_outside, 3, "not")


def normed() -> nn.Module:
    """Goes on computing with the output of its last unit, in evaluation alone."""
    last = linear()
    module = kind(
        lambda self, x: self.last(x) if self.training else self.last(x).softmax(1), Unit
    )(last=last)
    del module.linear
    return module.double()


def test_where_the_loss_is_computed_is_settled_by_the_first_call() -> None:
    def loss(y: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return y.sum(), torch.tensor(len(y))

    model, x = HetFSDP(normed(), ALONE, loss_fn=loss), draw(5, WIDTH)
    model(x, loss_inputs=x)
    with pytest.raises(TypeError, match=r"after unit 'last'.* goes on computing"):
        model.eval()(x, loss_inputs=x)
    model = HetFSDP(normed(), ALONE, loss_fn=loss).eval()
    assert model(x, loss_inputs=x)[0].item() == pytest.approx(5)  # sums of softmax


def test_a_loss_that_raises_names_what_it_was_applied_to() -> None:
    def class_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return loss, torch.tensor(len(labels))

    model, labels = HetFSDP(normed(), ALONE, loss_fn=class_loss), torch.full((5,), WIDTH + 1)
    words = r"what the model returns, a Tensor.*IndexError: Target"
    refuses(model, TypeError, words, draw(5, WIDTH), loss_inputs=labels)


def test_two_calls_of_one_model_are_told_of_one_module() -> None:
    model = HetFSDP(Net(), ALONE, units=UNITS)
    loss = (model(draw(5, WIDTH)) - model(draw(5, WIDTH))).square().sum()
    with pytest.raises(RuntimeError, match="in the forward of one module that HetFSDP wraps"):
        model.backward(loss, 5)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_around_units_is_refused_by_name(is_reentrant: bool) -> None:
    """It has its units recomputed by torch, in spite of the plan."""

    def checkpointed(self: Net, x: Tensor) -> Tensor:
        x = self.head(x)[:, :1] + x
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=is_reentrant)
        return x

    model = HetFSDP(kind(checkpointed)(), ALONE, units=UNITS)
    words = r"unit 'units.\d' was called under gradient checkpointing.*plan"
    # Reentrant checkpointing looks like torch.no_grad() until it calls once more.
    loss = squared(model, draw(5, WIDTH))[0] if is_reentrant else torch.zeros(())
    with pytest.raises(RuntimeError, match=words):
        model.backward(loss, 5) if is_reentrant else model(draw(5, WIDTH))
    assert all(param.grad is None for param in model.parameters())


def _evaluates(rank: int, how: str) -> None:
    """Rank zero evaluates alone, while the others go on to the next step."""
    both = Beside(Net(), THREE, loss=squared, units=UNITS)
    model, [x] = both.model, both.part(draw(5, WIDTH))
    model.backward(*squared(model, x))
    model.zero_grad()
    if how == "unit by unit":
        with model.unit_by_unit():
            if rank == 0:
                x = draw(9, WIDTH)
                torch.testing.assert_close(model.module(x), both.plain(x))
    elif rank == 0:
        with torch.no_grad():
            model(draw(9, WIDTH))
    squared(model, x[: THREE.ranks[model.position].rank_batch_size])


def test_evaluation_on_one_rank_is_told_how_to() -> None:
    for outcome in run_ranks_expecting_failure(_evaluates, 3, "alone"):
        assert (
            "to evaluate on some of them alone, enter model.unit_by_unit()" in outcome.message
        )
    run_ranks(_evaluates, 3, "unit by unit")


# Two rows for each sample


def _prefers(rank: int, plan: Plan, joins: bool) -> None:
    """A score for each of its rows, or, of pairs, the loss of preferring the first."""

    def scores(self: Any, *pair: Tensor) -> Any:
        scores = self.last(self.linear(torch.cat(pair)).tanh()).squeeze(-1)
        if not joins:
            return scores
        chosen, rejected = scores.chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).sum(), len(chosen)

    torch.manual_seed(0)
    scored = kind(scores, Unit)(last=nn.Linear(WIDTH, 1)).double()
    both = Beside(scored, plan, units=["linear", "last"])
    pair = draw(2, plan.global_batch_size, WIDTH)
    if not joins:
        both.model(torch.cat(both.part(*pair)))
    both.step(*pair)


@pytest.mark.parametrize("sizes", [[2, 1], [1, 0, 2]], ids=str)
def test_pairs_are_joined_in_forward(sizes: list[int]) -> None:
    plan = Plan.by_hand(microbatch_sizes=sizes)
    run_ranks(_prefers, len(sizes), plan, True)
    for each in run_ranks_expecting_failure(_prefers, len(sizes), plan, False):
        assert "If a sample has 2 rows (torch.cat([chosen, rejected])), pass" in each.message


class Metered(nn.Module):
    """Adds up losses in a tensor that is no buffer, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        losses = self.linear(x).square().sum(1)
        self.total += losses.detach().sum()
        return losses.sum()


@on_ranks(2)
def test_a_meter_in_forward_has_what_this_rank_has_computed(rank: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[3, 1])
    both = Beside(Metered().double(), plan, loss=summed, units=["linear"])
    expected = 0.0
    for _ in range(2):
        x = torch.randn(4, WIDTH).double()
        expected += float(both.plain.linear(both.part(x)[0]).square().sum())
        both.step(x)
    assert abs(float(both.model.module.total) - expected) < 1e-5 * expected
