"""Steps of several rounds together with what surrounds a step."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import Plan, Stage
from tests.beside import Beside, is_exact
from tests.parity import compare_grads, rows_of
from tests.selection import one_in
from tests.small_models import Chain
from tests.test_rounds import FORMS, plan_of
from tests.worlds import on_ranks, run_ranks_expecting_failure

WIDTH = 4


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
@pytest.mark.parametrize("gathers", [0, 2])
@on_ranks(2)
def test_batch_norm_sees_the_microbatches_of_all_rounds(rank: int, gathers: int) -> None:
    """Statistics are those of microbatches, in the order of the samples."""
    forward, backward = FORMS[gathers]
    plan = Plan.by_hand(
        microbatch_sizes=[3, 2],
        num_microbatches=[2, 1],
        num_rounds=2,
        reshard_after_forward=forward,
        reshard_after_backward=backward,
    )
    torch.manual_seed(2)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2))
    module = Chain(*blocks, act=torch.tanh).double()
    both = Beside(module, plan, units=["layers.0", "layers.1"])
    for _ in range(2):
        both.step(samples(plan), pieces=[3, 3, 2] * 2)
        for one, other in zip(both.model.buffers(), both.plain.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def samples(plan: Plan) -> Tensor:
    return torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)


def make_deep() -> Chain:
    return Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), act=torch.tanh)


def deep(plan: Plan, **options: Any) -> Beside:
    torch.manual_seed(4)
    return Beside(make_deep().double(), plan, units=[nn.Linear], **options)


class Island(nn.Module):
    """Its second layer computes in float32 under autocast, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float()).square().sum(), len(x)


@pytest.mark.parametrize("stages", [None, [("first",), ("second",)]])
@on_ranks(2)
def test_autocast_around_a_step_is_left_for_backward(rank: int, stages: Any) -> None:
    sizes, stages = ([2, 2], [Stage(units=u, num_ranks=1) for u in stages]) if stages else (
        [1, 1], None)  # fmt: skip
    torch.manual_seed(4)
    plan = Plan.by_hand(microbatch_sizes=sizes, num_rounds=2, stages=stages)
    both, x = Beside(Island(), plan, units=[nn.Linear]), torch.randn(4, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both.model.forward_backward(*both.part(x))
        loss_sum, count = both.plain(x)
    (loss_sum / count).backward()
    rows = both.model.sharded_state_dict()["second.weight"].rows
    grad = both.model.get_parameter("second.weight").grad
    assert grad is not None
    expected = rows_of(both.plain.second.weight.grad, rows)
    torch.testing.assert_close(grad.as_subclass(Tensor), expected, rtol=1e-6, atol=1e-7)


@on_ranks(3, fresh_world=True)
def test_a_divisor_is_taken_if_it_is_known(rank: int) -> None:
    """A divisor that is known before is that of one process; ranks must agree on it."""
    plan = plan_of(3, 3, 1)
    both, x = deep(plan), samples(plan)
    model = both.model
    for i in range(3):
        own = plan.round_samples(model.position, i)
        mean = model.backward(*model(x[own.start : own.stop]), divisor=float(len(x)))
        assert (mean is None) == (i < 2)
    is_exact(mean, both.step_of_one(x))
    compare_grads(model, both.plain)
    assert model.mean_so_far == mean


@on_ranks(3)
def test_a_loss_may_be_divided_by_less_than_zero(rank: int) -> None:
    """By weights that sum up to less than zero, as in one process."""
    plan = plan_of(3, 3, 1)
    both, x = deep(plan), samples(plan)
    for i in range(3):
        own = plan.round_samples(both.model.position, i)
        loss_sum, number = both.model(x[own.start : own.stop])
        mean = both.model.backward(loss_sum, -number)
    assert mean is not None
    is_exact(-mean, both.step_of_one(x))
    for param in both.plain.parameters():
        assert param.grad is not None
        param.grad.neg_()
    compare_grads(both.model, both.plain)


UNLIKE = "on different ranks"
DIVISORS: list[tuple[list[list[float | None]], str]] = [  # by round and rank
    ([[1.0, 2.0]], rf"divisor is \[1.0, 2.0\] {UNLIKE}"),
    ([[None, 2.0]], rf"divisor is \[2.0, inf\] {UNLIKE}"),
    ([[0.0, 0.0]], rf"divisor is \[0.0\] {UNLIKE}"),
    ([[-2.0, -2.0]], rf"divisor is \[-2.0\] {UNLIKE}"),
    ([[float("nan")] * 2], rf"divisor is \[nan.* {UNLIKE}"),
    ([[None, None], [2.0, 2.0]], "in all rounds of a step, or in none"),
    ([[2.0, 2.0], [None, None]], "in all rounds of a step, or in none"),
]


def _divides(rank: int, rounds: list[list[float | None]]) -> None:
    model, x = deep(plan_of(2, 2)).model, samples(plan_of(2, 2))
    for divisors in rounds:
        model.backward(*model(x[: 2 - rank]), divisor=divisors[rank])


@pytest.mark.parametrize("rounds, message", one_in(3, DIVISORS))
def test_divisors_are_above_zero_and_alike(
    rounds: list[list[float | None]], message: str
) -> None:
    for outcome in run_ranks_expecting_failure(_divides, 2, rounds):
        assert re.search(message, outcome.message), outcome.message


def _begins_anew(rank: int) -> None:
    model, x = deep(plan_of(2, 2)).model, samples(plan_of(2, 2))
    model.backward(*model(x[: 2 - rank]))
    if rank:
        model.step = model.step  # as when a run goes on there
    model(x[: 2 - rank])


def test_a_rank_that_begins_a_step_anew_alone_is_told() -> None:
    for outcome in run_ranks_expecting_failure(_begins_anew, 2):
        assert (
            "ranks differ in the number of its finished rounds: [1.0, 0.0]" in outcome.message
        )


@on_ranks(3)
def test_the_first_call_may_be_in_inference_mode(rank: int) -> None:
    plan = plan_of(3, 2, 2)
    both = deep(plan)
    for _ in range(2):
        x = samples(plan)
        with torch.inference_mode():
            mine = plan.round_samples(both.model.position, 0)
            loss_sum, _ = both.model(x[mine.start : mine.stop] + 0)  # made in this mode
            expected, _ = both.plain(x[mine.start : mine.stop])
            torch.testing.assert_close(loss_sum, expected)
        both.step(x)
