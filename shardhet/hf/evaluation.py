"""Evaluation under a plan: the mean over samples of their batch's loss, as transformers takes
it, and predictions in the dataset's order.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.trainer_pt_utils import nested_concat, nested_numpify
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from shardhet.fsdp.probing.comparing import are_close
from shardhet.fsdp.probing.module_state import restored_names
from shardhet.hf.rank_loss import RankLoss
from shardhet.hf.view import TrainerView
from shardhet.training.dealing.batches import Share, num_rows

PADDING = -100  # for predictions and labels of different lengths, as in transformers


def predictions_in(outputs: Any, ignored: Sequence[str], *, has_loss: bool) -> Any:
    """The outputs except the loss and those ``ignored``; a single one is not a tuple."""
    if isinstance(outputs, dict):
        skipped = {*ignored, "loss"}
        found: Any = tuple(value for name, value in outputs.items() if name not in skipped)
    else:
        found = outputs[1:] if has_loss else outputs
    return found[0] if len(found) == 1 else found


def joined(whole: Any, part: Any) -> Any:
    """The predictions of both, padded if their lengths differ."""
    if part is None:
        return whole
    return part if whole is None else nested_concat(whole, part, padding_index=PADDING)


def mixes(whole: Any, *parts: Any) -> bool:
    """Whether what samples have become together is not what they became in ``parts``.

    What has another shape, as texts padded to another length, is not compared.
    """
    for leaves in zip(*map(tree_leaves, (whole, *parts)), strict=False):
        if not all(isinstance(leaf, Tensor | int | float) for leaf in leaves):
            continue
        each, *others = map(torch.as_tensor, leaves)
        if all(o.dim() for o in (each, *others)) and sum(map(len, others)) == len(each):
            others = [torch.cat(others)] if len({o.shape[1:] for o in others}) == 1 else []
        if any(o.shape == each.shape and not are_close(o, each) for o in others):
            return True
    return False


class EvaluationPass:
    """One pass over a dataset, batch by batch."""

    def __init__(
        self,
        trainer: TrainerView,
        rank_loss: RankLoss,
        loss_only: bool | None,
        ignore_keys: list[str] | None,
    ) -> None:
        """``ignore_keys`` are outputs that are no predictions; None: those of the model.

        ``loss_only``: nothing else is gathered; None: as the arguments say.
        """
        self._trainer = trainer
        self._rank_loss = rank_loss
        stated = trainer.args.prediction_loss_only
        self._loss_only = stated if loss_only is None else loss_only
        if trainer.plan.context_groups is not None and not self._loss_only:
            raise ValueError(
                "HetTrainer: the plan has context groups, so no rank has predictions for all "
                "tokens of a sample. Set prediction_loss_only=True, and no compute_metrics."
            )
        if ignore_keys is None:
            config = getattr(trainer.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        self._ignore_keys = ignore_keys
        # Of each batch, on this rank: the sum of losses, its items, its samples.
        self._sums: list[tuple[float, int, int]] = []
        # Of each batch, of all ranks: predictions, labels, inputs
        self._batches: list[list[Any]] = []
        self._mixes = False  # preprocess_logits_for_metrics mixes samples
        self._is_last_stage = trainer.het.position in trainer.plan.groups[-1]

    def add(self, inputs: dict[str, Any]) -> None:
        """Evaluate this rank's samples of one batch.  Collective."""
        loss_sum, num_items, *parts = self._predict(inputs)
        if num_items is not None:
            leads = self._is_last_stage and self._trainer.plan.leads(self._trainer.het.position)
            self._sums.append((loss_sum, num_items, num_rows(inputs) * leads))
        if self._loss_only:
            return
        is_first = not self._batches
        if is_first and any(row[0] for row in self._trainer.het.exchange([self._mixes])):
            raise ValueError(
                "preprocess_logits_for_metrics: what it returns for a sample depends on others "
                "of its batch, of which ranks have parts. Compute it in compute_metrics."
            )
        mine = [None if part is None else nested_numpify(part) for part in parts]
        self._batches.append(self._of_all(mine))

    def _of_all(self, mine: list[Any]) -> list[Any]:
        """The parts of all ranks, joined in the order of samples.  Collective."""
        whole: list[Any] = [None] * len(mine)
        for rank_parts in self._trainer.het.exchange_objects(mine):
            whole = list(map(joined, whole, rank_parts))
        arrays = [each for each in tree_leaves(whole) if isinstance(each, np.ndarray)]
        plan = self._trainer.plan
        if plan.stages is None or not arrays:
            return whole
        samples = list(range(len(arrays[0])))  # which ranks have round after round
        shares = (Share.in_stages(plan, i, len(samples)) for i in plan.groups[-1])
        order = np.argsort([sample for share in shares for sample in share.of(samples)])
        in_order: list[Any] = tree_map_only(np.ndarray, lambda each: each[order], whole)
        return in_order

    @torch.no_grad()
    def _predict(self, inputs: dict[str, Any]) -> tuple[float, int | None, Any, Any, Any]:
        """This rank's loss sum, its number of items (None without labels), and predictions,
        labels and inputs.
        """
        trainer = self._trainer
        inputs = trainer._prepare_inputs(inputs)
        names = trainer.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        with trainer.compute_loss_context_manager():
            if has_labels:
                loss_sum, counted, outputs = self._rank_loss.sums(inputs)
                num_items = int(counted)
            else:
                loss_sum, num_items = torch.zeros(()), None
                outputs = trainer.het(**inputs)
        if self._loss_only or not (num_rows(inputs) and self._is_last_stage):
            return float(loss_sum), num_items, None, None, None
        logits = predictions_in(outputs, self._ignore_keys, has_loss=has_labels)
        labels: Any = tuple(inputs[name] for name in names) if has_labels else None
        labels = labels[0] if labels is not None and len(labels) == 1 else labels
        if trainer.preprocess_logits_for_metrics is not None:
            self._mixes = self._mixes or (not self._batches and self._is_mixing(logits, labels))
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        main_input = None
        if "inputs" in trainer.args.include_for_metrics:
            main_input = inputs[getattr(trainer.model, "main_input_name", "input_ids")]
        return float(loss_sum), num_items, logits, labels, main_input

    def _is_mixing(self, logits: Any, labels: Any) -> bool:
        """Whether preprocessing gives other values to samples beside others, half as large."""
        preprocess: Any = self._trainer.preprocess_logits_for_metrics
        halved = tree_map_only(Tensor, lambda each: (each / 2).to(each.dtype), logits)
        whole = joined(logits, halved), joined(labels, labels)
        with restored_names([preprocess]):
            parts = preprocess(logits, labels), preprocess(halved, labels)
            return mixes(preprocess(*whole), *parts)

    def result(self, num_samples: int, prefix: str) -> EvalLoopOutput:
        """The metrics over all ranks, named with ``prefix``.  Collective."""
        predictions, labels, inputs = map(self._gathered, range(3))
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
        if self._sums:
            metrics[f"{prefix}_loss"] = self._mean_loss()
        metrics = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
            for name, value in metrics.items()
        }
        return EvalLoopOutput(
            predictions=predictions, label_ids=labels, metrics=metrics, num_samples=num_samples
        )

    def _gathered(self, i: int) -> Any:
        """The i-th parts of all batches: joined, or a list with ``eval_do_concat_batches``
        False; None if there is none.
        """
        parts = [batch[i] for batch in self._batches if batch[i] is not None]
        if not self._trainer.args.eval_do_concat_batches:
            return parts or None
        return reduce(joined, parts, None)

    def _mean_loss(self) -> float:
        """The mean over samples of the mean loss of their batch.  Collective."""
        by_position = self._trainer.het.exchange_objects(self._sums)
        batches = [
            [sum(column) for column in zip(*rows, strict=True)]
            for rows in zip(*by_position, strict=True)
        ]
        means = [(loss / n if n else math.nan, size) for loss, n, size in batches]
        finite = [each for each in means if math.isfinite(each[0])]
        if self._trainer.args.logging_nan_inf_filter and finite:
            means = finite
        return sum(mean * size for mean, size in means) / sum(size for _, size in means)
