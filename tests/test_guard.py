"""Bad steps: all ranks decide alike, and nothing of a bad step stays."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardhet import HetFSDP, Plan
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.worker import Run
from shardhet.config.checks import ConfigError
from shardhet.training.guard import NUM_STEPS_TO_KNOW, BadStepGuard
from shardhet.training.hooks.bad_steps import OnBadStep
from shardhet.training.trainer import Run as RunModel
from shardhet.training.trainer import run_plainly
from tests.selection import for_campaign
from tests.test_resume import TEXT, train_until
from tests.test_trainer import make_trainer
from tests.test_worker import configure, write_pages
from tests.worlds import run_ranks, run_ranks_expecting_failure

PLAN = Plan.by_hand(microbatch_sizes=[3, 1], rank_batch_sizes=[5, 1], state_shares=[0.2, 0.8])
BAD_STEP = 13
Poison = Literal["loss", "gradient", "spike", "none"]


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


def with_loss(model: HetFSDP, change: Callable[[Tensor], Tensor]) -> RunModel:
    """As ``run_plainly``, with another loss in every round that is trained."""

    def run(call: Any, tensors: Any) -> Any:
        backward = model.backward

        def of_another(loss_sum: Tensor, *given: Any, **named: Any) -> float | None:
            return backward(change(loss_sum), *given, **named)

        with mock.patch.object(model, "backward", of_another):
            return run_plainly(call, tensors)

    return run


def poisoned(model: HetFSDP, rank: int, poison: Poison) -> RunModel:
    """As ``run_plainly``, but in one step one rank's loss or gradient is bad."""

    def change(loss_sum: Tensor) -> Tensor:
        is_there = model.step == BAD_STEP
        if is_there and poison == "spike":
            return loss_sum * 1e4  # on all ranks, as no loss adds up otherwise
        if rank == 1 and is_there and poison == "loss":
            return loss_sum * math.nan
        if rank == 1 and is_there and poison == "gradient":
            poisoned_loss: Tensor = Scaled.apply(loss_sum, math.nan)
            return poisoned_loss
        return loss_sum

    return with_loss(model, change)


def train(rank: int, poison: Poison, guard: dict[str, Any], num_steps: int) -> Any:
    trainer = make_trainer(PLAN, torch.float64)
    trainer._run = poisoned(trainer.model, rank, poison)
    trainer.guard = BadStepGuard(**guard)
    steps = [trainer.train_step() for _ in range(num_steps)]
    rows = [p.detach().clone() for p in trainer.model.parameters()]
    return [(s.step, s.why_skipped) for s in steps], rows


def test_a_trainer_makes_nothing_of_a_bad_gradient() -> None:
    guard = {"on_bad_step": OnBadStep.SKIP}
    before = run_ranks(train, 2, "none", guard, BAD_STEP)
    for (steps, rows), (_, same) in zip(
        run_ranks(train, 2, "gradient", guard, BAD_STEP + 1), before, strict=True
    ):
        assert steps[-1] == (BAD_STEP + 1, "the gradient norm is nan")
        assert all(map(torch.equal, rows, same))


@pytest.mark.parametrize("poison", [for_campaign("loss"), "gradient"])
def test_a_step_that_is_not_finite_stops_all_ranks_by_default(poison: Poison) -> None:
    outcomes = run_ranks_expecting_failure(train, 2, poison, {}, BAD_STEP + 2)
    for outcome in outcomes:
        assert outcome.exception_name == "FloatingPointError", outcome
        assert f"step {BAD_STEP + 1}: the " in outcome.message


def test_many_bad_steps_in_a_row_stop_the_run() -> None:
    guard = BadStepGuard(OnBadStep.SKIP, max_in_a_row=3)
    for step in (1, 2):
        guard.check(step, "the loss is nan")
    assert guard.judge(1.0, 1.0) is None  # a good step between
    for step in (4, 5):
        guard.check(step, "the loss is nan")
    with pytest.raises(FloatingPointError, match="step 6: the loss is nan, and so were the 2"):
        guard.check(6, "the loss is nan")


def test_a_spike_is_recognized_by_the_median_of_the_good_steps() -> None:
    guard = BadStepGuard(OnBadStep.SKIP, spike_factor=3.0)
    assert guard.judge(100.0, 1.0) is None  # nothing is known yet
    for _ in range(NUM_STEPS_TO_KNOW):
        assert guard.judge(2.0, 1.0) is None
    for _ in range(3):  # bad steps are not remembered
        assert guard.judge(6.1, 1.0) == "the loss is 6.1, 3.0 times the usual 2"
    assert guard.judge(5.9, 1.0) is None
    assert guard.judge(2.0, 3.5) == "the gradient norm is 3.5, 3.5 times the usual 1"
    assert guard.judge(2.0, math.inf) == "the gradient norm is inf"


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def run_alone(path: str) -> Run:
    folder = RunFolder(Path(path))
    env = RankEnv(rank=0, world_size=1, local_rank=0, store_host="", store_port=0)
    return Run(folder.load_config(), folder, env, torch.device("cpu"))


def judged_by_when_resumed(rank: int, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = run_alone(path).trainer
    assert trainer.loss_scaler is not None
    return trainer.guard.state_dict(), trainer.loss_scaler.state_dict()


def test_a_run_that_goes_on_judges_steps_by_those_before_it_was_cut_off(
    tmp_path: Path,
) -> None:
    keys = (*TEXT, f"data.path={write_pages(tmp_path / 'text')}", "plan.global_batch_size=2")
    keys += ("precision=FP16", "cluster.num_ranks=1", "resume=auto")
    path = configure(tmp_path / "run", *keys)
    run_ranks(train_until, 1, path, 1, 2)
    [(judged_by, scale)] = run_ranks(judged_by_when_resumed, 1, path)
    assert scale["_growth_tracker"] == 2
    taken = entries(tmp_path / "run")
    assert judged_by["losses"] == [each["loss"] for each in taken if "loss" in each]
    assert judged_by["norms"] == [each["grad_norm"] for each in taken if "grad_norm" in each]
    assert len(judged_by["norms"]) == 2


def roll_back_once(rank: int, path: str) -> tuple[int, list[int]]:
    """How many batches are left out at first, and which are taken; number 5 is bad."""
    run = run_alone(path)
    trainer, taken = run.trainer, list[int]()
    left_out = trainer.num_batches_skipped

    def change(loss_sum: Tensor) -> Tensor:
        taken.append(trainer.model.step + trainer.num_batches_skipped)
        assert len(taken) < 20
        return loss_sum * (math.nan if taken[-1] == 5 else 1.0)

    trainer._run = with_loss(trainer.model, change)
    run.train()
    return left_out, taken


def test_a_run_that_rolls_back_leaves_the_bad_batch_out_for_good(tmp_path: Path) -> None:
    keys = (*TEXT, f"data.path={write_pages(tmp_path / 'text')}", "plan.global_batch_size=2")
    keys += ("cluster.num_ranks=1", "guard.on_bad_step=ROLL_BACK", "resume=auto")
    for num_steps, expected in ((7, (0, list(range(9)))), (8, (2, [9]))):
        path = configure(tmp_path / "run", *keys, f"num_steps={num_steps}")
        assert run_ranks(roll_back_once, 1, path) == [expected]


def test_what_steps_are_judged_by_is_read_as_it_was_written() -> None:
    guards = [BadStepGuard(OnBadStep.SKIP, spike_factor=3.0, max_in_a_row=2) for _ in range(2)]
    for _ in range(NUM_STEPS_TO_KNOW):
        guards[0].judge(2.0, 1.0)
    guards[0].check(NUM_STEPS_TO_KNOW, "the loss is nan")
    guards[1].load_state_dict(guards[0].state_dict())
    assert guards[1].judge(6.1, 1.0) == "the loss is 6.1, 3.0 times the usual 2"
    with pytest.raises(FloatingPointError, match="and so were the 1 before it"):
        guards[1].check(NUM_STEPS_TO_KNOW + 1, "the loss is nan")


def test_rolling_back_requires_checkpoints(tmp_path: Path) -> None:
    path = configure(tmp_path / "run", "checkpoint.every=0", "guard.on_bad_step=ROLL_BACK")
    with pytest.raises(ConfigError, match="there is no checkpoint to load"):
        RunFolder(Path(path)).load_config()
