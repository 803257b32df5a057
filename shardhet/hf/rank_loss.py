"""A rank's part of the loss: what transformers computes, as a sum over samples or tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from shardhet.hf.dealing import num_rows
from shardhet.hf.losses import LossKind, find_kind, num_labels
from shardhet.hf.view import TrainerView
from shardhet.training.loss_scaling import check_scale


class RankLoss:
    """The loss of a rank's samples, as a sum over them that can be added to other ranks'."""

    def __init__(self, trainer: TrainerView) -> None:
        self.kind: LossKind | None = None  # found out on the first batch
        self._trainer = trainer

    def sums(self, inputs: dict[str, Any]) -> tuple[Tensor, int, Any]:
        """This rank's loss sum, the number of items in it, and the model's outputs."""
        trainer = self._trainer
        if self.kind is None:
            self.kind = find_kind(
                trainer.het, inputs, trainer.label_names, lambda part: self._loss(part)[0]
            )
        loss, outputs = self._loss(inputs)
        if self.kind is LossKind.SUM:
            counted = self._num_counted(inputs)
            if counted is not None:
                return loss, int(counted), outputs
        num_items = num_labels(inputs, trainer.label_names)
        if not num_items:  # a mean over nothing would be NaN
            return torch.zeros((), device=trainer.args.device), 0, outputs
        return loss * num_items, num_items, outputs

    def as_called(self, inputs: dict[str, Any], num_items: Tensor | None) -> dict[str, Any]:
        """The arguments that ``compute_loss`` passes to the model."""
        trainer = self._trainer
        takes_labels = trainer.label_smoother is None and trainer.compute_loss_func is None
        called = {name: v for name, v in inputs.items() if takes_labels or name != "labels"}
        if num_items is not None and trainer.model_accepts_loss_kwargs:
            called["num_items_in_batch"] = num_items
        return called

    def divisor(self, num_items: int, num_items_in_batch: Tensor | int | None) -> Tensor | int:
        """What this rank adds to the number that the sum of all losses is divided by.

        ``num_items`` are those of one batch, ``num_items_in_batch`` those that transformers
        has counted in all batches of a step.
        """
        args = self._trainer.args
        if num_items_in_batch is None:  # transformers averages the means of the batches
            return num_items * self._trainer.current_gradient_accumulation_steps
        if self.kind is LossKind.SUM:
            return num_items_in_batch
        if args.gradient_accumulation_steps > 1:
            raise ValueError(
                "TrainingArguments: gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}, but the loss is a mean that ignores "
                "num_items_in_batch, so a plain Trainer adds up means. Leave it out, and "
                "give the plan more microbatches."
            )
        return num_items

    def backward(self, loss_sum: Tensor, divisor: Tensor | int) -> float:
        """The mean loss over all ranks; gradients are added, scaled with ``fp16=True``."""
        trainer = self._trainer
        het, scaler = trainer.het, trainer.loss_scaler
        if scaler is None:
            return het.backward(loss_sum, divisor) or 0.0
        mean = het.backward(scaler.scaled(loss_sum), divisor) or 0.0
        check_scale(scaler.scale, het.step, instead="bf16=True, or leave fp16 out")
        return mean / scaler.scale

    def smoothed(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Any
    ) -> tuple[Tensor, Any]:
        """The loss with label smoothing, and the model's outputs."""
        trainer = self._trainer
        labels = inputs.pop("labels")
        outputs = model(**self.as_called(inputs, num_items))
        name = unwrap_peft_model(trainer.model)._get_name()
        assert trainer.label_smoother is not None
        loss = trainer.label_smoother(
            outputs,
            labels,
            shift_labels=name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
            num_items_in_batch=num_items,
        )
        return loss, outputs

    def _loss(self, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The result of ``compute_loss`` for this rank's samples, as a sum if possible."""
        trainer = self._trainer
        counted = self._num_counted(inputs)
        one = None if counted is None else torch.ones((), device=trainer.args.device)
        if not num_rows(inputs):
            trainer.het(**self.as_called(inputs, one))
            return torch.zeros((), device=trainer.args.device), None
        loss, outputs = trainer.compute_loss(
            trainer.het, dict(inputs), return_outputs=True, num_items_in_batch=one
        )
        return loss, outputs

    def _num_counted(self, inputs: dict[str, Any]) -> Any:
        return self._trainer._get_num_items_in_batch([inputs], self._trainer.args.device)
