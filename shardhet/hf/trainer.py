"""HetTrainer: transformers' Trainer under a plan.

Arguments, optimizer groups, schedules, callbacks and logging are those of transformers.  Three
things differ: which rank computes which sample (the data loaders), that a step's loss is a sum
over all ranks' tokens (``training_step``), and that no rank holds the whole model (clipping,
saving).
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import nested_numpify
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    denumpify_detensorize,
    unwrap_peft_model,
)

from shardhet.fsdp import HetFSDP
from shardhet.hf.arguments import (
    check_optimizer,
    check_optimizer_class,
    checked,
    is_same_device,
)
from shardhet.hf.counting import num_multiplied
from shardhet.hf.dealing import PlanLoader, num_rows
from shardhet.hf.losses import LossKind, find_kind, num_labels
from shardhet.hf.predictions import joined, predictions_in
from shardhet.hf.saving import save_pretrained
from shardhet.records.plan import Plan


class HetTrainer(Trainer):
    """A Trainer whose steps are those of one process on the plan's whole global batch.

        trainer = HetTrainer(model, args, plan=plan, train_dataset=dataset)
        trainer.train()

    Every method is collective.  ``self.model`` is the wrapped model, with this rank's rows;
    ``self.het`` is the HetFSDP that wraps it.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        plan: Plan | None = None,
        collates_whole_batch: bool | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Wrap ``model``, or take a HetFSDP as it is.

        Args:
            model: a transformers model, equal on all ranks, or a HetFSDP of one.
            args: training arguments; those that a plan cannot honour are refused by name.
            plan: required unless ``model`` is a HetFSDP.
            collates_whole_batch: let every rank collate the whole global batch and take its
                rows, so that what a collator draws does not depend on the plan.  None does so
                if the collator masks at random.
            options: options of HetFSDP, for instance ``{"units": [...]}``.
            kwargs: further arguments of Trainer.
        """
        if kwargs.get("model_init") is not None:
            raise ValueError("HetTrainer: model_init is refused. Pass the model itself.")
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                "HetTrainer: the model was sharded at load time by DistributedConfig. Load it "
                "with shardhet.hf.load_pretrained(path, plan)."
            )
        wrapped = model if isinstance(model, HetFSDP) else None
        if wrapped is not None and (plan is not None or options is not None):
            raise ValueError(
                "HetTrainer: the model has a plan already. Leave plan and options out."
            )
        plan = plan if wrapped is None else wrapped.plan
        if plan is None:
            raise ValueError("HetTrainer: no plan. Pass plan=, or a HetFSDP as the model.")
        self.plan: Plan = plan
        given = args or TrainingArguments(save_strategy="no")
        args = checked(given, self.plan)
        if kwargs.get("optimizer_cls_and_kwargs") is not None:
            check_optimizer_class(kwargs["optimizer_cls_and_kwargs"][0])
        inside = model if wrapped is None else wrapped.module
        super().__init__(inside, args, **kwargs)
        if wrapped is None:
            chosen = {"device": args.device, "seed": args.seed, **(options or {})}
            wrapped = HetFSDP(inside, self.plan, **chosen)
        elif not is_same_device(wrapped.device, args.device):
            raise ValueError(
                f"HetTrainer: the model is on {wrapped.device} but the arguments say "
                f"{args.device}. Pass device= to where the model is wrapped, or use_cpu=True."
            )
        self.het = self.model_wrapped = wrapped
        check_optimizer(self.optimizer, {id(p) for p in wrapped.parameters()})
        masks_at_random = bool(getattr(self.data_collator, "mlm", False))
        self._collates_whole = (
            masks_at_random if collates_whole_batch is None else collates_whole_batch
        )
        self._args_as_given = given
        self._loss_kind: LossKind | None = None  # found out on the first batch
        self._num_eval_steps = 0
        self._num_multiplied = num_multiplied(wrapped)

    # The model #

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: HetFSDP puts this rank's rows where they belong."""

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        return self.het

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; there is nothing to resume from."""
        if resume_from_checkpoint:
            raise ValueError(
                "HetTrainer.train: resume_from_checkpoint: checkpoints do not hold the "
                "optimizer's state. Leave it out."
            )
        return super().train(None, *args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a search would create the model anew in this process."""
        raise RuntimeError(
            "HetTrainer: hyperparameter_search is refused. Start one run per setting."
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that plain ``from_pretrained`` can load.  Collective."""
        folder = Path(output_dir or self.args.output_dir or ".")
        save_pretrained(self.het, folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self._args_as_given, folder / TRAINING_ARGS_NAME)
        self.het.exchange([])

    # Data #

    def get_train_dataloader(self) -> Any:
        """This rank's samples of every global batch."""
        dataset = self.train_dataset
        if dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        sampler = self._get_train_sampler(dataset) if hasattr(dataset, "__len__") else None
        if sampler is None:
            raise ValueError(
                "HetTrainer: the train_dataset has no length, so it cannot be dealt out. Use a "
                "dataset with __len__ and __getitem__."
            )
        if isinstance(sampler, RandomSampler):
            # As accelerate does for a plain Trainer, so that the order is the same.
            seed = self.args.data_seed
            seed = torch.random.initial_seed() if seed is None else seed
            sampler = SeedableRandomSampler(dataset, data_seed=seed)
        self._check_same_order(dataset, sampler)
        return self._plan_loader(dataset, sampler, "Training", is_training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """This rank's samples of every evaluation batch."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        named: Any = self.eval_dataset
        chosen = named if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            chosen = named[eval_dataset]
        return self._plan_loader(chosen, SequentialSampler(chosen), "Evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As for evaluation."""
        return self._plan_loader(test_dataset, SequentialSampler(test_dataset), "test")

    def _plan_loader(
        self, dataset: Any, sampler: Sampler[int], description: str, is_training: bool = False
    ) -> PlanLoader:
        collate = self._get_collator_with_removed_columns(self.data_collator, description)
        if hasattr(dataset, "column_names"):  # from the datasets library
            dataset = self._remove_unused_columns(dataset, description=description)
            collate = self.data_collator
        return PlanLoader(
            dataset,
            sampler,
            self.plan,
            self.het.position,
            collate_fn=collate,
            drop_last=is_training and self.args.dataloader_drop_last,
            collates_whole_batch=self._collates_whole,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The number of samples in one optimizer step."""
        return self.plan.global_batch_size * args.gradient_accumulation_steps

    def num_examples(self, dataloader: DataLoader[Any] | PlanLoader) -> int:
        """The number of samples in an epoch."""
        return len(dataloader.dataset)  # type: ignore[arg-type]  # it has a length: see above

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """The estimate of transformers, for the whole model."""
        main_input = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if main_input is None else 6 * main_input.numel() * self._num_multiplied

    # A step #

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The mean loss over all ranks; gradients are added.

        ``num_items_in_batch`` counts this rank's items in all accumulation steps; the runtime
        adds up the counts of all ranks and divides by the sum.
        """
        self.het.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss_sum, num_items, _ = self._sums(inputs)
        divisor: Tensor | int = num_items
        if num_items_in_batch is None:  # transformers averages the means of the batches
            divisor = num_items * self.current_gradient_accumulation_steps
        elif self._loss_kind is LossKind.SUM:
            divisor = num_items_in_batch
        elif self.args.gradient_accumulation_steps > 1:
            raise ValueError(
                "TrainingArguments: gradient_accumulation_steps="
                f"{self.args.gradient_accumulation_steps}, but the loss is a mean that ignores "
                "num_items_in_batch, so a plain Trainer adds up means. Leave it out, and "
                "give the plan more microbatches."
            )
        mean = self.het.backward(loss_sum, divisor)
        return torch.tensor(mean or 0.0, dtype=torch.float64, device=self.args.device)

    def _sums(self, inputs: dict[str, Any]) -> tuple[Tensor, int, Any]:
        """This rank's loss sum, the number of items in it, and the model's outputs."""
        if self._loss_kind is None:
            self._loss_kind = find_kind(
                self.het, inputs, self.label_names, lambda part: self._loss(part)[0]
            )
        loss, outputs = self._loss(inputs)
        if self._loss_kind is LossKind.SUM:
            counted = self._get_num_items_in_batch([inputs], self.args.device)
            if counted is not None:
                return loss, int(counted), outputs
        num_items = num_labels(inputs, self.label_names)
        if not num_items:  # a mean over nothing would be NaN
            return torch.zeros((), device=self.args.device), 0, outputs
        return loss * num_items, num_items, outputs

    def _loss(self, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The result of ``compute_loss`` for this rank's samples, as a sum if possible."""
        counted = self._get_num_items_in_batch([inputs], self.args.device)
        one = None if counted is None else torch.ones((), device=self.args.device)
        if not num_rows(inputs):
            self.het(**self._as_called(inputs, one))
            return torch.zeros((), device=self.args.device), None
        loss, outputs = self.compute_loss(
            self.het, dict(inputs), return_outputs=True, num_items_in_batch=one
        )
        return loss, outputs

    def _as_called(self, inputs: dict[str, Any], num_items: Tensor | None) -> dict[str, Any]:
        """The arguments that ``compute_loss`` passes to the model."""
        takes_labels = self.label_smoother is None and self.compute_loss_func is None
        called = {name: v for name, v in inputs.items() if takes_labels or name != "labels"}
        if num_items is not None and self.model_accepts_loss_kwargs:
            called["num_items_in_batch"] = num_items
        return called

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As in transformers, which looks for a causal model's name only below DDP's kind."""
        is_smoothed = self.label_smoother is not None and self.compute_loss_func is None
        if not is_smoothed or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        outputs = model(**self._as_called(inputs, num_items_in_batch))
        name = unwrap_peft_model(self.model)._get_name()
        assert self.label_smoother is not None
        loss = self.label_smoother(
            outputs,
            labels,
            shift_labels=name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
            num_items_in_batch=num_items_in_batch,
        )
        return (loss, outputs) if return_outputs else loss

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Autocast to bfloat16 if ``bf16=True``, as accelerate does around a model."""
        if not self.args.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self.args.device.type, torch.bfloat16)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.het.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.het.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # Evaluation #

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in transformers, with the rate of evaluation steps corrected."""
        super().log(self._with_own_rate(logs), start_time)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As in transformers; predictions are in the order of the dataset."""
        output = super().predict(*args, **kwargs)
        self._with_own_rate(output.metrics or {})
        return output

    def _with_own_rate(self, metrics: dict[str, float]) -> dict[str, float]:
        """``metrics`` with the right rates; transformers assumes one batch per rank."""
        for name in metrics:
            prefix = name.removesuffix("_steps_per_second")
            if prefix not in (name, "train") and metrics.get(f"{prefix}_runtime"):
                rate = self._num_eval_steps / metrics[f"{prefix}_runtime"]
                metrics[name] = round(rate, 3)
        return metrics

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss over all tokens of all ranks, and predictions in the dataset's order."""
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else True
        if prediction_loss_only is False:
            loss_only = False
        self.het.eval()
        self.callback_handler.eval_dataloader = dataloader
        self._num_eval_steps = len(dataloader)
        sums = [0.0, 0.0]
        gathered: list[Any] = [None, None, None]  # predictions, labels, inputs
        for inputs in dataloader:
            loss_sum, num_items, *parts = self._predict(inputs, loss_only, ignore_keys)
            sums = [sums[0] + loss_sum, sums[1] + num_items]
            if not loss_only:
                for rank_parts in self._gather(parts):
                    for i, part in enumerate(rank_parts):
                        gathered[i] = joined(gathered[i], part)
            self.control = self.callback_handler.on_prediction_step(
                args, self.state, self.control
            )
        self.het.train()
        return self._evaluated(sums, gathered, len(dataloader.dataset), metric_key_prefix)

    @torch.no_grad()
    def _predict(
        self, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[float, int, Any, Any, Any]:
        """This rank's loss sum, its number of items, and predictions, labels and inputs."""
        inputs = self._prepare_inputs(inputs)
        has_labels = bool(self.label_names) and all(
            inputs.get(name) is not None for name in self.label_names
        )
        with self.compute_loss_context_manager():
            if has_labels:
                loss_sum, num_items, outputs = self._sums(inputs)
            else:
                loss_sum, num_items = torch.zeros(()), 0
                outputs = self.het(**inputs)
        if loss_only or not num_rows(inputs):
            return float(loss_sum), num_items, None, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        logits = predictions_in(outputs, ignore_keys, has_loss=has_labels)
        labels: Any = tuple(inputs[name] for name in self.label_names) if has_labels else None
        labels = labels[0] if labels is not None and len(labels) == 1 else labels
        if self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)
        main_input = None
        if "inputs" in self.args.include_for_metrics:
            main_input = inputs[getattr(self.model, "main_input_name", "input_ids")]
        return float(loss_sum), num_items, logits, labels, main_input

    def _gather(self, parts: list[Any]) -> list[list[Any]]:
        mine = [None if part is None else nested_numpify(part) for part in parts]
        return self.het.exchange_objects(mine)

    def _evaluated(
        self, sums: list[float], gathered: list[Any], num_samples: int, prefix: str
    ) -> EvalLoopOutput:
        predictions, labels, inputs = gathered
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            chosen = {} if inputs is None else {"inputs": inputs}
            metrics = self.compute_metrics(
                EvalPrediction(predictions=predictions, label_ids=labels, **chosen)
            )
        metrics = denumpify_detensorize(metrics)
        loss_sum, num_items = (
            sum(column) for column in zip(*self.het.exchange(sums), strict=True)
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

    def _check_same_order(self, dataset: Any, sampler: Any) -> None:
        """Check that ranks draw the same batches, and the same random numbers to collate."""
        mine = [len(dataset), getattr(sampler, "initial_seed", None)]
        if mine[1] is None or self._collates_whole:
            mine.append(int(torch.hash_tensor(torch.get_rng_state())))
        found = self.het.exchange_objects(mine)
        if any(each != mine for each in found):
            raise ValueError(
                f"train_dataset: ranks have {found} as its length, seed and generator, in plan "
                "order. Give all ranks the same data, and draw random numbers alike on all."
            )
