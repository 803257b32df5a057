"""Steps of several rounds together with what surrounds a step."""

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan, Stage, watch_ranks
from shardhet.fsdp.step.observer import Activity, Observed
from shardhet.training.compiling import compile_units
from tests.test_rounds import FORMS, check_grads, make, mean_of, plan_of, run_round, tokens
from tests.test_stillness import TIMEOUT_S, WITHIN_S, stop_here
from tests.worlds import run_ranks, run_ranks_expecting_failure

WIDTH = 4


class Normed(nn.Module):
    """Batch statistics in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().sum(), len(x)


def _batch_norm(rank: int, gathers: int) -> None:
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
    module = Normed().double()
    model = HetFSDP(copy.deepcopy(module), plan, units=["blocks.0", "blocks.1"])
    for _ in range(2):
        x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
        mine = plan.sample_indices(model.position)
        model.forward_backward(x[mine])
        module.zero_grad()
        for part in x.split([3, 3, 2] * 2):
            loss_sum, _ = module(part)
            (loss_sum / len(x)).backward()
        check_grads(model, module)
        for one, other in zip(model.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
@pytest.mark.parametrize("gathers", [0, 2])
def test_batch_norm_sees_the_microbatches_of_all_rounds(gathers: int) -> None:
    run_ranks(_batch_norm, 2, gathers)


class Deep(nn.Module):
    """Three linear units with a loss at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum(), len(x)


def deep(plan: Plan, **options: Any) -> tuple[HetFSDP, Deep]:
    torch.manual_seed(4)
    module = Deep().double()
    return HetFSDP(copy.deepcopy(module), plan, units=[nn.Linear], **options), module


def whole_grads(module: nn.Module, x: Tensor) -> None:
    module.zero_grad()
    loss_sum, count = module(x)
    (loss_sum / count).backward()


def _observed(rank: int) -> None:
    plan = plan_of(2, 3, 2, num_microbatches=[2, 1])
    model, module = deep(plan)
    seen: list[Observed] = []
    x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
    mine = plan.sample_indices(model.position)
    model.forward_backward(x[mine])
    model.zero_grad()
    model.add_observer(seen.append)
    model.forward_backward(x[mine])
    for activity in (Activity.FORWARD, Activity.BACKWARD):
        found = [event.unit for event in seen if event.activity is activity]
        own = plan.ranks[model.position].num_microbatches
        assert {found.count(f"layers.{i}") for i in range(3)} <= {3, 3 * own}, found
    gathers = [event.unit for event in seen if event.activity is Activity.WAIT_GATHER]
    assert gathers.count("layers.0") == 1  # once a step
    whole_grads(module, x)
    check_grads(model, module)


def test_observers_see_every_round() -> None:
    run_ranks(_observed, 2)


def _compiled(rank: int) -> None:
    plan = plan_of(3, 2, 1, reduce_each_round=False)
    torch.manual_seed(4)
    module = Deep().double()
    reference = copy.deepcopy(module)
    assert compile_units(module, torch.device("cpu"), backend="eager") is None
    model = HetFSDP(module, plan, units=[nn.Linear])
    x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
    model.forward_backward(x[plan.sample_indices(model.position)])
    whole_grads(reference, x)
    check_grads(model, reference)


def test_compiled_units_run_in_rounds() -> None:
    run_ranks(_compiled, 3)


def _adapted(rank: int) -> None:
    """As with LoRA: only small units of their own are trained."""
    plan = plan_of(3, 3, 2)
    torch.manual_seed(4)
    module = Deep().double()
    for layer in (module.layers[0], module.layers[2]):
        layer.requires_grad_(False)
    model = HetFSDP(copy.deepcopy(module), plan, units=[nn.Linear])
    for _ in range(2):
        x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
        model.forward_backward(x[plan.sample_indices(model.position)])
        whole_grads(module, x)
        check_grads(model, module)
        model.zero_grad()


def test_frozen_units_stay_frozen_in_rounds() -> None:
    run_ranks(_adapted, 3)


def _clipped(rank: int, reduce_dtype: torch.dtype | None) -> None:
    plan = plan_of(3, 3, 1, reduce_each_round=reduce_dtype is None)
    model, module = deep(plan, reduce_dtype=reduce_dtype)
    x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
    model.forward_backward(x[plan.sample_indices(model.position)])
    whole_grads(module, x)
    bar = 1e-12 if reduce_dtype is None else 1e-5
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    assert float(model.clip_grad_norm_(0.01)) == pytest.approx(float(norm), rel=bar)
    check_grads(model, module, bar)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_sums_of_rounds_are_clipped(reduce_dtype: torch.dtype | None) -> None:
    run_ranks(_clipped, 3, reduce_dtype)


def _overflows(rank: int) -> tuple[list[float], list[Tensor]]:
    """A gradient overflows in the last round of the second step, on one rank."""
    plan = plan_of(2, 3, 0, reduce_each_round=False)
    torch.manual_seed(5)
    model = HetFSDP(Deep(), plan, units=[nn.Linear], param_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scales = []
    for step in range(3):
        before = [param.detach().clone() for param in model.parameters()]
        for i in range(3):
            mine = plan.round_samples(model.position, i)
            loss_sum, count = model(torch.ones(len(mine), WIDTH))
            is_bad = (step, i, model.position) == (1, 2, 1)
            model.backward(scaler.scale(loss_sum.float()) * (3e4 if is_bad else 1.0), count)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = list(model.parameters())
        is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert is_same == (step == 1 or not sum(each.numel() for each in before))
    return scales, [param.detach().as_subclass(Tensor).clone() for param in model.parameters()]


def test_an_overflow_in_a_later_round_skips_the_step_on_all_ranks() -> None:
    first, again = run_ranks(_overflows, 2), run_ranks(_overflows, 2)
    for (scales, rows), (scales_again, rows_again) in zip(first, again, strict=True):
        assert scales == scales_again == [2.0**8, 2.0**7, 2.0**7]
        assert all(map(torch.equal, rows, rows_again))


def _autocast(rank: int) -> None:
    """Each unit's error is about that of one round."""
    errors = []
    for num_rounds in (1, 2):
        plan = Plan.by_hand(
            microbatch_sizes=[1, 1],
            num_microbatches=[4 // num_rounds, 2 // num_rounds],
            num_rounds=num_rounds,
            reduce_each_round=False,
        )
        torch.manual_seed(4)
        module = Deep()
        model = HetFSDP(copy.deepcopy(module), plan, units=[nn.Linear])
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.forward_backward(x[plan.sample_indices(model.position)])
        whole_grads(module, x)
        boxes, truth = model.sharded_state_dict(), dict(module.named_parameters())
        total = 0.0
        for fqn, param in model.named_parameters():
            rows, grad = boxes[fqn].rows, truth[fqn].grad
            assert param.grad is not None
            assert grad is not None
            total += float((param.grad - grad[rows.start : rows.stop]).square().sum())
        errors.append(sum(row[0] for row in model.exchange([total])) ** 0.5)
    assert 0 < errors[1] <= 3 * errors[0]


def test_autocast_holds_in_every_round() -> None:
    run_ranks(_autocast, 2)


class Island(nn.Module):
    """Its second layer computes in float32 under autocast, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float()).square().sum(), len(x)


def _left_for_backward(rank: int, stages: Sequence[Stage] | None) -> None:
    sizes = [2, 2] if stages else [1, 1]
    plan = Plan.by_hand(microbatch_sizes=sizes, num_rounds=2, stages=stages)
    torch.manual_seed(4)
    module = Island()
    model = HetFSDP(copy.deepcopy(module), plan, units=[nn.Linear])
    x = torch.randn(4, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.forward_backward(x[plan.sample_indices(model.position)])
        loss_sum, count = module(x)
    (loss_sum / count).backward()
    rows = model.sharded_state_dict()["second.weight"].rows
    grad = dict(model.named_parameters())["second.weight"].grad
    expected = module.second.weight.grad
    assert grad is not None
    assert expected is not None
    expected = expected[rows.start : rows.stop]
    torch.testing.assert_close(grad.as_subclass(Tensor), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stages", [None, [("first",), ("second",)]])
def test_autocast_around_a_step_is_left_for_backward(stages: Any) -> None:
    run_ranks(_left_for_backward, 2, stages and [Stage(units=u, num_ranks=1) for u in stages])


def _raises_in_round_two(rank: int, place: str) -> None:
    plan = plan_of(3, 3, 2)
    model, _ = deep(plan)

    def fail(*_: Any) -> None:
        if rank == 1 and model.rounds_left == 2:
            raise LookupError("no such sample")

    if place == "forward":
        model.module.layers[1].register_forward_pre_hook(fail)
    for i in range(3):
        mine = plan.round_samples(model.position, i)
        output = model(torch.ones(len(mine), WIDTH, dtype=torch.float64))
        if place == "between":
            with model.guard("the loss"):
                fail()
        model.backward(*output)


@pytest.mark.parametrize("place", ["forward", "between"])
def test_a_rank_that_raises_in_a_later_round_ends_all(place: str) -> None:
    outcomes = run_ranks_expecting_failure(_raises_in_round_two, 3, place, within_s=30.0)
    assert outcomes[1].exception_name == "LookupError"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.message.startswith("rank 1 (cpu"), outcome
        assert "no such sample" in outcome.message


def _stopped_in_round_two(rank: int) -> None:
    watch_ranks(hang_timeout_s=TIMEOUT_S)
    plan = plan_of(3, 3, 2)
    model, _ = deep(plan)
    for step in range(3):
        for i in range(3):
            time.sleep(0.2)  # so that the last sign of life comes from this step
            mine = plan.round_samples(model.position, i)
            output = model(torch.ones(len(mine), WIDTH, dtype=torch.float64))
            if (rank, step, i) == (1, 2, 1):
                stop_here()
            model.backward(*output)


@pytest.mark.campaign  # tests of stillness have the first round
def test_a_rank_that_is_stopped_in_a_later_round_is_named() -> None:
    outcomes = run_ranks_expecting_failure(_stopped_in_round_two, 3, within_s=WITHIN_S)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.message.startswith("rank 1 (cpu"), outcome
        assert "has given no sign of life" in outcome.message


def _again_after_own_error(rank: int) -> None:
    """All ranks go on after an error of the program in the middle of a step."""
    plan = plan_of(2, 3)
    model, module = make(plan)
    inputs, targets = tokens(plan.global_batch_size)
    run_round(model, 0, inputs, targets)
    model.drop_rounds()
    assert model.is_between_steps
    with torch.no_grad():
        model(inputs[:1], targets[:1])
    mine = plan.sample_indices(model.position)
    mean = model.forward_backward(inputs[mine], targets[mine])
    assert mean == pytest.approx(mean_of(module, inputs, targets), rel=1e-12)
    check_grads(model, module)


def test_evaluation_follows_dropped_rounds() -> None:
    run_ranks(_again_after_own_error, 2)


def _divided(rank: int) -> None:
    """A divisor that is known before is that of one process; ranks must agree on it."""
    plan = plan_of(3, 3, 1)
    model, module = deep(plan)
    x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
    for i in range(3):
        own = plan.round_samples(model.position, i)
        mean = model.backward(*model(x[own.start : own.stop]), divisor=float(len(x)))
        assert (mean is None) == (i < 2)
    whole_grads(module, x)
    check_grads(model, module)
    assert mean == pytest.approx(float(module(x)[0]) / len(x), rel=1e-12)
    assert model.mean_so_far == mean
    output = model(x[: len(plan.round_samples(model.position, 0))])
    with pytest.raises(ValueError, match=r"divisor is .* on different ranks"):
        model.backward(*output, divisor=1.0 + rank)


def test_a_divisor_is_taken_if_it_is_known() -> None:
    run_ranks(_divided, 3, fresh_world=True)  # an error of all ranks ends it


def _evaluated_first(rank: int) -> None:
    plan = plan_of(3, 2, 2)
    model, module = deep(plan)
    x = torch.randn(plan.global_batch_size, WIDTH, dtype=torch.float64)
    for _ in range(2):
        with torch.inference_mode():
            mine = plan.round_samples(model.position, 0)
            loss_sum, _ = model(x[mine.start : mine.stop] + 0)  # made in this mode
            expected, _ = module(x[mine.start : mine.stop])
            torch.testing.assert_close(loss_sum, expected)
        model.zero_grad()
        model.forward_backward(x[plan.sample_indices(model.position)])
        whole_grads(module, x)
        check_grads(model, module)


def test_the_first_call_may_be_in_inference_mode() -> None:
    run_ranks(_evaluated_first, 3)
