"""What users do around and inside units: exact, or refused with a clear error."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.records.layout import Span
from tests.beside import Beside, is_exact
from tests.drawn_cases import problem_of
from tests.edge_plans import PLANS, every_plan, full_batches
from tests.fuzzing.model import NUM_POSITIONS, FuzzModel, weighted_loss
from tests.fuzzing.shapes import ModelShape, UnitShape
from tests.parity import Course, Problem, check_parity, compare_grads
from tests.worlds import on_ranks, run_ranks

SHAPE = ModelShape(
    units=(UnitShape(), UnitShape(core="attention", returns="nested", aux="sum"), UnitShape()),
    order=(0, 1, 0, 2),
    width=6,
    num_words=11,
    position=True,
    mask="causal",
    tied="head",
)


class Drawn(Beside):
    """The model of SHAPE, whose batches are its problem's."""

    def __init__(self, plan: Plan) -> None:
        self.problem = problem_of(SHAPE, 3)
        torch.manual_seed(3)
        super().__init__(
            self.problem.make_module(), plan, loss=self.sum, **self.problem.options
        )
        self.size = sum(full_batches(plan))

    def sum(self, model: nn.Module, *batch: Tensor) -> Any:
        return self.problem.loss(model, dict(zip(("tokens", "targets"), batch, strict=True)))

    def batch(self, num_samples: int | None = None) -> list[Tensor]:
        return [*self.problem.make_batch(num_samples or self.size).values()]


# Steps around the step #


@every_plan
@on_ranks()
def test_a_step_without_valid_token_sets_no_gradient(rank: int, plan: Plan) -> None:
    both = Drawn(plan)
    tokens, targets = both.batch()
    masked = both.part(tokens, torch.full_like(targets, -100))
    assert both.model.backward(*both.sum(both.model, *masked)) is None
    assert all(param.grad is None for param in both.model.parameters())
    assert both.model.step == 1
    both.step(tokens, targets)


@every_plan
@on_ranks()
def test_tokens_may_be_weighted(rank: int, plan: Plan) -> None:
    """Tokens may be weighted: their number is then any positive number, below one too."""
    both = Drawn(plan)
    batch = both.batch()
    loss_sum, num_tokens = both.model(*both.part(*batch))
    mean = both.model.backward(loss_sum * 0.001, num_tokens.double() * 0.001)
    is_exact(mean, both.step_of_one(*batch))
    compare_grads(both.model, both.plain)


class DetachedBeside(nn.Module):
    """An output with a gradient and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.detach() * 2


class FrozenBeside(nn.Module):
    """A frozen unit whose input needs no gradient, between two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = DetachedBeside()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, detached = self.first(x)
        return self.last(y + self.frozen(detached))


def _train_frozen_beside(rank: int, sizes_by_step: tuple[tuple[int, ...], ...]) -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[1, 1],
        num_microbatches=[2, 2],
        state_shares=[0.5, 0.5],
        recompute=[False, True],
    )
    problem = Problem(
        make_module=lambda: FrozenBeside().double(),
        make_batch=lambda n: {"x": torch.randn(n, 4, dtype=torch.float64)},
        loss=lambda model, batch: (model(batch["x"]).square().sum(), len(batch["x"])),
        options={"units": ("first", "frozen", "last")},
    )
    check_parity(rank, problem, plan, Course(rank_batch_sizes=sizes_by_step))


def test_ranks_that_recompute_agree_with_those_that_do_not() -> None:
    run_ranks(_train_frozen_beside, 2, ((2, 2), (2, 2), (0, 2), (2, 0)))


def test_a_rank_that_recomputes_may_join_after_the_first_step() -> None:
    run_ranks(_train_frozen_beside, 2, ((2, 0), (2, 2)))


# State #


def _meta_values(rank: int, plan: Plan, is_tied: bool) -> dict[str, Tensor]:
    torch.manual_seed(rank)  # what the ranks' generators hold must not matter
    shape = replace(SHAPE, tied="head" if is_tied else "")
    with torch.device("meta"):
        module = FuzzModel(shape).double()
    model = HetFSDP(module, plan, seed=8, init_fn=_init)
    for fqn, param in model.named_parameters():
        assert param.device.type == "cpu", fqn
        assert param.shape[0] <= 18
    return model.state_dict()


def _init(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=0.5)
    if isinstance(module, FuzzModel):
        module.causal.copy_(torch.ones(NUM_POSITIONS, NUM_POSITIONS).tril().bool())


@pytest.mark.parametrize("is_tied", [False, True])
def test_initial_values_do_not_depend_on_the_plan(is_tied: bool) -> None:
    found = [run_ranks(_meta_values, p.world_size, p, is_tied)[0] for p in PLANS]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for fqn, tensor in found[0].items():
            assert torch.equal(other[fqn], tensor), fqn
            assert tensor.dtype == torch.bool or bool(tensor.any()), fqn


def _tied_across_root_on_meta(rank: int, plan: Plan) -> dict[str, Tensor]:
    with torch.device("meta"):
        module = FuzzModel(SHAPE).double()
    # The embedding is the root's, so the tied weight is too; the rest of the head is a unit.
    model = HetFSDP(module, plan, units=("blocks.0", "blocks.1", "head"), init_fn=_init)
    return model.state_dict()


def test_a_weight_that_root_and_unit_share_is_initialised_once() -> None:
    found = [run_ranks(_tied_across_root_on_meta, p.world_size, p)[0] for p in PLANS]
    for other in found[1:]:
        for fqn, tensor in found[0].items():
            assert torch.equal(other[fqn], tensor), fqn


class WithBuffers(nn.Module):
    """One module under two names, with persistent and other buffers and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.first.register_buffer("scale", torch.tensor([2.0]))
        self.first.register_buffer("causal", torch.ones(2, 2).bool())
        self.first.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.second = nn.Linear(5, 3)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.first(x))) * self.first.scale


@every_plan
@on_ranks(fresh_world=True)
def test_states_make_round_trips(rank: int, plan: Plan) -> None:
    torch.manual_seed(2)
    reference, other = WithBuffers(), WithBuffers()
    model = HetFSDP(copy.deepcopy(reference), plan, units=("first", "second"))
    found = model.state_dict()
    expected = reference.state_dict()
    if rank == 0:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())
        reference.load_state_dict(found)
    else:
        assert found == {}
    model.load_state_dict(other.state_dict())
    for fqn, box in model.sharded_state_dict().items():
        rows: Span = box.rows
        assert torch.equal(box.tensor, other.state_dict()[fqn][rows.start : rows.stop])
    with pytest.raises(ValueError, match=r"missing \['second\.bias'\]"):
        model.load_state_dict({k: v for k, v in expected.items() if k != "second.bias"})


# Gradients of what is not a parameter #


@every_plan
@on_ranks()
def test_inputs_get_their_gradients(rank: int, plan: Plan) -> None:
    torch.manual_seed(4)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    both = Beside(
        layers, plan, loss=lambda model, x, targets: weighted_loss(model(x)[:, None], targets)
    )
    x = torch.randn(sum(full_batches(plan)), 4, dtype=torch.float64)
    targets = torch.randint(0, 4, (len(x), 1))
    own, own_targets = both.part(x, targets)
    own.requires_grad_()
    both.model.backward(*both.loss(both.model, own, own_targets))
    both.step_of_one(x.requires_grad_(), targets)
    if len(own):
        [expected] = both.part(x.grad)
        torch.testing.assert_close(own.grad, expected, rtol=1e-12, atol=1e-15)
