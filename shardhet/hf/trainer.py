"""HetTrainer: transformers' Trainer under a plan.

Arguments, optimizer groups, schedules, callbacks and logging are those of transformers.  Three
things differ: which rank computes which sample (the data loaders), that a step's loss is a sum
over all ranks' tokens (``training_step``), and that no rank holds the whole model (clipping,
saving).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import EvalLoopOutput

from shardhet.comm.channel import may_take_long
from shardhet.comm.liveness.watch import HANG_TIMEOUT_S, watch_ranks
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.params.host_step import check_room, fused_on_host
from shardhet.fsdp.params.optimizer_check import look_at
from shardhet.hf.arguments import check_optimizer, checked, is_same_device
from shardhet.hf.counting import InputCounts
from shardhet.hf.evaluation import EvaluationPass
from shardhet.hf.folders.saving import save_model
from shardhet.hf.hooks import HookCallback
from shardhet.hf.loaders import (
    check_deals,
    evaluation_loader,
    evaluation_sampler,
    plan_loader,
    training_loader,
)
from shardhet.hf.rank_loss import RankLoss, counting_batches, smoothed
from shardhet.hf.resuming import WholeState, chosen, inner
from shardhet.hf.view import TrainerView
from shardhet.profiler.describe import plan_for
from shardhet.records.plan import Plan, plan_of
from shardhet.training.hooks.hooks import Hook
from shardhet.training.loss_scaling import LossScaler
from shardhet.training.resuming import random_states, restore_random_states


class HetTrainer(TrainerView):
    """A Trainer whose steps are those of one process on the plan's whole global batch.

        trainer = HetTrainer(model, args, plan=plan, train_dataset=dataset)
        trainer.train()

    Every method is collective.  ``self.het`` is the HetFSDP that wraps ``self.model``.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        plan: Plan | str | Path | Sequence[int] | None = None,
        collates_whole_batch: bool | None = None,
        options: Mapping[str, Any] | None = None,
        hooks: Sequence[Hook] = (),
        hang_timeout_s: float | None = HANG_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        """Wrap ``model``, or take a HetFSDP as it is.

        Args:
            model: a transformers model, equal on all ranks, or a HetFSDP of one.
            args: training arguments; those that a plan cannot honour are refused by name.
            plan: required unless ``model`` is a HetFSDP: a plan, the path of its file, batch
                sizes (``[2, 2, 15]``), or ``"auto"``: made for the ranks' cards, which get
                ``per_device_train_batch_size`` samples on average.
            collates_whole_batch: let every rank collate the whole global batch and take its
                rows, so that what a collator draws does not depend on the plan.  None does so
                if it masks at random, if losses depend on padding, and in stages.
            options: options of HetFSDP, for instance ``{"units": [...]}``.
            hooks: go on beside steps, as in a loop of one's own (``shardhet.Hooks``).
            hang_timeout_s: of ``shardhet.watch_ranks``; None or 0 leaves it out.
            kwargs: further arguments of Trainer.
        """
        wrapped = model if isinstance(model, HetFSDP) else None
        _check_overridden(type(self))
        given = args or TrainingArguments()
        known = _checked_plan(model, plan, options, kwargs)
        inside = model if wrapped is None else wrapped.module
        args = checked(given, known)
        super().__init__(inside, args, **kwargs)
        self.plan = known or planned_for(self, options or {})
        wrapped = wrapped or _wrapped(inside, self.plan, args, options)
        _check_fits(self, wrapped)
        watch_ranks(hang_timeout_s=hang_timeout_s, device=wrapped.device)
        self.het = self.model_wrapped = wrapped
        check_optimizer(self.optimizer, {id(p) for p in wrapped.parameters()})
        _choose_collating(self, collates_whole_batch)
        self._args_as_given, self._args_at_last = given, dict(vars(args))
        self.rank_loss = RankLoss(self)
        self.loss_scaler = LossScaler(wrapped.device) if args.fp16 else None
        self.accelerator.scaler = self.loss_scaler
        self._whole_state, self._counts = WholeState(self), InputCounts(wrapped)
        self._hooks = HookCallback(self, hooks)
        self.add_callback(self._hooks)

    # The model #

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        ``resume_from_checkpoint`` is a checkpoint of a HetTrainer under any plan with the same
        global batch, or True for the newest whole one in ``output_dir``.
        """
        self.follow_args()
        folder = chosen(self.het, resume_from_checkpoint, self.args.output_dir)
        with counting_batches(self), self._hooks.around_training():
            return super().train(folder, *args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a search would create the model anew in this process."""
        raise RuntimeError(
            "HetTrainer: hyperparameter_search is refused. Start one run per setting."
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that plain ``from_pretrained`` can load, or ``model.safetensors`` of a
        model that is not of transformers.  Collective.
        """
        folder = Path(output_dir or self.args.output_dir or ".")
        save_model(self.het, folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self._args_as_given, folder / TRAINING_ARGS_NAME)
        self.het.exchange([])

    # Checkpoints #

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with may_take_long("saving a checkpoint"):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._whole_state.save(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._whole_state.load(Path(checkpoint))

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        check_deals(given["train_dataloader"], "get_train_dataloader")
        self.rank_loss.try_again()
        if given["epoch"] == given["epochs_trained"]:
            self._whole_state.begin_epoch(given["steps_trained_in_current_epoch"])
        super()._run_epoch(*args, **given)  # type: ignore[no-untyped-call]  # transformers'

    def _load_best_model(self) -> None:
        self._whole_state.load_best()

    # Data #

    def get_train_dataloader(self) -> Any:
        """This rank's samples of every global batch."""
        self.train_loader = training_loader(self)
        return self.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """This rank's samples of every evaluation batch."""
        return evaluation_loader(self, eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As for evaluation."""
        return plan_loader(self, test_dataset, evaluation_sampler(self, test_dataset), "test")

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The number of samples in one optimizer step."""
        return self.plan.global_batch_size * args.gradient_accumulation_steps

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Zero: they are counted for all ranks' samples together, when they are stored."""
        self._counts.add(inputs)
        return 0

    def store_flos(self) -> None:
        """The estimate of transformers, for the whole model and the global batches."""
        self.state.total_flos += self._counts.flops()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen == "all":
            whole = self._counts.numel([self._counts.shape(inputs)])
            self.state.num_input_tokens_seen += whole
        else:
            counted = self._counts.counted(inputs)
            super()._track_num_input_tokens(counted)  # type: ignore[no-untyped-call]

    # A step #

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in transformers.  Raises ``ValueError`` if it cannot work on rows."""
        given = self.optimizer
        optimizer = super().create_optimizer(*args, **kwargs)
        if given is None:
            self.optimizer = optimizer = fused_on_host(optimizer)
        look_at(inner(optimizer), (), {})
        check_room(inner(optimizer))
        return optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Run the rounds of one batch; what it adds to the mean loss of the step."""
        self._set_training(True)
        mean = self.rank_loss.run_batch(self._prepare_inputs(inputs), num_items_in_batch)
        return torch.full((), mean, dtype=torch.float64, device=self.args.device)  # no wait

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """As in transformers, for this rank's samples."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.rank_loss.begin_step(batches, num_items)
        return batches, num_items

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # Every rank has the mean loss; in float32 the mean of their copies would be rounded.
        exact = tr_loss.double()
        super()._maybe_log_save_evaluate(exact, *args, **kwargs)
        tr_loss.copy_(exact)  # zero if it was logged

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
        loss, outputs = smoothed(self, model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Autocast to bfloat16 if ``bf16=True``, and to float16 if ``fp16=True``."""
        if not self.args.bf16 and not self.args.fp16:
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16
        return torch.autocast(self.args.device.type, dtype)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._clipped_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clipped_norm(float("inf")) if grad_norm is None else grad_norm

    def _clipped_norm(self, max_norm: float) -> Tensor:
        """The norm before clipping, once in each step, of gradients without a scale."""
        if self.loss_scaler is not None:
            self.loss_scaler.unscale_(inner(self.optimizer))
        return self.het.clip_grad_norm_(max_norm)

    # Evaluation #

    def _set_training(self, is_training: bool) -> None:
        """Of the model, and of an optimizer that averages parameters (schedule_free_adamw)."""
        self.het.train(is_training)
        set_mode = getattr(inner(self.optimizer), "train" if is_training else "eval", None)
        if set_mode is not None:
            set_mode()

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in transformers, for all ranks' samples in the dataset's order."""
        check_deals(dataloader, "get_eval_dataloader or get_test_dataloader")
        handler = self.callback_handler
        handler.eval_dataloader = dataloader
        self._set_training(False)
        evaluation = EvaluationPass(self, self.rank_loss, prediction_loss_only, ignore_keys)
        for inputs in dataloader:
            evaluation.add(inputs)
            self.control = handler.on_prediction_step(self.args, self.state, self.control)
        return evaluation.result(len(dataloader.dataset), metric_key_prefix)


def _check_overridden(trainer: type[Trainer]) -> None:
    """Raise ``ValueError`` if a subclass overrides what a HetTrainer does not call."""
    if trainer.prediction_step is not Trainer.prediction_step:
        raise ValueError(
            f"HetTrainer: {trainer.__name__} overrides prediction_step, which evaluation does "
            "not call, because ranks evaluate parts of a batch. Override compute_loss or "
            "evaluate, or pass preprocess_logits_for_metrics or compute_metrics."
        )


def _checked_plan(
    model: nn.Module,
    plan: Plan | str | Path | Sequence[int] | None,
    options: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any],  # of Trainer
) -> Plan | None:
    """What is known before anything is made; None with "auto"."""
    if kwargs.get("model_init") is not None:
        raise ValueError("HetTrainer: model_init is refused. Pass the model itself.")
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
        raise ValueError(
            "HetTrainer: no plan. Pass plan=, which may be a list of batch sizes such as "
            '[2, 2, 15], or a HetFSDP as the model, or plan="auto" to plan for these cards.'
        )
    return None if plan == "auto" else plan_of(plan)


def _choose_collating(trainer: TrainerView, wanted: bool | None) -> None:
    """Set whether ranks collate whole batches; that of padding is found out later if open."""
    if wanted is False:
        trainer.plan.refuse_stages("collates_whole_batch=False", "All stages pad alike")
    is_masking = getattr(trainer.data_collator, "mlm", False)
    must = is_masking or trainer.plan.stages is not None
    trainer.collates_whole = must if wanted is None else wanted
    num_computing = sum(rank.rank_batch_size > 0 for rank in trainer.plan.ranks)
    is_open = wanted is None and not trainer.collates_whole and num_computing > 1
    trainer.padding_matters = None if is_open else False


def _wrapped(
    module: nn.Module, plan: Plan, args: TrainingArguments, options: Mapping[str, Any] | None
) -> HetFSDP:
    return HetFSDP(
        module, plan, **{"device": args.device, "seed": args.seed, **(options or {})}
    )


def _check_fits(trainer: Trainer, wrapped: HetFSDP) -> None:
    args = trainer.args
    if not is_same_device(wrapped.device, args.device):
        raise ValueError(
            f"HetTrainer: the model is on {wrapped.device} but the arguments say "
            f"{args.device}. Pass device= to where the model is wrapped, or use_cpu=True."
        )
    is_own = trainer.label_smoother or trainer.compute_loss_func
    if wrapped.plan.context_groups and is_own:
        raise ValueError(
            "HetTrainer: the plan has context groups, whose ranks have logits of their own "
            "tokens but labels of all. Leave compute_loss_func and label smoothing out."
        )


def planned_for(trainer: TrainerView, options: Mapping[str, Any]) -> Plan:
    """The plan for ``trainer``'s model; rank 0 makes it.  Collective.

    What the dataset and the collator draw for the example is put back.
    Raises ``ValueError`` without a dataset or cards, and ``PlanError`` if nothing fits.
    """
    assert trainer.model is not None
    if trainer.train_dataset is None:
        raise ValueError(
            'HetTrainer: plan="auto" takes samples of train_dataset for an example, but there '
            "is none. Pass it, or a plan."
        )
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
    states = random_states(trainer.args.device)
    batch = collate(list(islice(iter(trainer.train_dataset), 2)))
    restore_random_states(states, trainer.args.device)
    same = {name: options[name] for name in ("units", "param_dtype") if name in options}
    size = trainer.args.per_device_train_batch_size  # of all ranks: see ``checked``
    return plan_for(trainer.model, dict(batch), global_batch_size=size, **same)
