"""Models of others that write parameters, or have backwards of their own: exact, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardhet import HetFSDP, Plan
from tests.test_probe import (
    WIDTH,
    Net,
    both_ways,
    check,
    compare_grads,
    draw,
    plan_for,
    squared,
)
from tests.worlds import run_ranks, run_ranks_expecting_failure

ALONE = plan_for(recomputes=False)
UNITS = ["units.0", "units.1"]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def refuses(module: nn.Module, error: type[Exception], words: str, **options: Any) -> None:
    model = HetFSDP(module, ALONE, **{"units": UNITS, **options})
    with pytest.raises(error, match=words):
        squared(model, draw(5, WIDTH))


# Samples that depend on those before them


class Mixing(Net):
    """Mixes samples after its last unit."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__(linear)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(super().forward(x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x.cumsum(0),
        lambda x: x + x[:1],
        lambda x: x * torch.arange(len(x))[:, None],
        lambda x: (x - x.mean(0)).flatten(),
    ],
    ids=["sums up", "the first", "its place", "without rows"],
)
def test_a_sample_that_depends_on_the_others_is_refused(
    mix: Callable[[Tensor], Tensor],
) -> None:
    refuses(Mixing(mix), ValueError, "depends for one sample on the other samples")


class WideLoss(Net):
    """Is in float32, and computes its loss in float64."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (super().forward(x).double() - y).square().sum()


def test_a_loss_may_be_wider_than_the_model() -> None:
    torch.manual_seed(0)
    reference = WideLoss(linear).float()
    model = HetFSDP(copy.deepcopy(reference), ALONE, units=UNITS)
    x, y = draw(5, WIDTH).float(), draw(5, 3)
    assert model.backward(model(x, y), 5) == pytest.approx(float(reference(x, y) / 5), rel=1e-5)


class Rotating(Net):
    """Turns pairs of features by complex numbers, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__(linear)
        turns = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) + 1.0)
        self.register_buffer("turns", turns.to(torch.complex128).conj())

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous())
        return super().forward(torch.view_as_real(pairs * self.turns).flatten(1))


def _rotate(_: int) -> None:
    torch.manual_seed(0)
    plan = Plan.by_hand(microbatch_sizes=[2, 0, 1], state_shares=[0.2, 0.5, 0.3])
    check(plan, Rotating(), [draw(3, WIDTH)] * 2, squared, units=UNITS)


def test_buffers_may_be_complex() -> None:
    run_ranks(_rotate, 3)


class Segments(nn.Module):
    """Adds the sum of those rows that lie in the same of some segments."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(WIDTH, WIDTH), first

    def forward(self, x: Tensor) -> Tensor:
        number = (torch.arange(len(x)) >= self.first).double()
        return self.linear(x + (number[:, None] == number).double() @ x)


@pytest.mark.parametrize("first", [1, 2])
def test_units_that_mix_the_samples_of_a_segment_are_refused(first: int) -> None:
    words = "depends for one sample on the other samples of the microbatch"
    refuses(Net(lambda: Segments(first)), ValueError, words)


@pytest.mark.parametrize("dim", [1, 2])
def test_several_rows_for_each_sample_are_exact(dim: int) -> None:
    module = Mixing(lambda x: x.transpose(0, dim - 1).flatten(0, 1))
    check(ALONE, module, [draw(5, 3, WIDTH)], squared, units=UNITS)


class Keeping(Net):
    """Keeps something of each forward, and may compute with it in the next."""

    def __init__(self, keep: Callable[[Tensor], Any], *, is_used: bool) -> None:
        super().__init__(linear)
        self.keep, self.is_used, self.kept = keep, is_used, keep(draw(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        before, x = self.kept, super().forward(x)
        self.kept = self.keep(x.detach())
        return x + before if self.is_used else x


def mean(x: Tensor) -> Any:
    return x.mean()


def number(x: Tensor) -> Any:
    return float(x.mean())


def _keeps(rank: int, keep: Callable[[Tensor], Any], is_used: bool) -> None:
    torch.manual_seed(0)
    plan = plan_for(recomputes=False, world_size=3)
    batches = [draw(5, WIDTH) for _ in range(2)]
    check(plan, Keeping(keep, is_used=is_used), batches, squared, units=UNITS)


@pytest.mark.parametrize("keep", [mean, number])
def test_a_forward_that_computes_with_samples_of_the_one_before_is_refused(
    keep: Callable[[Tensor], Any],
) -> None:
    for outcome in run_ranks_expecting_failure(_keeps, 3, keep, True):
        assert (
            "keeps values of its samples for the next one (attribute kept)" in outcome.message
        )
    run_ranks(_keeps, 3, keep, False)


# Parameters that a forward writes


class Writing(nn.Module):
    """Writes its weight before it uses it."""

    def __init__(self, write: Callable[[nn.Linear], None]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(WIDTH, WIDTH), write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.linear)
        return self.linear(x)


def replaced(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 1.0


def another(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight * 1.0, requires_grad=False)


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.clamp_(-0.1, 0.1),
        lambda layer: layer.weight.data.mul_(1.0),
        replaced,
        another,
    ],
    ids=["in place", "its data", "data replaced", "replaced"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["in a unit", "outside"])
def test_parameters_that_a_forward_writes_are_refused(
    write: Callable[[nn.Linear], None], inside: bool
) -> None:
    units = UNITS if inside else ["head"]
    refuses(Net(lambda: Writing(write)), RuntimeError, "rows between steps", units=units)


class Words(nn.Module):
    """Embeddings with options of torch's."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, WIDTH, **options), linear()

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


@pytest.mark.parametrize("units", [["table", "head"], ["head"]])
def test_embeddings_whose_norm_torch_limits_are_refused(units: list[str]) -> None:
    model = HetFSDP(Words(max_norm=0.5), ALONE, units=units)
    with pytest.raises(RuntimeError, match=r"writes to a parameter.*max_norm"):
        model(torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize("units", [["table", "head"], ["head"]])
def test_embeddings_whose_gradients_are_divided_by_counts_are_refused(units: list[str]) -> None:
    words = torch.tensor([0, 0, 1, 2, 2])
    model = HetFSDP(Words(scale_grad_by_freq=True), ALONE, units=units)
    with pytest.raises(ValueError, match="scale_grad_by_freq=True, which divides"):
        model(words)
    whole = HetFSDP(Words(scale_grad_by_freq=True), Plan.even(1, microbatch_size=5))
    whole.backward(whole(words).sum(), 5)
    assert all(param.grad is not None for param in whole.parameters())


class Descends(nn.Module):
    """Moves its input along the gradient of an energy, which is its own to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.layer(at)).square().sum()
            [slope] = torch.autograd.grad(energy, at, create_graph=True)
        return x - slope


@both_ways
def test_a_unit_may_compute_with_a_gradient_of_its_own(recomputes: bool) -> None:
    check(plan_for(recomputes), Net(Descends), [draw(5, WIDTH)] * 2, squared, units=UNITS)


class Penalised(Net):
    """Adds the squares of all its parameters, those of units among them."""

    def forward(self, x: Tensor) -> Tensor:
        squares = [param.square().sum() for param in self.parameters()]
        output = super().forward(x)
        squares += [param.square().sum() for param in self.units[-1].parameters()]
        return output.square().sum() + torch.stack(squares).sum() * len(x)


@both_ways
def test_a_penalty_on_parameters_inside_of_forward_is_exact(recomputes: bool) -> None:
    with pytest.warns(UserWarning, match="stay unsharded for the whole step"):
        check(
            plan_for(recomputes),
            Penalised(linear),
            [draw(5, WIDTH) for _ in range(2)],
            lambda model, x: model(x),
            units=UNITS,
        )


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


def by_function(x: Tensor, mixes: bool) -> Tensor:
    result: Tensor = ByFunction.apply(x, mixes)  # type: ignore[no-untyped-call]
    return result


def by_hook(x: Tensor, mixes: bool) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm() if mixes else grad.clamp(-0.1, 0.1))
    return x


Backward = Callable[[Tensor, bool], Tensor]
every_backward = pytest.mark.parametrize("backward", [by_function, by_hook])


class Inner(nn.Module):
    """A unit with a backward of its own."""

    def __init__(self, backward: Backward, *, mixes: bool) -> None:
        super().__init__()
        self.linear, self.backward, self.mixes = linear(), backward, mixes

    def forward(self, x: Tensor) -> Tensor:
        return self.backward(self.linear(x), self.mixes).tanh()


class Between(Net):
    """Has it between its units, or after them."""

    def __init__(self, backward: Backward, *, mixes: bool, is_last: bool) -> None:
        super().__init__(linear)
        self.backward, self.mixes, self.is_last = backward, mixes, is_last

    def forward(self, x: Tensor) -> Tensor:
        x = self.units[0](x).tanh()
        if not self.is_last:
            x = self.backward(x * 2, self.mixes)
        x = self.units[1](x)
        return self.head(self.backward(x * 2, self.mixes) if self.is_last else x)


def models_of(backward: Backward, *, mixes: bool) -> list[nn.Module]:
    return [
        Net(lambda: Inner(backward, mixes=mixes)),
        *(Between(backward, mixes=mixes, is_last=is_last) for is_last in (False, True)),
    ]


@every_backward
def test_backwards_that_mix_samples_are_refused(backward: Backward) -> None:
    for module in models_of(backward, mixes=True):
        refuses(module, ValueError, "gradients of two parts of a batch do not add up")


def by_length(x: Tensor, mixes: bool) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad / len(grad))
    return x


class Losing(Between):
    """Returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


def test_backwards_outside_of_units_that_know_how_many_samples_there_are_are_refused() -> None:
    for is_last in (False, True):
        module = Between(by_length, mixes=True, is_last=is_last)
        refuses(module, ValueError, "gradients of two parts of a batch do not add up")


@every_backward
def test_backwards_of_a_loss_that_mix_samples_are_refused(backward: Backward) -> None:
    module = Losing(backward, mixes=True, is_last=True)
    refuses(module, ValueError, "gradients of two parts of a batch do not add up")


@every_backward
@both_ways
def test_backwards_of_each_sample_are_exact(backward: Backward, recomputes: bool) -> None:
    for module in models_of(backward, mixes=False):
        batches = [draw(5, WIDTH) for _ in range(2)]
        check(plan_for(recomputes), module, batches, squared, units=UNITS)


class InnerWithMore(Inner):
    """Returns besides what has no samples and what has no gradient."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.linear.weight.square(), x > 0


class TakesMore(Net):
    """Uses all of it."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x, squares, is_positive = unit(x)
            x = x * is_positive + squares.sum(0)
        return self.head(x)


@every_backward
def test_backwards_of_units_that_return_more_are_exact(backward: Backward) -> None:
    module = TakesMore(lambda: InnerWithMore(backward, mixes=False))
    check(ALONE, module, [draw(5, WIDTH) for _ in range(2)], squared, units=UNITS)


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


@pytest.mark.parametrize("before", [True, False])
def test_backward_hooks_of_a_unit_keep_samples_apart(before: bool) -> None:
    refuses(
        hooked(mixes=True, before=before), ValueError, "unit 'units.1': the gradients of two"
    )
    check(ALONE, hooked(mixes=False, before=before), [draw(5, WIDTH)], squared, units=UNITS)


class Forces(nn.Module):
    """Returns gradients of what it computes first, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(linear(), nn.Tanh(), linear())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x).square().sum()
            [forces] = torch.autograd.grad(energy, x, create_graph=True)
        return forces


def test_gradients_in_a_forward_are_exact_in_one_unit_and_refused_through_several() -> None:
    refuses(Forces(), ValueError, "asks for a gradient", units=["energy.0", "energy.2"])
    module = nn.Sequential(Forces(), linear()).double()
    check(ALONE, module, [draw(5, WIDTH)], squared, units=["0", "1"])


# Parameters that are not the model's, and what is returned


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))


def _weighs_outside(rank: int, how: str) -> None:
    plan = plan_for(recomputes=False, world_size=3)
    model, criterion = HetFSDP(Net(linear), plan, units=UNITS), Criterion()
    n = plan.ranks[model.position].rank_batch_size
    weight = criterion.weight.detach() if how == "detached" else criterion.weight
    if how == "alone":  # the model's output has nothing to do with it
        loss = squared(model, draw(n, WIDTH)) + n * weight.sum()
    else:
        loss = (model(draw(n, WIDTH)) * weight).sum()
    model.backward(loss, n)


@pytest.mark.parametrize("how", ["weighs", "alone"])
def test_a_criterion_with_parameters_of_its_own_is_refused(how: str) -> None:
    for outcome in run_ranks_expecting_failure(_weighs_outside, 3, how):
        assert "the loss depends on a parameter of shape (3,)" in outcome.message
    run_ranks(_weighs_outside, 3, "detached")


class Returning(Net):
    """Returns a parameter beside its output."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.head.weight


def test_a_parameter_may_be_returned() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output, weight = model(x)
        return (output @ weight).square().sum()

    check(ALONE, Returning(linear), [draw(5, WIDTH) for _ in range(3)], loss, units=UNITS)


class Normed(nn.Module):
    """Goes on computing with the output of its last unit, in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last = linear()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x)
        return y if self.training else torch.softmax(y, 1)


def test_where_the_loss_is_computed_is_settled_by_the_first_call() -> None:
    def loss(y: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return y.sum(), torch.tensor(len(y))

    model, x = HetFSDP(Normed(), ALONE, loss_fn=loss), draw(5, WIDTH)
    model(x, loss_inputs=x)
    with pytest.raises(TypeError, match=r"after unit 'last'.* goes on computing"):
        model.eval()(x, loss_inputs=x)
    model = HetFSDP(Normed(), ALONE, loss_fn=loss).eval()
    assert model(x, loss_inputs=x)[0].item() == pytest.approx(5)  # sums of softmax


def test_a_loss_that_raises_names_what_it_was_applied_to() -> None:
    labels = torch.full((5,), WIDTH + 1)
    with pytest.raises(
        TypeError, match=r"what the model returns, a Tensor.*IndexError: Target"
    ):
        HetFSDP(Normed(), ALONE, loss_fn=class_loss)(draw(5, WIDTH), loss_inputs=labels)


def class_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss, torch.tensor(len(labels))


# Calls that others take


class Siamese(nn.Module):
    """Calls one net twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(linear)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x) - self.net(y)


def _is_siamese(rank: int) -> None:
    plan = plan_for(recomputes=True, world_size=3)
    units = ["net.units.0", "net.units.1"]
    check(plan, Siamese(), [draw(5, WIDTH)], lambda m, x: squared_of(m(x, x * 2)), units=units)


def squared_of(output: Tensor) -> Tensor:
    return output.square().sum()


def test_a_net_that_is_called_twice_in_one_module_is_exact() -> None:
    run_ranks(_is_siamese, 3)
    model = HetFSDP(Net(linear), ALONE, units=UNITS)
    loss = squared_of(model(draw(5, WIDTH)) - model(draw(5, WIDTH)))
    with pytest.raises(RuntimeError, match="in the forward of one module that HetFSDP wraps"):
        model.backward(loss, 5)


class Checkpointed(Net):
    """Has its units recomputed by torch, in spite of the plan."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__(linear)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)[:, :1] + x
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=self.is_reentrant)
        return x


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_around_units_is_refused_by_name(is_reentrant: bool) -> None:
    model = HetFSDP(Checkpointed(is_reentrant=is_reentrant), ALONE, units=UNITS)
    words = r"unit 'units.\d' was called under gradient checkpointing.*plan"
    # Reentrant checkpointing looks like torch.no_grad() until it calls once more.
    loss = squared(model, draw(5, WIDTH)) if is_reentrant else torch.zeros(())
    with pytest.raises(RuntimeError, match=words):
        model.backward(loss, 5) if is_reentrant else model(draw(5, WIDTH))
    assert all(param.grad is None for param in model.parameters())


def _evaluates(rank: int, how: str) -> None:
    """Rank zero evaluates alone, while the others go on to the next step."""
    plan = plan_for(recomputes=False, world_size=3)
    module = Net(linear)
    reference = copy.deepcopy(module)
    model = HetFSDP(module, plan, units=UNITS)
    x = draw(plan.ranks[model.position].rank_batch_size, WIDTH)
    model.backward(squared(model, x), len(x))
    model.zero_grad()
    if how == "unit by unit":
        with model.unit_by_unit():
            if rank == 0:
                x = draw(9, WIDTH)
                torch.testing.assert_close(model.module(x), reference(x))
    elif rank == 0:
        with torch.no_grad():
            model(draw(9, WIDTH))
    squared(model, x[: plan.ranks[model.position].rank_batch_size])


def test_evaluation_on_one_rank_is_told_how_to() -> None:
    for outcome in run_ranks_expecting_failure(_evaluates, 3, "alone"):
        assert (
            "to evaluate on some of them alone, enter model.unit_by_unit()" in outcome.message
        )
    run_ranks(_evaluates, 3, "unit by unit")


# Two rows for each sample


class Scored(nn.Module):
    """A score for each of its rows, or, of pairs, the loss of preferring the first."""

    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self.first, self.last, self.joins = linear(), nn.Linear(WIDTH, 1), joins
        self.double()

    def forward(self, *pair: Tensor) -> Any:
        scores = self.last(self.first(torch.cat(pair)).tanh()).squeeze(-1)
        return preference(scores) if self.joins else scores


def preference(scores: Tensor) -> tuple[Tensor, int]:
    chosen, rejected = scores.chunk(2)
    return -nn.functional.logsigmoid(chosen - rejected).sum(), len(chosen)


def _prefers(rank: int, plan: Plan, joins: bool) -> None:
    torch.manual_seed(0)
    reference = Scored(joins=joins)
    model = HetFSDP(copy.deepcopy(reference), plan, units=["first", "last"])
    pair, own = draw(2, 3, WIDTH), plan.sample_indices(model.position)
    if not joins:
        model(torch.cat([each[own] for each in pair]))
    model.forward_backward(*(each[own] for each in pair))
    loss_sum, number = reference(*pair)
    (loss_sum / number).backward()
    compare_grads(model, reference)


@pytest.mark.parametrize("sizes", [[2, 1], [1, 0, 2]], ids=str)
def test_pairs_are_joined_in_forward(sizes: list[int]) -> None:
    plan = Plan.by_hand(microbatch_sizes=sizes)
    run_ranks(_prefers, len(sizes), plan, True)
    for each in run_ranks_expecting_failure(_prefers, len(sizes), plan, False):
        assert "If a sample has 2 rows (torch.cat([chosen, rejected])), pass" in each.message
