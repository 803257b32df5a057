"""Units that take and give odd things: exact, or refused with a clear error."""

import copy
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan
from tests.beside import Beside, refuses, squared, summed
from tests.edge_plans import ALONE, UNEVEN, both_ways, every_plan, full_batches
from tests.parity import Course, Problem, check_parity, rows_of
from tests.small_models import WIDTH, Unit, draw, kind
from tests.worlds import on_ranks, run_ranks


class Odd(nn.Module):
    """Units of one kind between an embedding and a head, which counts in float."""

    def __init__(self, make_unit: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.units = nn.ModuleList(make_unit() for _ in range(2))
        self.head = FloatCountingHead()

    def forward(self, words_BT: Tensor, *rest: Tensor) -> Any:
        x = self.embedding(words_BT)
        for unit in self.units:
            result = unit(x, *self.passed(*rest))
            x = result if isinstance(result, Tensor) else result[0]
        return self.head(x, rest[-1])

    def passed(self, *_: Tensor) -> tuple[Any, ...]:
        """What units are passed besides."""
        return ()


class Weighted(nn.Module):
    """A parameter alone."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape or (WIDTH,)))


class FloatCountingHead(nn.Module):
    """Loss and the number of samples, as a tensor of the loss's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x_BTD: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        loss_sum = F.cross_entropy(self.out(x_BTD.mean(1)), targets_B, reduction="sum")
        return loss_sum, torch.ones_like(x_BTD[:, 0, 0]).sum()


def views_of_input(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of its input beside a tensor that has to do with its parameter."""
    return x.flip(1) * self.weight, x[..., :3], x.transpose(1, 2)


class UsesViewOfInput(nn.Module):
    """A plain wrapper whose result is made of a unit's views of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ViewOfInput()

    def forward(self, x: Tensor) -> Tensor:
        y, half, turned = self.inner(x)
        return y + half.repeat(1, 1, 2) * 0.5 + turned.transpose(1, 2)


def constants(self: Any, x: Tensor) -> tuple[Any, ...]:
    """Things that are no tensors, and an integer and a detached tensor."""
    y = self.linear(x)
    return y, None, "name", {"depth": 3}, x.detach().argmax(-1), y.detach()


def scales_without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
    return self.linear(x) / (1 + scale)


def in_place_inside(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    y.tanh_()
    z = y * 1.5
    z += x
    return z


def its_parameter(self: Any, x: Tensor) -> Tensor:
    """A parameter's values for every sample."""
    weight = self.weight.expand(len(x), 3, WIDTH) if len(x) > 1 else self.weight[None]
    return weight + x * 0.5


ViewOfInput = kind(views_of_input, Weighted)
ODD_UNITS: dict[str, Callable[[], nn.Module]] = {
    "identity": kind(lambda self, x: x, Weighted),  # without a gradient
    "views": UsesViewOfInput,
    "constants": kind(constants, Unit),
    "gradients": kind(scales_without_gradients, Unit),
    "in place inside": kind(in_place_inside, Unit),
    "parameter": lambda: PARAMETER(3, WIDTH),
}
PARAMETER = kind(its_parameter, Weighted)


def problem_of(make: Callable[[], nn.Module], *classes: Any, **more: Any) -> Problem:
    def make_batch(num_samples: int) -> dict[str, Tensor]:
        return {
            "words": torch.randint(0, 7, (num_samples, 3)),
            **{name: make(num_samples) for name, make in more.items()},
            "targets": torch.randint(0, 3, (num_samples,)),
        }

    return Problem(
        make_module=lambda: make().double(),
        make_batch=make_batch,
        loss=lambda model, batch: model(*batch.values()),
        options={"units": (nn.Embedding, *classes, "head")},
    )


def _recomputing(plan: Plan, recomputes: bool) -> Plan:
    return Plan.by_hand(
        microbatch_sizes=[max(r.microbatch_sizes, default=0) for r in plan.ranks],
        rank_batch_sizes=full_batches(plan),
        state_shares=plan.state_shares,
        recompute=recomputes,
    )


WHOLE = Plan.by_hand(microbatch_sizes=[3, 2], state_shares=[0.5, 0.5])  # one microbatch each


@pytest.mark.sampled
@pytest.mark.parametrize("plan", [UNEVEN, WHOLE], ids=["uneven", "whole"])
@both_ways
@pytest.mark.parametrize("name", ODD_UNITS)
@on_ranks()
def test_odd_outputs_are_exact(rank: int, name: str, recomputes: bool, plan: Plan) -> None:
    plan, make = _recomputing(plan, recomputes), ODD_UNITS[name]
    unit = {"views": ViewOfInput, "parameter": PARAMETER}.get(name, make)
    check_parity(rank, problem_of(lambda: Odd(make), unit), plan, Course.of(plan))


@pytest.mark.parametrize("takes_features", [True, False])
@both_ways
def test_writing_on_a_units_input_raises(recomputes: bool, takes_features: bool) -> None:
    writes = kind(lambda self, x: self.linear(x.relu_()), Unit)
    first: list[nn.Module] = [] if takes_features else [nn.Linear(WIDTH, WIDTH)]
    module = nn.Sequential(*first, writes(), writes())
    model = HetFSDP(module, _recomputing(ALONE, recomputes), units=(writes,))
    refuses(model, RuntimeError, "writes in place to its input", torch.randn(5, WIDTH))


class Box:
    """A class that torch's pytree does not know."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class BoxModel(nn.Module):
    """Hides the way from one unit to the next in an object."""

    def __init__(self, *, gives: bool) -> None:
        super().__init__()
        givers = kind(lambda self, x: Box(self.linear(x)), Unit), nn.Linear(WIDTH, WIDTH)
        # One is seen, and one is in an object.
        taker = kind(lambda self, x, box: self.linear(x + box.tensor), Unit)
        self.first = givers[0]() if gives else givers[1]
        self.last = nn.Linear(WIDTH, WIDTH) if gives else taker()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.tensor) if isinstance(y, Box) else self.last(x, Box(y))


ONE_MICROBATCH = Plan.by_hand(microbatch_sizes=[4], state_shares=[1.0])


@pytest.mark.sampled
@pytest.mark.parametrize("gives", [True, False])
@both_ways
@pytest.mark.parametrize("plan", [ALONE, ONE_MICROBATCH], ids=["alone", "one microbatch"])
def test_tensors_hidden_in_objects_are_refused(
    plan: Plan, recomputes: bool, gives: bool
) -> None:
    plan = _recomputing(plan, recomputes)
    model = HetFSDP(BoxModel(gives=gives), plan, units=("first", "last"))
    words = (
        "Box, whose tensors HetFSDP cannot see|'last' uses a tensor .* not among its arguments"
    )
    x = torch.randn(sum(full_batches(plan)), WIDTH)
    refuses(model, (TypeError, ValueError), words, x)


def narrow(self: Any, x: Tensor) -> Tensor:
    """Parameters of two dtypes."""
    return self.linear(x) + self.narrow.double() * x


@every_plan
@on_ranks()
def test_a_unit_may_mix_dtypes(rank: int, plan: Plan) -> None:
    torch.manual_seed(0)
    unit = kind(narrow, Unit)
    reference = nn.Sequential(
        *(unit(narrow=nn.Parameter(torch.rand(WIDTH))) for _ in range(2)), nn.Linear(WIDTH, 3)
    )
    for fqn, param in reference.named_parameters():
        if not fqn.endswith("narrow"):
            param.data = param.data.double()
    both = Beside(reference, plan, loss=squared)
    model, [own] = both.model, both.part(x := draw(sum(full_batches(plan)), WIDTH))
    model.backward(*squared(model, own))
    both.step_of_one(x)
    for clips in (False, True):
        if clips:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            model.clip_grad_norm_(0.1)
        boxes = model.sharded_state_dict()
        grads = {fqn: p.grad for fqn, p in model.named_parameters()}
        for fqn, param in reference.named_parameters():
            assert param.grad is not None
            rows = boxes[fqn].rows
            expected, found = rows_of(param.grad, rows), grads[fqn]
            assert found is not None
            assert found.dtype == expected.dtype
            # Float32 rounds its part of the norm, which scales all.
            bar = 1e-5 if fqn.endswith("narrow") else (1e-7 if clips else 1e-12)
            torch.testing.assert_close(found, expected, rtol=bar, atol=bar)
    sizes = model.clip_grad_norm_(1e-3).dtype
    assert sizes == torch.float64


SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


def scaled(self: Any, x: Tensor) -> Tensor:
    """A context, or an object that several modules hold, changes what it computes."""
    return self.config.scale * SCALE.get() * self.linear(x).tanh()


SCALED = kind(scaled, Unit)


class SetsAround(nn.Module):
    """Sets something around the calls of its units, and sets it back."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.config = SimpleNamespace(scale=1.0)
        self.layers = nn.ModuleList(SCALED(config=self.config) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            before = SCALE.set(2.0 + i) if self.what == "context" else None
            self.config.scale = 3.0 + i if self.what == "configuration" else 1.0
            x = layer(x)
            if before is not None:
                SCALE.reset(before)
        self.config.scale = 1.0
        return x.square().sum()


def _read_around(rank: int, what: str, recomputes: bool) -> None:
    torch.manual_seed(0)
    plan = Plan.by_hand(microbatch_sizes=[2, 0], num_microbatches=[2, 0], recompute=recomputes)
    module = SetsAround(what).double()
    both = Beside(module, plan, loss=summed, units=["layers.0", "layers.1"])
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    if recomputes and what != "nothing":
        words = r"'layers.0' gives something else"
        refuses(both.model, (ValueError, RuntimeError), words, *both.part(x))
    else:
        both.step(x)


@pytest.mark.parametrize("what", ["context", "configuration", "nothing"])
def test_what_a_recomputed_unit_reads_does_not_change(what: str) -> None:
    for recomputes in (False, True):
        run_ranks(_read_around, 2, what, recomputes, fresh_world=True)


def _rrelu(x: Tensor) -> Tensor:
    return F.rrelu(x, training=True)


def _multinomial(x: Tensor) -> Tensor:
    return x.gather(-1, torch.multinomial(x.detach().softmax(-1), 3))


def _poisson(x: Tensor) -> Tensor:
    return x * torch.poisson(x.detach().exp())


@pytest.mark.parametrize("draws", [_rrelu, _multinomial, _poisson])
@on_ranks(2, fresh_world=True)
def test_a_unit_draws_again_what_it_drew(rank: int, draws: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    drawing = kind(lambda self, x: draws(self.linear(x)), Unit)
    reference = nn.Sequential(drawing(), nn.Linear(3 if draws is _multinomial else WIDTH, 2))
    x = torch.randn(6, WIDTH)[: 4 if rank == 0 else 2]
    grads = []
    for recomputes in (False, True):
        plan = Plan.by_hand(
            microbatch_sizes=[2, 2], num_microbatches=[2, 1], recompute=recomputes
        )
        model = HetFSDP(copy.deepcopy(reference), plan)
        if draws is _poisson:
            with pytest.raises((ValueError, RuntimeError), match=r"'0' draws .* \(poisson\)"):
                model(x)
            return
        model.backward(model(x).square().sum(), len(x))
        grads.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *grads))


@on_ranks(1)
def test_numbers_of_a_hook_in_backward_are_those_of_plain_torch(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Unit(), nn.Dropout(0.5), nn.Linear(WIDTH, 2))
    model = HetFSDP(
        copy.deepcopy(reference), Plan.by_hand(microbatch_sizes=[2], recompute=True)
    )
    plain = torch.Generator().set_state(torch.get_rng_state())
    x, drawn = torch.zeros(2, WIDTH), list[Tensor]()
    for _ in range(2):
        out = model(x)
        out.register_hook(lambda grad: drawn.append(torch.rand(())) or grad)
        model.backward(out.sum(), 2)
    assert drawn == [torch.rand((), generator=plain) for _ in range(2)]
