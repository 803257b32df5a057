"""What people write into trainers and around them, under a plan and in a plain Trainer."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardhet import Plan
from tests.worlds import TRANSFORMERS, preload, run_ranks

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
preload(*TRANSFORMERS)
from tests.test_hf_trainer import FIRST_CASE_S, classifier, labelled  # noqa: E402
from tests.trainer_options import PARAM_BAR, arguments, as_torchrun_starts  # noqa: E402

PLAN = Plan.by_hand(microbatch_sizes=[3, 1])
ONE_EACH = Plan.by_hand(microbatch_sizes=[1, 1])


class Seeded:
    """A habit: what is done with a trainer, whose class may be derived."""

    plan = PLAN
    options: ClassVar[dict[str, Any]] = {}

    def derived(self, kind: Any) -> Any:
        return kind

    def use(self, trainer: Any, args: Any) -> list[Any]:
        trainer.args.data_seed = 7  # which a Trainer reads when it is made
        trainer.train()
        return []


class Faster(Seeded):
    def use(self, trainer: Any, args: Any) -> list[Any]:
        args.learning_rate = 1e-2
        trainer.train()
        return []


class Evaluated(Seeded):
    def use(self, trainer: Any, args: Any) -> list[Any]:
        found = []
        for call in (trainer.evaluate, trainer.train, trainer.evaluate):
            call()
            found.append(trainer.model.training)
        return found


def with_weights(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator that weighs each sample by how often its batch has its label."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    counts = torch.bincount(batch["labels"], minlength=3).double()
    return {**batch, "weight": 1 / counts[batch["labels"]]}


class WithLoss(Seeded):
    """Trains with a ``loss`` of its own."""

    options: ClassVar = {"data_collator": with_weights}

    def derived(self, kind: Any) -> Any:
        loss_of = self.loss

        class Derived(kind):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
            ) -> Any:
                out = model(input_ids=inputs["input_ids"])
                losses = F.cross_entropy(out.logits, inputs["labels"], reduction="none")
                loss = loss_of(self, losses, inputs)
                return (loss, out) if return_outputs else loss

        return Derived

    def use(self, trainer: Any, args: Any) -> list[Any]:
        trainer.train()
        return []

    def loss(self, trainer: Any, losses: Tensor, inputs: Any) -> Tensor:
        return (inputs["weight"] * losses).mean()


class Running(WithLoss):
    plan = ONE_EACH
    options: ClassVar = {}
    seen: Tensor | None = None

    def loss(self, trainer: Any, losses: Tensor, inputs: Any) -> Tensor:
        own = inputs["input_ids"].double().mean()
        self.seen = own if self.seen is None else 0.9 * self.seen + 0.1 * own
        return losses.mean() * own / self.seen


class SummedLater(WithLoss):
    options: ClassVar = {}

    def loss(self, trainer: Any, losses: Tensor, inputs: Any) -> Tensor:
        return losses.mean() if trainer.state.epoch < 1 else losses.sum()


class SummedWithin(WithLoss):
    """A sum in the last step of the first epoch alone."""

    options: ClassVar = {}

    def loss(self, trainer: Any, losses: Tensor, inputs: Any) -> Tensor:
        return losses.sum() if trainer.state.global_step == 2 else losses.mean()


class Centred(Seeded):
    options: ClassVar = {
        "preprocess_logits_for_metrics": lambda logits, _: logits - logits.mean(0),
        "compute_metrics": lambda found: {"sum": float(abs(found.predictions).sum())},
    }

    def use(self, trainer: Any, args: Any) -> list[Any]:
        return [trainer.evaluate()["eval_sum"]]


class Likeliest(Centred):
    options: ClassVar = {
        **Centred.options,
        "preprocess_logits_for_metrics": lambda z, _: z.argmax(-1),
    }


def used(rank: int, name: str, folder: str, is_plain: bool) -> Any:
    """What a habit returns, parameters at the end, and the losses that are logged."""
    from shardhet.hf import HetTrainer

    habit: Seeded = globals()[name]()
    sized = {"per_device_eval_batch_size": 4 if is_plain else 2}
    if is_plain:
        sized["per_device_train_batch_size"] = habit.plan.global_batch_size
    args = arguments(folder, max_steps=6, logging_steps=1, remove_unused_columns=False, **sized)
    data = {"train_dataset": labelled(12), "eval_dataset": labelled(8)}
    options = habit.options if is_plain else {**habit.options, "plan": habit.plan}
    kind = habit.derived(transformers.Trainer if is_plain else HetTrainer)
    trainer = kind(classifier(), args, **data, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    found = habit.use(trainer, args)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*found, *losses], getattr(trainer, "het", trainer.model).state_dict()


def by_plan(rank: int, name: str, folder: str) -> Any:
    with as_torchrun_starts(rank, 2):
        try:
            return used(rank, name, folder, is_plain=False)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("name", ["Seeded", "Faster", "Evaluated", "WithLoss", "Likeliest"])
def test_habits_are_those_of_a_plain_trainer(name: str, tmp_path: Path) -> None:
    found = run_ranks(by_plan, 2, name, str(tmp_path), timeout_s=FIRST_CASE_S)[0]
    assert not isinstance(found, str), found
    numbers, params = used(0, name, str(tmp_path), is_plain=True)
    assert found[0] == pytest.approx(numbers, rel=1e-6)  # losses are logged in float32
    for fqn, param in params.items():
        torch.testing.assert_close(found[1][fqn], param, rtol=0, atol=PARAM_BAR)


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("Running", "another when it is computed again"),
        ("SummedLater", "not all of it is divided by num_items_in_batch"),
        ("SummedWithin", "not all of it is divided by num_items_in_batch"),
        ("Centred", "what it returns for a sample depends on others of its batch"),
    ],
)
def test_habits_that_depend_on_the_batch_are_refused(
    name: str, sentence: str, tmp_path: Path
) -> None:
    for found in run_ranks(by_plan, 2, name, str(tmp_path), timeout_s=FIRST_CASE_S):
        assert sentence in found
