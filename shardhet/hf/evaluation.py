"""Evaluation under a plan: losses over all tokens, predictions in the dataset's order."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import nested_numpify
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from shardhet.hf.dealing import num_rows
from shardhet.hf.predictions import joined, predictions_in

if TYPE_CHECKING:
    from shardhet.hf.trainer import HetTrainer


class EvaluationPass:
    """One pass over a dataset, batch by batch."""

    def __init__(
        self, trainer: "HetTrainer", *, loss_only: bool, ignore_keys: list[str] | None
    ) -> None:
        """``ignore_keys`` are outputs that are no predictions; None: those of the model."""
        self._trainer = trainer
        self._loss_only = loss_only
        if ignore_keys is None:
            config = getattr(trainer.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        self._ignore_keys = ignore_keys
        self._sums = [0.0, 0.0]  # of the losses and of their items, on this rank
        self._gathered: list[Any] = [None, None, None]  # predictions, labels, inputs

    def add(self, inputs: dict[str, Any]) -> None:
        """Evaluate this rank's samples of one batch.  Collective."""
        loss_sum, num_items, *parts = self._predict(inputs)
        self._sums = [self._sums[0] + loss_sum, self._sums[1] + num_items]
        if self._loss_only:
            return
        mine = [None if part is None else nested_numpify(part) for part in parts]
        for rank_parts in self._trainer.het.exchange_objects(mine):
            self._gathered = list(map(joined, self._gathered, rank_parts))

    @torch.no_grad()
    def _predict(self, inputs: dict[str, Any]) -> tuple[float, int, Any, Any, Any]:
        """This rank's loss sum, its number of items, and predictions, labels and inputs."""
        trainer = self._trainer
        inputs = trainer._prepare_inputs(inputs)
        names = trainer.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        with trainer.compute_loss_context_manager():
            if has_labels:
                loss_sum, num_items, outputs = trainer.rank_loss.sums(inputs)
            else:
                loss_sum, num_items = torch.zeros(()), 0
                outputs = trainer.het(**inputs)
        if self._loss_only or not num_rows(inputs):
            return float(loss_sum), num_items, None, None, None
        logits = predictions_in(outputs, self._ignore_keys, has_loss=has_labels)
        labels: Any = tuple(inputs[name] for name in names) if has_labels else None
        labels = labels[0] if labels is not None and len(labels) == 1 else labels
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        main_input = None
        if "inputs" in trainer.args.include_for_metrics:
            main_input = inputs[getattr(trainer.model, "main_input_name", "input_ids")]
        return float(loss_sum), num_items, logits, labels, main_input

    def result(self, num_samples: int, prefix: str) -> EvalLoopOutput:
        """The metrics over all ranks, named with ``prefix``.  Collective."""
        predictions, labels, inputs = self._gathered
        metrics: dict[str, Any] = {}
        if (
            self._trainer.compute_metrics is not None
            and predictions is not None
            and labels is not None
        ):
            chosen = {} if inputs is None else {"inputs": inputs}
            metrics = self._trainer.compute_metrics(
                EvalPrediction(predictions=predictions, label_ids=labels, **chosen)
            )
        metrics = denumpify_detensorize(metrics)
        loss_sum, num_items = (
            sum(column) for column in zip(*self._trainer.het.exchange(self._sums), strict=True)
        )
        if num_items:
            metrics[f"{prefix}_loss"] = loss_sum / num_items
        metrics = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
            for name, value in metrics.items()
        }
        return EvalLoopOutput(
            predictions=predictions, label_ids=labels, metrics=metrics, num_samples=num_samples
        )
