"""A HetTrainer that was stopped goes on as if it had not been, under any plan."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardhet import Plan
from shardhet.checkpoint import CheckpointError
from tests.selection import for_campaign
from tests.test_hf_trainer import (
    FIRST_CASE_S,
    IN_ROUNDS,
    ONE,
    PLAN,
    arguments,
    as_torchrun_starts,
    llama,
    loss_in_float64,
    texts,
)
from tests.worlds import run_ranks

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

OTHER = Plan.by_hand(
    microbatch_sizes=[1, 3], rank_batch_sizes=[1, 6], state_shares=[0.8, 0.2], recompute=True
)
OTHER_IN_ROUNDS = Plan.by_hand(
    microbatch_sizes=[1, 3], state_shares=[0.8, 0.2], num_rounds=2, global_batch_size=7
)
NUM_STEPS = 11
STOPS_AFTER = 7  # the checkpoint is that of step 6, in the middle of the second epoch
SAME = 1e-12
NUM_SAMPLES = 30  # an epoch is five batches of 7, of which the last has 2 samples
BASE: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "learning_rate": 3e-3,
    "warmup_steps": 4,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "sgd from the end of an epoch": {
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "save_steps": 5,
    },
    "by length, accumulated": {
        "train_sampling_strategy": "group_by_length",
        "gradient_accumulation_steps": 2,
    },
    "drawing": {},
    "dropout": {},  # by microbatches, so that another plan trains with other masks
}


# Trained in rounds and resumed in none; the others the other way round.
IN_ROUNDS_FIRST = ("base", "by length, accumulated", "drawing")


class Drawing:
    """A collator that draws random numbers from torch's generator."""

    mlm = True

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        is_hidden = torch.rand(batch["input_ids"].shape) < 0.3
        return {**batch, "input_ids": batch["input_ids"].masked_fill(is_hidden, 3)}


class Stop(transformers.TrainerCallback):
    """Ends the training after a step, as somebody who presses Ctrl-C does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == STOPS_AFTER


def make(
    folder: str, plan: Plan, variant: str = "base", *, hooks: Sequence[Any] = (), **changes: Any
) -> Any:
    """The trainer of a variant."""
    from shardhet.hf import HetTrainer

    trainer = HetTrainer(
        llama(attention_dropout=0.2 if variant == "dropout" else 0.0),
        arguments(folder, **{**BASE, **VARIANTS[variant], **changes}),
        plan=plan,
        hooks=hooks,
        train_dataset=texts(NUM_SAMPLES, seed=1),
        eval_dataset=texts(9, seed=2),
        compute_loss_func=loss_in_float64,
        data_collator=Drawing() if variant == "drawing" else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def result_of(trainer: Any) -> dict[str, Any]:
    """Everything logged per step, and the parameters."""
    kept = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    logged = [each for each in trainer.state.log_history if "loss" in each]
    return {
        "log": [{name: each[name] for name in kept} for each in logged],
        "state": trainer.het.state_dict(),
        "step": trainer.state.global_step,
    }


def undisturbed_and_stopped(rank: int, folder: str, variants: Sequence[str]) -> Any:
    """The results of undisturbed runs; others are stopped, and resumed under their plan."""
    found = {}
    for variant in variants:
        plan = IN_ROUNDS if variant in IN_ROUNDS_FIRST else PLAN
        with as_torchrun_starts(rank, plan.world_size):
            whole = make(f"{folder}/whole", plan, variant, save_strategy="no")
            whole.train()
            place = f"{folder}/{variant}"
            stopped = make(place, plan, variant)
            stopped.add_callback(Stop())
            stopped.train()
            assert stopped.state.global_step == STOPS_AFTER
            shutil.copytree(place, f"{place} again", dirs_exist_ok=True) if rank == 0 else None
            resumed = make(place, plan, variant, save_strategy="no")
            resumed.train(resume_from_checkpoint=True)
            found[variant] = result_of(whole), result_of(resumed)
    return found if rank == 0 else None


def resumed_by_two(rank: int, folder: str, variants: Sequence[str]) -> Any:
    """The results of runs that go on under another plan with fewer ranks."""
    found = {}
    for variant in variants:
        with as_torchrun_starts(rank, OTHER.world_size):
            path = f"{folder}/{variant} again"
            plan = OTHER if variant in IN_ROUNDS_FIRST else OTHER_IN_ROUNDS
            trainer = make(path, plan, variant, save_strategy="no")
            trainer.train(resume_from_checkpoint=path + "/checkpoint-" + first_step(variant))
            found[variant] = result_of(trainer)
    return found if rank == 0 else None


def first_step(variant: str) -> str:
    """That of the last checkpoint before the run was stopped."""
    every = {**BASE, **VARIANTS[variant]}["save_steps"]
    return str(STOPS_AFTER // every * every)


@pytest.mark.parametrize(
    "variants",
    [
        ["by length, accumulated"],
        for_campaign(["dropout", "base", "sgd from the end of an epoch", "drawing"]),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    variants: list[str], tmp_path: Path
) -> None:
    found = run_ranks(
        undisturbed_and_stopped, 3, str(tmp_path), variants, timeout_s=FIRST_CASE_S
    )[0]
    exact = [each for each in variants if each != "dropout"]
    by_two = run_ranks(resumed_by_two, 2, str(tmp_path), exact, timeout_s=FIRST_CASE_S)[0]
    for variant in variants:
        whole, resumed = found[variant]
        assert resumed["log"] == whole["log"], variant  # bit by bit
        assert resumed["step"] == NUM_STEPS
        for fqn, param in whole["state"].items():
            assert torch.equal(resumed["state"][fqn], param), (variant, fqn)
    for variant in exact:
        whole, _ = found[variant]
        for fqn, param in whole["state"].items():
            torch.testing.assert_close(by_two[variant]["state"][fqn], param, rtol=0, atol=SAME)
        for entry, expected in zip(by_two[variant]["log"], whole["log"], strict=True):
            assert entry == pytest.approx(expected, rel=1e-6), variant


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process with checkpoints after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    make(str(folder), ONE, max_steps=6).train()
    return folder


def test_what_cannot_be_resumed_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    place = str(saved / "checkpoint-3")
    changed = {
        "seed 42 but here it is 5": {"seed": 5},
        "gradient_accumulation_steps 1 but": {"gradient_accumulation_steps": 2},
        "order 'SeedableRandomSampler' but": {"train_sampling_strategy": "sequential"},
        "drop_last False but": {"dataloader_drop_last": True},
    }
    for message, changes in changed.items():
        with pytest.raises(ValueError, match=message):
            make(str(tmp_path), ONE, **changes).train(resume_from_checkpoint=place)
    wider = Plan.even(1, microbatch_size=5)
    with pytest.raises(ValueError, match="global_batch_size 4 but here it is 5"):
        make(str(tmp_path), wider).train(resume_from_checkpoint=place)
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        make(str(tmp_path / "empty"), ONE).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        make(str(tmp_path), ONE).train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="Leave save_only_model out"):
        make(
            str(tmp_path),
            ONE,
            save_only_model=True,
            load_best_model_at_end=True,
            eval_strategy="steps",
            eval_steps=3,
        )


def test_masks_drawn_by_worker_processes_are_not_resumed(tmp_path: Path) -> None:
    make(str(tmp_path), ONE, "drawing", max_steps=6).train()
    trainer = make(str(tmp_path), ONE, "drawing", dataloader_num_workers=1)
    with pytest.raises(ValueError, match="dataloader_num_workers=1"):
        trainer.train(resume_from_checkpoint=True)


def test_the_newest_whole_checkpoint_is_gone_on_from(saved: Path, tmp_path: Path) -> None:
    from shardhet.hf.resuming import _newest

    for number, damage in enumerate((half_written, without_state, cut)):
        folder = Path(shutil.copytree(saved, tmp_path / str(number)))
        assert _newest(folder).name == "checkpoint-6"
        damage(folder / "checkpoint-6")
        assert _newest(folder).name == "checkpoint-3"


def half_written(folder: Path) -> None:
    path = folder / "trainer_state.json"
    path.write_text(path.read_text()[:50])


def without_state(folder: Path) -> None:
    shutil.rmtree(folder / "shardhet")


def cut(folder: Path) -> None:
    largest = max((folder / "shardhet").iterdir(), key=lambda each: each.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def test_a_run_in_float16_goes_on_with_its_scale(tmp_path: Path) -> None:
    make(str(tmp_path), ONE, fp16=True, max_steps=3).train()
    resumed = make(str(tmp_path), ONE, fp16=True, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.loss_scaler.state_dict()["_growth_tracker"] == 4


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """Of a run whose learning rate is so high that it is not the last."""
    how = {"learning_rate": 0.3, "warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 3}
    trainer = make(str(tmp_path), ONE, load_best_model_at_end=True, **how)
    trainer.train()
    history = trainer.state.log_history
    losses = [each["eval_loss"] for each in history if "eval_loss" in each]
    assert trainer.evaluate()["eval_loss"] == min(losses) < losses[-1]


def test_a_checkpoint_of_a_run_opens_with_from_pretrained(saved: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(saved / "checkpoint-6")
    assert model.config.vocab_size == 64
    state = json.loads((saved / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
