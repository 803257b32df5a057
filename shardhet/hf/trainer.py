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
from transformers.trainer_utils import (
    EvalLoopOutput,
    PredictionOutput,
    unwrap_peft_model,
)

from shardhet.comm import devices
from shardhet.comm.liveness import HANG_TIMEOUT_S, watch_ranks
from shardhet.fsdp import HetFSDP
from shardhet.hf.arguments import (
    REFUSED,
    check_optimizer,
    check_optimizer_class,
    checked,
    is_same_device,
)
from shardhet.hf.counting import num_multiplied
from shardhet.hf.dealing import PlanLoader
from shardhet.hf.evaluation import EvaluationPass
from shardhet.hf.losses import LossKind
from shardhet.hf.rank_loss import RankLoss
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
        hang_timeout_s: float | None = HANG_TIMEOUT_S,
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
            hang_timeout_s: of ``shardhet.watch_ranks``; None or 0 leaves it out.
            kwargs: further arguments of Trainer.
        """
        wrapped = model if isinstance(model, HetFSDP) else None
        self.plan = _checked_plan(model, plan, options, kwargs)
        given = args or TrainingArguments(save_strategy="no")
        args = checked(given, self.plan)
        inside = model if wrapped is None else wrapped.module
        super().__init__(inside, args, **kwargs)
        wrapped = wrapped or _wrapped(inside, self.plan, args, options)
        _check_device(wrapped, args)
        watch_ranks(hang_timeout_s=hang_timeout_s, device=wrapped.device)
        self.het = self.model_wrapped = wrapped
        check_optimizer(self.optimizer, {id(p) for p in wrapped.parameters()})
        if collates_whole_batch is None:
            collates_whole_batch = bool(getattr(self.data_collator, "mlm", False))
        self._collates_whole = collates_whole_batch
        self._args_as_given = given
        self.rank_loss = RankLoss(self)
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
            raise ValueError(f"HetTrainer.train: {REFUSED['resume_from_checkpoint']}.")
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
        sampler = _seedable(sampler, dataset, self.args.data_seed)
        _check_same_order(self.het, dataset, sampler, collates_whole_batch=self._collates_whole)
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
            pin_memory=self.args.dataloader_pin_memory
            and not devices.is_on_host(self.args.device),
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
            loss_sum, num_items, _ = self.rank_loss.sums(inputs)
        divisor: Tensor | int = num_items
        if num_items_in_batch is None:  # transformers averages the means of the batches
            divisor = num_items * self.current_gradient_accumulation_steps
        elif self.rank_loss.kind is LossKind.SUM:
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
        outputs = model(**self.rank_loss.as_called(inputs, num_items_in_batch))
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
        super().log(_with_own_rate(logs, self._num_eval_steps), start_time)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As in transformers; predictions are in the order of the dataset."""
        output = super().predict(*args, **kwargs)
        _with_own_rate(output.metrics or {}, self._num_eval_steps)
        return output

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss over all tokens of all ranks, and predictions in the dataset's order."""
        stated, loss_only = prediction_loss_only, self.args.prediction_loss_only
        loss_only = loss_only if stated is None else stated
        self.callback_handler.eval_dataloader = dataloader
        self._num_eval_steps = len(dataloader)
        self.het.eval()
        evaluation = EvaluationPass(self, loss_only=loss_only, ignore_keys=ignore_keys)
        for inputs in dataloader:
            evaluation.add(inputs)
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
        self.het.train()
        return evaluation.result(len(dataloader.dataset), metric_key_prefix)


def _checked_plan(
    model: nn.Module,
    plan: Plan | None,
    options: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any],  # of Trainer
) -> Plan:
    if kwargs.get("model_init") is not None:
        raise ValueError("HetTrainer: model_init is refused. Pass the model itself.")
    if kwargs.get("optimizer_cls_and_kwargs") is not None:
        check_optimizer_class(kwargs["optimizer_cls_and_kwargs"][0])
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "HetTrainer: the model was sharded at load time by DistributedConfig. Load it "
            "with shardhet.hf.load_pretrained(path, plan)."
        )
    if isinstance(model, HetFSDP):
        if plan is not None or options is not None:
            raise ValueError(
                "HetTrainer: the model has a plan already. Leave plan and options out."
            )
        return model.plan
    if plan is None:
        raise ValueError("HetTrainer: no plan. Pass plan=, or a HetFSDP as the model.")
    return plan


def _wrapped(
    module: nn.Module, plan: Plan, args: TrainingArguments, options: Mapping[str, Any] | None
) -> HetFSDP:
    return HetFSDP(
        module, plan, **{"device": args.device, "seed": args.seed, **(options or {})}
    )


def _check_device(wrapped: HetFSDP, args: TrainingArguments) -> None:
    if not is_same_device(wrapped.device, args.device):
        raise ValueError(
            f"HetTrainer: the model is on {wrapped.device} but the arguments say "
            f"{args.device}. Pass device= to where the model is wrapped, or use_cpu=True."
        )


def _seedable(sampler: Any, dataset: Any, data_seed: int | None) -> Any:
    """The sampler as accelerate makes it for a plain Trainer, so that orders are the same."""
    if sampler is None:
        raise ValueError(
            "HetTrainer: the train_dataset has no length, so it cannot be dealt out. Use a "
            "dataset with __len__ and __getitem__."
        )
    if not isinstance(sampler, RandomSampler):
        return sampler
    seed = torch.random.initial_seed() if data_seed is None else data_seed
    return SeedableRandomSampler(dataset, data_seed=seed)


def _with_own_rate(metrics: dict[str, float], num_eval_steps: int) -> dict[str, float]:
    """``metrics`` with the right rates; transformers assumes one batch per rank."""
    for name in metrics:
        prefix = name.removesuffix("_steps_per_second")
        if prefix not in (name, "train") and metrics.get(f"{prefix}_runtime"):
            metrics[name] = round(num_eval_steps / metrics[f"{prefix}_runtime"], 3)
    return metrics


def _check_same_order(
    het: HetFSDP, dataset: Any, sampler: Any, *, collates_whole_batch: bool
) -> None:
    """Check that ranks draw the same batches, and the same random numbers to collate."""
    mine = [len(dataset), getattr(sampler, "initial_seed", None)]
    if mine[1] is None or collates_whole_batch:
        mine.append(int(torch.hash_tensor(torch.get_rng_state())))
    found = het.exchange_objects(mine)
    if any(each != mine for each in found):
        raise ValueError(
            f"train_dataset: ranks have {found} as its length, seed and generator, in plan "
            "order. Give all ranks the same data, and draw random numbers alike on all."
        )
