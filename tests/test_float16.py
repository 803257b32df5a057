"""Training in float16: the loss is scaled, and what overflows changes nothing on any rank."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan
from shardhet.models.decoder import Decoder
from shardhet.training.data import GlobalBatches
from shardhet.training.guard import BadStepGuard
from shardhet.training.hooks.bad_steps import OnBadStep
from shardhet.training.loss_scaling import LEAST_SCALE, LossScaler
from shardhet.training.optim import OptimizerSpec, WarmupDecay
from shardhet.training.trainer import Run as RunModel
from shardhet.training.trainer import Trainer, run_plainly
from tests.emulated.accelerator import Accelerator
from tests.selection import one_in
from tests.test_guard import Scaled, with_loss
from tests.test_trainer import MODEL, PLANS, SEQ_LEN, toy_corpus
from tests.worlds import run_ranks, run_ranks_expecting_failure

CPU = torch.device("cpu")
NUM_STEPS = 30
BAD_STEP = 4
FIRST_SCALE = 2.0**10  # nothing overflows at it
SMALL = ("data=text_dir", "debug=quick", "num_steps=7", "model.width=16", "model.num_layers=1")
SMALL += ("data.seq_len=8", "checkpoint.every=2", "precision=FP16", "resume=auto")


def make_trainer(
    plan: Plan,
    *,
    is_float16: bool,
    first_scale: float = FIRST_SCALE,
    device: torch.device = CPU,
) -> Trainer:
    torch.manual_seed(0)
    dtype = torch.float16 if is_float16 else None
    model = HetFSDP(Decoder(MODEL), plan, param_dtype=dtype, device=device)
    return Trainer(
        model,
        OptimizerSpec(learning_rate=1e-2).build(list(model.parameters())),
        GlobalBatches(corpus=toy_corpus(), seq_len=SEQ_LEN, global_batch_size=6),
        schedule=WarmupDecay(num_steps=NUM_STEPS, num_warmup_steps=5),
        loss_scaler=LossScaler(device, first_scale=first_scale) if is_float16 else None,
        device=device,
    )


def overflowing(rank: int, steps: list[int], trainer: Trainer) -> RunModel:
    """As ``run_plainly``, but some gradients overflow in these steps."""
    scale = torch.amp.GradScaler.scale

    def run(call: Any, tensors: Any) -> Any:
        is_bad = trainer.model.step in steps
        if trainer.model.plan.stages is not None:  # the call does all, and has the scaler
            factor = 1e5 if is_bad and rank == 2 else 1.0
            with mock.patch.object(
                torch.amp.GradScaler, "scale", lambda *given: scale(*given) * factor
            ):
                return run_plainly(call, tensors)
        factor = 1e5 if is_bad else 1.0
        return with_loss(trainer.model, lambda loss: Scaled.apply(loss, factor))(call, tensors)

    return run


def overflow(rank: int, plan: Plan, on_bad_step: OnBadStep) -> Any:
    trainer = make_trainer(plan, is_float16=True)
    trainer.guard = BadStepGuard(on_bad_step)
    trainer._run = overflowing(rank, [BAD_STEP], trainer)
    steps = [trainer.train_step() for _ in range(BAD_STEP)]
    rows = [p.detach().clone() for p in trainer.model.parameters()]
    skipped = trainer.train_step()
    for row, param in zip(rows, trainer.model.parameters(), strict=True):
        assert torch.equal(row, param)
    steps += [skipped, trainer.train_step()]
    said = [(each.why_skipped, each.has_overflowed, each.loss_scale) for each in steps]
    assert trainer.loss_scaler is not None
    return said, trainer.loss_scaler.state_dict()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("on_bad_step", [OnBadStep.STOP, OnBadStep.SKIP])
@pytest.mark.parametrize("name", one_in(2, reversed(PLANS)))
def test_a_step_that_overflows_is_skipped_by_all_and_halves_the_scale(
    name: str, on_bad_step: OnBadStep
) -> None:
    plan = PLANS[name]
    said, *others = run_ranks(overflow, plan.world_size, plan, on_bad_step)
    assert all(other == said for other in others)
    *before, (why, has_overflowed, scale), after = said[0]
    assert before == [(None, False, FIRST_SCALE)] * BAD_STEP
    assert why == "a gradient overflows in float16 at a loss scale of 1024; now it is 512"
    assert (has_overflowed, scale) == (True, FIRST_SCALE)
    assert after == (None, False, FIRST_SCALE / 2)
    assert said[1]["scale"] == FIRST_SCALE / 2


def overflow_always(rank: int, plan: Plan) -> None:
    trainer = make_trainer(plan, is_float16=True, first_scale=2 * LEAST_SCALE)

    trainer._run = with_loss(trainer.model, lambda loss: Scaled.apply(loss, math.nan))
    for _ in range(3):
        trainer.train_step()


def test_gradients_that_are_finite_at_no_scale_stop_all_ranks() -> None:
    plan = PLANS["three ranks, one only stores"]
    for outcome in run_ranks_expecting_failure(overflow_always, plan.world_size, plan):
        assert outcome.exception_name == "FloatingPointError", outcome
        assert "step 2: gradients are not finite in float16" in outcome.message
        assert "Set precision=BF16 or FP32" in outcome.message


def test_what_a_checkpoint_holds_is_the_scale_and_when_it_grows() -> None:
    scaler, other = LossScaler(CPU, first_scale=8.0), LossScaler(CPU)
    other.load_state_dict(scaler.state_dict())
    assert float(other.scaled(torch.ones(()))) == 8.0
    assert other.step_scale == 8.0


# What HetFSDP refuses by itself


def train_unscaled(rank: int, how: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan.by_hand(microbatch_sizes=[1, 1], state_shares=[0.5, 0.5])

    def loss_fn(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return F.mse_loss(output.float(), targets, reduction="sum"), torch.tensor(1)

    is_loss = how == "unscaled"
    model = HetFSDP(
        module, plan, param_dtype=torch.float16, loss_fn=loss_fn if is_loss else None
    )
    x = torch.ones(1, 4)
    if is_loss:
        model.backward(*model(x, loss_inputs=torch.zeros(1, 4)))
    else:
        model.backward(1024 * model(x).square().sum(), 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [("unscaled", "the loss is not scaled"), ("in float16", "Compute it from output.float()")],
)
def test_a_loss_that_would_vanish_or_overflow_is_refused(how: str, said: str) -> None:
    for outcome in run_ranks_expecting_failure(train_unscaled, 2, how):
        assert outcome.exception_name in ("ValueError", "RuntimeError")
        assert said in outcome.message


def test_sums_in_float16_are_refused() -> None:
    plan = Plan.by_hand(microbatch_sizes=[1], state_shares=[1.0])
    with pytest.raises(ValueError, match=r"reduce_dtype: torch.float16 but .* torch.float32"):
        HetFSDP(nn.Sequential(nn.Linear(2, 2)), plan, reduce_dtype=torch.float16)


def test_the_host_waits_for_the_loss_and_for_the_norm() -> None:
    """And not for the optimizer's step, unless something may have overflowed."""
    plan = Plan.even(1, microbatch_size=6)
    with Accelerator().installed() as accelerator:
        trainer = make_trainer(plan, is_float16=True, device=accelerator.device)
        for _ in range(3):
            accelerator.syncs.clear()
            trainer.train_step()
        assert accelerator.syncs == ["comm/calls.py read: event"] * 2
