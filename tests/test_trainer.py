"""The trainer: one curve under every plan, exact evaluation, true shares of time."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardhet import HetFSDP, Plan, Stage
from shardhet.models.decoder import Decoder
from shardhet.training.data import Corpus, GlobalBatches, TokenBatch, held_out_windows
from shardhet.training.optim import OptimizerSpec, WarmupDecay
from shardhet.training.peak_memory import PeakMemory
from shardhet.training.trainer import Evaluation, StepMetrics, Trainer
from tests.selection import one_in, only
from tests.small_models import small_decoder
from tests.worlds import run_ranks

SEQ_LEN = 8
NUM_STEPS = 50
MODEL = small_decoder(seq_len=SEQ_LEN)
PLANS = {
    "one rank": Plan.even(1, microbatch_size=6),
    "two ranks, ragged": Plan.by_hand(
        microbatch_sizes=[3, 1], rank_batch_sizes=[5, 1], state_shares=[0.2, 0.8]
    ),
    "three ranks, one only stores": Plan.by_hand(
        microbatch_sizes=[2, 0, 2],
        num_microbatches=[2, 0, 1],
        state_shares=[0.0, 0.9, 0.1],
        recompute=[True, False, False],
    ),
    "four ranks, all unlike": Plan.by_hand(
        microbatch_sizes=[1, 2, 1, 0],
        num_microbatches=[3, 1, 1, 0],
        state_shares=[0.5, 0.0, 0.2, 0.3],
        recompute=[False, True, False, False],
    ),
    "four ranks in two stages": Plan.by_hand(
        microbatch_sizes=[1, 1, 2, 0],
        num_rounds=3,
        state_shares=[0.3, 0.7, 0.0, 1.0],
        recompute=[False, True, False, False],
        stages=[
            Stage(units=("embedding", "blocks.0"), num_ranks=2),
            Stage(units=("blocks.1", "head"), num_ranks=2),
        ],
    ),
}


def toy_corpus() -> Corpus:
    # Bytes that follow each other by a rule, so that there is something to learn.
    text = (np.arange(3000) ** 2 // 7 % 13).astype(np.uint8)
    return Corpus(train=text[:2400], held_out=text[2400:])


def make_trainer(
    plan: Plan,
    dtype: torch.dtype,
    num_steps: int = NUM_STEPS,
    device: torch.device | None = None,
) -> Trainer:
    torch.manual_seed(0)
    module = Decoder(MODEL).to(dtype)
    model = HetFSDP(module, plan, device=device)
    optimizer = OptimizerSpec(learning_rate=1e-2).build(list(model.parameters()))
    batches = GlobalBatches(
        corpus=toy_corpus(), seq_len=SEQ_LEN, global_batch_size=plan.global_batch_size
    )
    schedule = WarmupDecay(num_steps=num_steps, num_warmup_steps=5)
    return Trainer(model, optimizer, batches, schedule=schedule, device=device)


def judged(num_samples: int) -> TokenBatch:
    return held_out_windows(toy_corpus(), seq_len=SEQ_LEN, num_samples=num_samples)


def train_rank(
    rank: int, plan: Plan, dtype: torch.dtype, num_steps: int
) -> tuple[list[StepMetrics], Evaluation]:
    trainer = make_trainer(plan, dtype)
    steps = [trainer.train_step() for _ in range(num_steps)]
    return steps, trainer.evaluate(judged(4))


def curve(plan: Plan, dtype: torch.dtype, num_steps: int) -> tuple[np.ndarray, Evaluation]:
    """Loss and gradient norm of every step, the same on every rank; then an evaluation."""
    results = run_ranks(train_rank, plan.world_size, plan, dtype, num_steps)
    curves = [np.array([(s.mean_loss, s.grad_norm) for s in steps]) for steps, _ in results]
    for other in curves[1:]:
        np.testing.assert_array_equal(curves[0], other)
    evaluations = {evaluation for _, evaluation in results}
    assert len(evaluations) == 1
    return curves[0], evaluations.pop()


@pytest.fixture(scope="module")
def reference() -> tuple[np.ndarray, Evaluation]:
    """Plain PyTorch: one process, one batch, no HetFSDP."""
    torch.manual_seed(0)
    module = Decoder(MODEL).double()
    optimizer = OptimizerSpec(learning_rate=1e-2).build(list(module.parameters()))
    schedule = WarmupDecay(num_steps=NUM_STEPS, num_warmup_steps=5)
    batches = GlobalBatches(corpus=toy_corpus(), seq_len=SEQ_LEN, global_batch_size=6)
    curve = []
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * schedule(step)
        loss_sum, num_tokens = module(*tensors(batches[step]))
        loss = loss_sum / num_tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    with torch.no_grad():
        loss_sum, num_tokens = module(*tensors(judged(4)))
    evaluation = Evaluation(loss_sum=float(loss_sum), num_targets=int(num_tokens))
    return np.array(curve), evaluation


def tensors(batch: TokenBatch) -> list[Tensor]:
    return [torch.from_numpy(array) for array in batch.arrays]


@pytest.mark.parametrize("name", only(["three ranks, one only stores"], PLANS))
def test_the_loss_curve_is_that_of_one_process(
    name: str, reference: tuple[np.ndarray, Evaluation]
) -> None:
    losses, evaluation = curve(PLANS[name], torch.float64, NUM_STEPS)
    np.testing.assert_allclose(losses, reference[0], rtol=1e-9, atol=0)
    assert losses[-1, 0] < losses[0, 0] - 0.5
    assert evaluation.num_targets == reference[1].num_targets == 4 * SEQ_LEN
    assert evaluation.mean_loss == pytest.approx(reference[1].mean_loss, rel=1e-9)


def evaluate_rank(rank: int, plan: Plan, num_samples: int) -> tuple[float, int, int]:
    trainer = make_trainer(plan, torch.float64)
    evaluation = trainer.evaluate(judged(num_samples))
    assert trainer.model.training
    return evaluation.loss_sum, evaluation.num_targets, trainer.model.step


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["four ranks, all unlike", "four ranks in two stages"])
@pytest.mark.parametrize("num_samples", [1, 5, 6, 7, 20])
def test_an_evaluation_counts_every_sample_once(num_samples: int, name: str) -> None:
    plan = PLANS[name]
    [expected] = run_ranks(evaluate_rank, 1, PLANS["one rank"], num_samples)
    for loss_sum, num_targets, step in run_ranks(evaluate_rank, 4, plan, num_samples):
        assert loss_sum == pytest.approx(expected[0], rel=1e-12)
        assert (num_targets, step) == (num_samples * SEQ_LEN, 0)


def look_rank(rank: int, plan: Plan) -> Any:
    trainer = make_trainer(plan, torch.float32)
    for _ in range(3):
        trainer.train_step()
    trainer.evaluate(judged(6))  # is no part of a step
    first = trainer.look_at_devices()
    return first, trainer.look_at_devices()


@pytest.mark.parametrize(
    "name", one_in(2, ["four ranks in two stages", "four ranks, all unlike"])
)
def test_shares_of_busy_and_waiting_time_are_those_of_steps(name: str) -> None:
    plan = PLANS[name]
    looks = run_ranks(look_rank, 4, plan)
    assert len({first for first, _ in looks}) == 1  # all ranks are told the same
    first, second = looks[0]
    for use, rank in zip(first, plan.ranks, strict=True):
        assert 0 < use.busy_share + use.waiting_share <= 1
        assert (use.busy_share > 0) == (rank.rank_batch_size > 0)
        assert use.peak_memory_bytes > 2**20
    assert all(use.busy_share == use.waiting_share == 0 for use in second)


def test_batches_that_the_plan_does_not_deal_out_are_refused() -> None:
    plan = PLANS["one rank"]
    batches = GlobalBatches(corpus=toy_corpus(), seq_len=8, global_batch_size=5)
    model = HetFSDP(Decoder(MODEL), plan)
    with pytest.raises(ValueError, match="5 samples but the plan deals out 6"):
        Trainer(
            model,
            torch.optim.SGD(model.parameters()),
            batches,
            schedule=WarmupDecay(num_steps=1),
        )


def test_an_evaluation_says_bits() -> None:
    evaluation = Evaluation(loss_sum=8 * np.log(2), num_targets=4)
    assert evaluation.bits_per_target == pytest.approx(2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the record begin again")
def test_what_building_took_is_not_in_the_peak() -> None:
    [before_bytes, after_bytes] = run_ranks(_peaks_around_a_reset, 1, fresh_world=True)[0]
    assert before_bytes - after_bytes > 200 * 2**20


def _peaks_around_a_reset(rank: int) -> list[int]:
    built = torch.ones(300 * 2**20, dtype=torch.uint8)
    del built
    peak = PeakMemory(torch.device("cpu"))
    before_bytes = peak.read()
    make_trainer(PLANS["one rank"], torch.float32)
    return [before_bytes, peak.read()]
