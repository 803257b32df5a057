"""The loss of a HetTrainer in stages, which the last one computes within the model's forward.

The runtime calls ``compute_loss`` where it would call the model, on all ranks; in stages before
the last one it ends in its middle.  So a step is one call with all rounds of all its batches.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.hf.losses import LossKind, find_kind, relabelled, unevenly_labelled
from shardhet.hf.rank_loss import RankLoss, leaving_nothing
from shardhet.records.plan import Plan
from shardhet.training.dealing.rows import num_rows, rounds_of, rows_at


class StagedLoss(RankLoss):
    """See the module; used as a ``RankLoss`` is."""

    _rounds: list[dict[str, Any]]  # of the step in progress

    def begin_step(self, batches: Sequence[Any], num_items_in_batch: Any) -> None:
        """Begin without rounds, also after a step that was stopped in its middle."""
        self.try_again(math.inf)
        self._rounds = []

    def run_batch(self, inputs: dict[str, Any], num_items_in_batch: Any) -> float:
        """Keep the rounds of a batch, and run the step after its last one; the mean loss then.

        Raises ``ValueError`` if the batches' losses cannot be added up.
        """
        trainer = self._trainer
        self.find_kind(inputs)
        num_batches = trainer.args.gradient_accumulation_steps
        is_counted = num_items_in_batch is not None and self.kind is LossKind.SUM
        if num_batches > 1 and not is_counted:
            raise ValueError(
                f"TrainingArguments: gradient_accumulation_steps={num_batches}, but the items "
                "of this loss are not counted, so a plain Trainer adds up means, which stages "
                "cannot. Leave it out, and give the plan more rounds: Plan.by_hand(num_rounds="
                f"{num_batches})."
            )
        self._rounds += rounds_of(inputs, trainer.plan, trainer.het.position)
        if not trainer.accelerator.sync_gradients:
            return 0.0
        rounds, self._rounds = self._rounds, []
        mine = sum(self.num_items(each) for each in rounds)
        counts = trainer.het.exchange([mine])
        num_items = sum(int(counts[i][0]) for i in trainer.plan.groups[-1])
        scaler = trainer.loss_scaler
        of_step = None if scaler is None else scaler.begin_step()
        with trainer.het.computing(self._of_training):
            mean = trainer.het.step_of(rounds, num_items, of_step)
        self.check_scale()
        return mean or 0.0

    def sums(
        self, inputs: dict[str, Any], *, with_outputs: bool = True
    ) -> tuple[Tensor, int, Any]:
        """As of ``RankLoss``, on ranks of the last stage; zeros on others."""
        self.find_kind(inputs)
        with self._trainer.het.computing(self._of_evaluation):
            loss_sum, num_items, outputs = self._trainer.het(**inputs)
        return loss_sum, int(num_items), outputs

    def find_kind(self, inputs: dict[str, Any], others: dict[str, Any] | None = None) -> None:
        """Find out the kind of the loss on the first batch.  Collective."""
        if self.kind is None:
            trainer, names = self._trainer, self._trainer.label_names
            counts = [int(n) for (n,) in trainer.het.exchange([num_rows(inputs)])]
            num_samples = sum(counts[i] for i in trainer.plan.groups[-1])
            first, second, uneven = halves_of_last_stage(trainer.plan, num_samples)
            own = trainer.plan.sample_indices(trainer.het.position, num_samples)
            rows = [row for row, sample in enumerate(own) if sample in uneven]
            of_first = [row for row, sample in enumerate(own) if sample in first]
            tried = [
                [
                    rows_at(changed, [row for row, sample in enumerate(own) if sample in part])
                    for part in (first | second, first, second)
                ]
                for changed in (
                    unevenly_labelled(inputs, names, rows),
                    relabelled(inputs, names, of_first, self.num_classes),
                )
            ]
            with leaving_nothing(trainer):
                self.kind = find_kind(
                    trainer.het, tried, names, self._as_it_is, predicts_next=self.predicts_next
                )

    def _as_it_is(self, inputs: dict[str, Any], number: float) -> Tensor:
        """The result of ``compute_loss`` on ranks of the last stage, without gradients."""
        with self._said_to_be(number), self._trainer.het.computing(self._of_outputs):
            loss: Tensor = self._trainer.het(**inputs)
        return loss

    # Called in place of the module, on tensors that stages hand over

    def _of_training(self, module: nn.Module, **inputs: Any) -> tuple[Tensor, Tensor]:
        loss, _ = self._computed(module, inputs, with_outputs=False)
        loss_sum, num_items = self.summed(loss, inputs)
        return loss_sum, torch.tensor(int(num_items))

    def _of_evaluation(self, module: nn.Module, **inputs: Any) -> tuple[Tensor, Tensor, Any]:
        loss, outputs = self._computed(module, inputs, with_outputs=True)
        loss_sum, num_items = self.summed(loss, inputs)
        return loss_sum, torch.tensor(int(num_items)), outputs

    def _of_outputs(self, module: nn.Module, **inputs: Any) -> Tensor:
        loss, _ = self._computed(module, inputs, with_outputs=False)
        return loss

    def _computed(
        self, module: nn.Module, inputs: dict[str, Any], *, with_outputs: bool
    ) -> tuple[Tensor, Any]:
        trainer = self._trainer
        one = self._number_if_counted(inputs)
        with trainer.compute_loss_context_manager():
            return self.computed(module, inputs, one, with_outputs=with_outputs)


def halves_of_last_stage(plan: Plan, num_samples: int) -> tuple[set[int], set[int], set[int]]:
    """Two parts of a step's samples for ``find_kind``, and those whose labels become fewer.

    Each part is of one round, so that all stages have it in one order; a rank of the last stage
    has samples of both, or losses of parts would add up whatever their kind is.  Raises
    ``ValueError`` if none has two samples.
    """
    rounds = [
        [plan.round_samples(i, number, num_samples) for i in plan.groups[-1]]
        for number in range(min(2, plan.num_rounds))
    ]
    uneven = {own[0] for own in rounds[0] if own}
    if any(len(own) > 1 for own in rounds[0]):
        first = {i for own in rounds[0] for i in own[: (len(own) + 1) // 2]}
        return first, {i for own in rounds[0] for i in own} - first, uneven
    if len(rounds) > 1 and any(rounds[1]):
        first, second = ({i for own in each for i in own} for each in rounds)
        return first, second, uneven
    raise ValueError(
        "HetTrainer: no rank of the last stage has two samples of the first batch, which show "
        "whether the loss is a sum or a mean. Give one of them two, or the plan a round more."
    )
