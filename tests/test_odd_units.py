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
from tests.edge_plans import ALONE, UNEVEN, both_ways, every_plan, full_batches
from tests.parity import (
    Course,
    Problem,
    check_parity,
    part_of,
)
from tests.worlds import run_ranks


class Odd(nn.Module):
    """Units of one kind between an embedding and a head, which counts in float."""

    def __init__(self, make_unit: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.units = nn.ModuleList(make_unit() for _ in range(2))
        self.head = FloatCountingHead()

    def forward(self, words_BT: Tensor, targets_B: Tensor) -> Any:
        x = self.embedding(words_BT)
        for unit in self.units:
            result = unit(x)
            x = result if isinstance(result, Tensor) else result[0]
        return self.head(x, targets_B)


class FloatCountingHead(nn.Module):
    """Loss and the number of samples, as a tensor of the loss's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x_BTD: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        loss_sum = F.cross_entropy(self.out(x_BTD.mean(1)), targets_B, reduction="sum")
        return loss_sum, torch.ones_like(x_BTD[:, 0, 0]).sum()


class Identity(nn.Module):
    """Gives back its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))  # without a gradient

    def forward(self, x: Tensor) -> Tensor:
        return x


class ViewOfInput(nn.Module):
    """Gives back views of its input beside a tensor that has to do with its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.flip(1) * self.weight, x[..., :2], x.transpose(1, 2)


class UsesViewOfInput(nn.Module):
    """A plain wrapper whose result is made of a unit's views of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ViewOfInput()

    def forward(self, x: Tensor) -> Tensor:
        y, half, turned = self.inner(x)
        return y + half.repeat(1, 1, 2) * 0.5 + turned.transpose(1, 2)


class WithConstants(nn.Module):
    """Gives back things that are no tensors, and an integer and a detached tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None, str, dict[str, Any], Tensor, Tensor]:
        y = self.linear(x)
        return y, None, "name", {"depth": 3}, x.detach().argmax(-1), y.detach()


class AsksForGradients(nn.Module):
    """Calls autograd inside: needs the graph even where the unit is recomputed later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True)
        return self.linear(x) / (1 + scale)


class InPlaceInside(nn.Module):
    """Writes in place on tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.tanh_()
        z = y * 1.5
        z += x
        return z


class ParameterAsOutput(nn.Module):
    """Gives a parameter's values back for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x), 3, 4) + x * 0.5 if len(x) > 1 else (
            self.weight[None] + x * 0.5
        )  # fmt: skip


class SharesStatistics(nn.Module):
    """A scalar per microbatch with a gradient, and mixed dtypes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.narrow = nn.Parameter(torch.rand(4, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.narrow.double() * x


ODD_UNITS: dict[str, Callable[[], nn.Module]] = {
    "identity": Identity,
    "views": UsesViewOfInput,
    "constants": WithConstants,
    "gradients": AsksForGradients,
    "in place inside": InPlaceInside,
    "parameter": ParameterAsOutput,
}


def _odd_problem(name: str) -> Problem:
    def make_batch(num_samples: int) -> dict[str, Tensor]:
        return {
            "words": torch.randint(0, 7, (num_samples, 3)),
            "targets": torch.randint(0, 3, (num_samples,)),
        }

    classes = {"views": (ViewOfInput,)}.get(name, (ODD_UNITS[name],))
    return Problem(
        make_module=lambda: Odd(ODD_UNITS[name]).double(),
        make_batch=make_batch,
        loss=lambda model, batch: model(*batch.values()),
        options={"units": (nn.Embedding, *classes, "head")},
    )


def _train_odd(rank: int, name: str, plan: Plan) -> None:
    check_parity(rank, _odd_problem(name), plan, Course.of(plan))


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
def test_odd_outputs_are_exact(name: str, recomputes: bool, plan: Plan) -> None:
    run_ranks(_train_odd, 2, name, _recomputing(plan, recomputes))


class InPlaceOnInput(nn.Module):
    """Writes on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_())


def _write_on_input(rank: int, plan: Plan, takes_features: bool) -> None:
    blocks = [InPlaceOnInput(), InPlaceOnInput()]
    first: list[nn.Module] = [] if takes_features else [nn.Linear(4, 4)]
    module = nn.Sequential(*first, *blocks)
    model = HetFSDP(module, plan, units=(InPlaceOnInput,))
    with pytest.raises(RuntimeError, match="writes in place to its input"):
        model(torch.randn(5, 4))


@pytest.mark.parametrize("takes_features", [True, False])
@both_ways
def test_writing_on_a_units_input_raises(recomputes: bool, takes_features: bool) -> None:
    plan = _recomputing(ALONE, recomputes)
    run_ranks(_write_on_input, 1, plan, takes_features, fresh_world=True)


class Box:
    """A class that torch's pytree does not know."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class GivesBox(nn.Module):
    """Gives back a tensor in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Box:
        return Box(self.linear(x))


class TakesBox(nn.Module):
    """Takes a tensor in an object, and one that is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, box: Box) -> Tensor:
        return self.linear(x + box.tensor)


class BoxModel(nn.Module):
    """Hides the way from one unit to the next in an object."""

    def __init__(self, *, gives: bool) -> None:
        super().__init__()
        self.first = GivesBox() if gives else nn.Linear(4, 4)
        self.last = nn.Linear(4, 4) if gives else TakesBox()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.tensor) if isinstance(y, Box) else self.last(x, Box(y))


def _hide_tensors(rank: int, plan: Plan, gives: bool) -> None:
    model = HetFSDP(BoxModel(gives=gives), plan, units=("first", "last"))
    words = (
        "Box, whose tensors HetFSDP cannot see|'last' uses a tensor .* not among its arguments"
    )
    with pytest.raises((TypeError, ValueError), match=words):
        model(torch.randn(sum(full_batches(plan)), 4))


ONE_MICROBATCH = Plan.by_hand(microbatch_sizes=[4], state_shares=[1.0])


@pytest.mark.sampled
@pytest.mark.parametrize("gives", [True, False])
@both_ways
@pytest.mark.parametrize("plan", [ALONE, ONE_MICROBATCH], ids=["alone", "one microbatch"])
def test_tensors_hidden_in_objects_are_refused(
    plan: Plan, recomputes: bool, gives: bool
) -> None:
    run_ranks(_hide_tensors, 1, _recomputing(plan, recomputes), gives, fresh_world=True)


def _mixed_dtypes(rank: int, plan: Plan) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(SharesStatistics(), SharesStatistics(), nn.Linear(4, 3))
    for fqn, param in reference.named_parameters():
        if not fqn.endswith("narrow"):
            param.data = param.data.double()
    model = HetFSDP(copy.deepcopy(reference), plan)
    x = torch.randn(sum(full_batches(plan)), 4, dtype=torch.float64)
    part = part_of({"x": x}, full_batches(plan), model.position)["x"]
    model.backward(model(part).square().sum(), len(part))
    (reference(x).square().sum() / len(x)).backward()
    for clips in (False, True):
        if clips:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            model.clip_grad_norm_(0.1)
        boxes = model.sharded_state_dict()
        grads = {fqn: p.grad for fqn, p in model.named_parameters()}
        for fqn, param in reference.named_parameters():
            assert param.grad is not None
            rows = boxes[fqn].rows
            expected, found = param.grad[rows.start : rows.stop], grads[fqn]
            assert found is not None
            assert found.dtype == expected.dtype
            # Float32 rounds its part of the norm, which scales all.
            bar = 1e-5 if fqn.endswith("narrow") else (1e-7 if clips else 1e-12)
            torch.testing.assert_close(found, expected, rtol=bar, atol=bar)
    sizes = model.clip_grad_norm_(1e-3).dtype
    assert sizes == torch.float64


@every_plan
def test_a_unit_may_mix_dtypes(plan: Plan) -> None:
    run_ranks(_mixed_dtypes, plan.world_size, plan)


class Masked(nn.Module):
    """Leaves out words by a mask that broadcasts, as attention's does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x_BTD: Tensor, mask_BT1: Tensor | None = None) -> Tensor:
        made = self.inner(x_BTD).tanh()
        return x_BTD + (made if mask_BT1 is None else made.masked_fill(mask_BT1, 0.0))


class MasksWhereNeeded(nn.Module):
    """Passes its layers a mask only if a sample is padded, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Masked() for _ in range(2))
        self.head = FloatCountingHead()

    def forward(self, words_BT: Tensor, padding_BT: Tensor, targets_B: Tensor) -> Any:
        x = self.embedding(words_BT)
        mask_BT1 = padding_BT[..., None] if padding_BT.any() else None
        for layer in self.layers:
            x = layer(x, mask_BT1)
        return self.head(x, targets_B)


def _sometimes_padded(num_samples: int) -> dict[str, Tensor]:
    return {
        "words": torch.randint(7, (num_samples, 3)),
        "padding": (torch.rand(num_samples, 1) < 0.4) & torch.tensor([False, False, True]),
        "targets": torch.randint(3, (num_samples,)),
    }


def _train_sometimes_padded(rank: int, plan: Plan, num_rounds: int) -> None:
    problem = Problem(
        make_module=lambda: MasksWhereNeeded().double(),
        make_batch=_sometimes_padded,
        loss=lambda model, batch: model(*batch.values()),
        options={"units": (nn.Embedding, Masked, "head")},
    )
    sizes = tuple(each.rank_batch_size for each in plan.ranks) * num_rounds
    course = Course(rank_batch_sizes=(sizes,) * 8)
    check_parity(rank, problem, plan, course)


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_rank_with_one_sample_may_pass_a_mask_later_than_at_first(num_rounds: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[1, 2], num_microbatches=[1, 2], num_rounds=num_rounds)
    run_ranks(_train_sometimes_padded, 2, plan, num_rounds)


SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


class Scaled(nn.Module):
    """A unit that a context, or an object that several modules hold, changes."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return self.config.scale * SCALE.get() * self.layer(x).tanh()


class SetsAround(nn.Module):
    """Sets something around the calls of its units, and sets it back."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.config = SimpleNamespace(scale=1.0)
        self.layers = nn.ModuleList(Scaled(self.config) for _ in range(2))

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
    reference = SetsAround(what).double()
    plan = Plan.by_hand(microbatch_sizes=[2, 0], num_microbatches=[2, 0], recompute=recomputes)
    model = HetFSDP(copy.deepcopy(reference), plan, units=["layers.0", "layers.1"])
    x = torch.randn(4, 4, dtype=torch.float64)
    if recomputes and what != "nothing":
        with pytest.raises(
            (ValueError, RuntimeError), match=r"'layers.0' gives something else"
        ):
            model(x if rank == 0 else x[:0])
        return
    model.backward(model(x if rank == 0 else x[:0]), 4 * (rank == 0))
    (reference(x) / 4).backward()
    for fqn, param in reference.named_parameters():
        rows = model.sharded_state_dict()[fqn].rows
        assert param.grad is not None
        grad = model.get_parameter(fqn).grad
        assert grad is not None
        torch.testing.assert_close(grad, param.grad[rows.start : rows.stop])


@pytest.mark.parametrize("what", ["context", "configuration", "nothing"])
def test_what_a_recomputed_unit_reads_does_not_change(what: str) -> None:
    for recomputes in (False, True):
        run_ranks(_read_around, 2, what, recomputes, fresh_world=True)


class Draws(nn.Module):
    """A unit that draws random numbers in some way."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.layer(x))


def _rrelu(x: Tensor) -> Tensor:
    return F.rrelu(x, training=True)


def _multinomial(x: Tensor) -> Tensor:
    return x.gather(-1, torch.multinomial(x.detach().softmax(-1), 3))


def _poisson(x: Tensor) -> Tensor:
    return x * torch.poisson(x.detach().exp())


def _drawing(rank: int, draw: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Draws(draw), nn.Linear(3 if draw is _multinomial else 4, 2))
    x = torch.randn(6, 4)[: 4 if rank == 0 else 2]
    grads = []
    for recomputes in (False, True):
        plan = Plan.by_hand(
            microbatch_sizes=[2, 2], num_microbatches=[2, 1], recompute=recomputes
        )
        model = HetFSDP(copy.deepcopy(reference), plan)
        if draw is _poisson:
            with pytest.raises((ValueError, RuntimeError), match=r"'0' draws .* \(poisson\)"):
                model(x)
            return
        model.backward(model(x).square().sum(), len(x))
        grads.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("draw", [_rrelu, _multinomial, _poisson])
def test_a_unit_draws_again_what_it_drew(draw: Callable[[Tensor], Tensor]) -> None:
    run_ranks(_drawing, 2, draw, fresh_world=draw is _poisson)
