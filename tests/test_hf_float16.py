"""HetTrainer in 16 bits: bf16=True and fp16=True train as a plain Trainer does."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardhet import Plan
from tests.selection import for_campaign
from tests.test_guard import Scaled
from tests.test_hf_trainer import (
    FIRST_CASE_S,
    IN_STAGES,
    PLAN,
    VOCAB_SIZE,
    arguments,
    as_torchrun_starts,
    llama,
    texts,
)
from tests.worlds import run_ranks

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

NUM_STEPS = 6
BASE = {
    "max_steps": NUM_STEPS,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 3,
}


def loss_in_float32(
    outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None
) -> Tensor:
    logits = outputs.logits[:, :-1].reshape(-1, VOCAB_SIZE).float()
    targets = labels[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class PlainFloat16(transformers.Trainer):
    """What transformers and accelerate do with fp16=True on a GPU; they refuse it on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accelerator.scaler = torch.amp.GradScaler("cpu")

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return torch.autocast("cpu", torch.float16)

    def _clip_grad_norm(self, model: Any) -> Any:
        self.accelerator.scaler.unscale_(self.optimizer.optimizer)
        return super()._clip_grad_norm(model)


def made(trainer_class: Any, folder: str, loss: Any = loss_in_float32, **changes: Any) -> Any:
    options = {"plan": PLAN} if trainer_class.__name__ == "HetTrainer" else {}
    options["plan"] = changes.pop("plan", options.get("plan"))
    trainer = trainer_class(
        llama().float(),
        arguments(folder, **{**BASE, **changes}),
        train_dataset=texts(31, seed=1),
        eval_dataset=texts(7, seed=2),
        compute_loss_func=loss,
        **{name: value for name, value in options.items() if value is not None},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if isinstance(loss, Overflowing):
        loss.trainer = trainer
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "learning_rate")
    return [{n: each[n] for n in names} for each in trainer.state.log_history if "loss" in each]


def train(rank: int, folder: str, precision: str, plan: Plan) -> Any:
    from shardhet.hf import HetTrainer

    with as_torchrun_starts(rank, PLAN.world_size):
        trainer = made(HetTrainer, folder, plan=plan, **{precision: True})
        trainer.train()
        return logged(trainer), trainer.evaluate()["eval_loss"], trainer.het.state_dict()


@pytest.mark.parametrize(
    "precision, plan",
    [
        ("fp16", PLAN),
        for_campaign("fp16", IN_STAGES),
        for_campaign("bf16", PLAN),
        for_campaign("bf16", IN_STAGES),
    ],
)
def test_it_trains_as_a_plain_trainer(precision: str, plan: Plan, tmp_path: Path) -> None:
    folder = str(tmp_path)
    results = run_ranks(train, 3, folder, precision, plan, timeout_s=FIRST_CASE_S)
    found, evaluated, params = results[0]
    sizes = dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), PLAN.global_batch_size
    )
    plain: Any = PlainFloat16
    if precision == "bf16":
        plain, sizes = transformers.Trainer, {**sizes, "bf16": True}
    trainer = made(plain, folder, **sizes)
    trainer.train()
    rounding = 2e-2 if precision == "bf16" else 3e-3
    for entry, expected in zip(found, logged(trainer), strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=rounding)
        assert entry["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5 * rounding)
        assert entry["learning_rate"] == expected["learning_rate"]
    assert evaluated == pytest.approx(trainer.evaluate()["eval_loss"], rel=rounding)
    assert params["lm_head.weight"].dtype == torch.float32  # the optimizer's, as with autocast


class Overflowing:
    """A loss of which one rank's gradients overflow in some steps."""

    def __init__(self, rank: int, steps: Any, culprit: int = 0) -> None:
        self.trainer: Any = None
        self._steps = steps if rank == culprit else ()

    def __call__(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        found = loss_in_float32(outputs, labels, num_items_in_batch)
        is_training = torch.is_grad_enabled() and found.requires_grad
        if is_training and self.trainer.het.step in self._steps:
            return Scaled.apply(found, float("inf"))
        return found


class Watching(transformers.TrainerCallback):
    """Notes the scale, and this rank's rows, after every step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.scales: list[float] = []
        self.rows: list[Tensor] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.scales.append(self.trainer.loss_scaler.get_scale())
        self.rows.append(next(self.trainer.het.parameters()).detach().clone())


def overflow(rank: int, folder: str, steps: Any, plan: Plan) -> Any:
    from shardhet.hf import HetTrainer

    with as_torchrun_starts(rank, PLAN.world_size):
        loss = Overflowing(rank, steps, culprit=plan.groups[-1][0])
        # accelerate takes a fused optimizer that changes nothing for one that has stepped.
        trainer = made(HetTrainer, folder, loss, plan=plan, fp16=True, optim="adamw_torch")
        watching = Watching(trainer)
        trainer.add_callback(watching)
        trainer.train()
        rows = watching.rows
        changed = [not torch.equal(*pair) for pair in pairwise(rows)]
        rates = [each["learning_rate"] for each in logged(trainer)]
        return watching.scales, changed if rows[0].numel() else None, rates


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_launchers_precision_is_that_of_training(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch` writes its own and its file's into the environment."""
    from shardhet.hf import HetTrainer

    found = []
    for launched, options in ((precision, {}), ("no", {precision: True}), ("no", {})):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")  # as it is without
        monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
        args = arguments(tmp_path, max_steps=2, logging_steps=1, **options)
        trainer = HetTrainer(llama().float(), args, plan=[8], train_dataset=texts(8, seed=1))
        assert trainer.accelerator.mixed_precision == ("bf16" if trainer.args.bf16 else "no")
        assert (trainer.loss_scaler is not None) == trainer.args.fp16
        trainer.train()
        found.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert found[0] == found[1] != found[2]
