"""Check transformers' training arguments; refuse by name those that a plan cannot honour."""

import copy
import os
import warnings
from typing import Any

import torch
from transformers import TrainingArguments

from shardhet.records.plan import Plan

DEFAULT_BATCH_SIZE = TrainingArguments.__dataclass_fields__[
    "per_device_train_batch_size"
].default

# Optimizers that no rank can run on its rows: how their names begin or end, and why.
NOT_ELEMENT_WISE = {
    "adafactor": "averages over the rows and columns of whole matrices",
    "galore": "projects whole matrices",
    "apollo": "projects whole matrices",
    "lomo": "updates parameters inside backward",
    "adalomo": "updates parameters inside backward",
    "grokadamw": "clips by the norm of all gradients together",
    "stable_adamw": "clips by a norm of each parameter",
    "8bit": "quantizes its state in blocks, which rows would cut",
    "4bit": "quantizes its state in blocks, which rows would cut",
    "xla": "needs a device of XLA",
}
# Of these, what suits parameters that one rank has whole.
OF_EACH_PARAMETER = ("adafactor", "galore", "apollo", "stable_adamw", "8bit", "4bit")

# Arguments that are refused if set: the reason, and what to do instead.
REFUSED = {
    "fp16_full_eval": "evaluation runs in the dtype of training. Leave it out",
    "bf16_full_eval": "evaluation runs in the dtype of training. Leave it out",
    "deepspeed": "the plan shards the model. Leave it out",
    "fsdp": "the plan shards the model. Leave it out",
    "parallelism_config": "the plan shards the model. Leave it out",
    "auto_find_batch_size": "the plan fixes the batch. Leave it out",
    "torch_compile": "it would compile around the units. Call "
    "shardhet.training.compiling.compile_units(model, device) before",
    "use_liger_kernel": "it replaces forwards after the model was wrapped. Apply it before",
    "neftune_noise_alpha": "its noise would depend on the plan. Leave it out",
    "batch_eval_metrics": "metrics are computed once, of all predictions. Leave it out",
    "push_to_hub": "it is not tested. Call trainer.save_model(folder), then "
    "huggingface_hub.upload_folder",
    "enable_jit_checkpoint": "ranks would save at different steps. Let a signal handler call "
    "trainer.het.ask_to_end(), which saves and stops on all ranks",
    "use_cache": "a cache would leave the units through an object. Leave it out",
    "ddp_find_unused_parameters": "there is no DDP here. Leave it out",
    "ddp_bucket_cap_mb": "there is no DDP here. Leave it out",
    "ddp_broadcast_buffers": "there is no DDP here. Leave it out",
    "ddp_static_graph": "there is no DDP here. Leave it out",
    "debug": "its hooks would watch rows. Leave it out",
}
# What `accelerate launch` and its file put into the environment: likewise, unless it is off.
REFUSED_OF_LAUNCH = {
    "ACCELERATE_USE_FSDP": REFUSED["fsdp"],
    "ACCELERATE_USE_DEEPSPEED": REFUSED["deepspeed"],
    "ACCELERATE_USE_MEGATRON_LM": REFUSED["fsdp"],
    "ACCELERATE_USE_PARALLELISM_CONFIG": REFUSED["parallelism_config"],
    "ACCELERATE_DYNAMO_BACKEND": REFUSED["torch_compile"],
}
OFF = ("", "0", "false", "no", "off", "none")


def checked(args: TrainingArguments, plan: Plan | None) -> TrainingArguments:
    """A copy of ``args`` as for a single process with the whole global batch; if no plan is
    made yet, with as many samples as a plain Trainer's ranks have together.

    Raises ``ValueError`` naming the first argument that a plan cannot honour.
    """
    for name, reason in REFUSED.items():
        value = getattr(args, name, None)
        if value not in (None, False, "", [], {}):
            raise ValueError(f"TrainingArguments: {name}={value!r}: {reason}.")
    _check_launch(args)
    _check_choices(args, has_whole=plan is not None and bool(plan.whole_matrices))
    if plan is not None and args.world_size != plan.world_size:
        raise ValueError(
            f"TrainingArguments: {args.world_size} processes but the plan has "
            f"{plan.world_size} devices. Start the script with torchrun "
            f"--nproc-per-node={plan.world_size}, and pass use_cpu=True where there is no GPU."
        )
    found = args.per_device_train_batch_size
    whole = found * args.world_size if plan is None else plan.global_batch_size
    if found != DEFAULT_BATCH_SIZE and whole not in (found, found * args.world_size):
        raise ValueError(
            f"TrainingArguments: per_device_train_batch_size={found}, but the plan deals out "
            f"{whole} samples a step. Leave it out; a batch for each device is "
            "plan=[2, 2, 15]."
        )
    args = copy.copy(args)
    args.per_device_train_batch_size = whole
    checkpointing = ("activation_checkpointing", "gradient_checkpointing")
    if any(getattr(args, name, False) for name in checkpointing):
        for name in checkpointing:
            setattr(args, name, False)
        warnings.warn(
            "TrainingArguments: activation_checkpointing=True has no effect, because the plan "
            "says what each rank recomputes. To recompute everything write "
            "Plan.by_hand(..., recompute=True).",
            stacklevel=3,
        )
    precision = args.mixed_precision.lower()  # the launcher's unless the arguments have one
    args.fp16, args.bf16 = precision == "fp16", precision == "bf16"
    # HetTrainer scales the loss itself; accelerate, told of float16, accepts GPUs only.
    args.mixed_precision = "no" if args.fp16 else precision
    # The runtime divides by the tokens of all ranks; transformers must count only this rank's.
    args.average_tokens_across_devices = False
    return args


def _check_launch(args: TrainingArguments) -> None:
    """Raise ``ValueError`` for what `accelerate launch` asks for and a plan cannot honour."""
    for name, reason in REFUSED_OF_LAUNCH.items():
        value = os.environ.get(name, "")
        if value.lower() not in OFF:
            raise ValueError(f"accelerate launch: {name}={value}: {reason}.")
    if args.mixed_precision.lower() not in ("no", "fp16", "bf16"):
        raise ValueError(
            f"accelerate launch: mixed_precision={args.mixed_precision} is not supported. "
            "Choose bf16, fp16 or no."
        )
    num_batches = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if num_batches not in ("1", str(args.gradient_accumulation_steps)):
        raise ValueError(
            f"accelerate launch: gradient_accumulation_steps={num_batches}, which a Trainer "
            f"does not read; it has {args.gradient_accumulation_steps}. Pass it in "
            "TrainingArguments."
        )


def _check_choices(args: TrainingArguments, *, has_whole: bool) -> None:
    optim = getattr(args.optim, "value", args.optim)
    for name, reason in NOT_ELEMENT_WISE.items():
        suits_whole = name in OF_EACH_PARAMETER
        if (optim.startswith(name) or optim.endswith(name)) and not (suits_whole and has_whole):
            instead = (
                ", or a plan that stores all whole (whole_matrices=['*'])"
                if suits_whole
                else ""
            )
            raise ValueError(
                f"TrainingArguments: optim={optim!r} {reason}. Choose one that works element "
                "by element, such as adamw_torch_fused, lion_32bit or schedule_free_adamw"
                f"{instead}."
            )
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "TrainingArguments: load_best_model_at_end=True reads what save_only_model=True "
            "leaves out. Leave save_only_model out."
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            "TrainingArguments: average_tokens_across_devices=False would weigh tokens by "
            "rank. Leave it out."
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "TrainingArguments: train_sampling_strategy='batch_rebalance' deals batches to "
            "equal ranks. Choose random, sequential or group_by_length."
        )
    if not args.dataloader_in_order:
        raise ValueError(
            "TrainingArguments: dataloader_in_order=False would give ranks unlike batches. "
            "Leave it out."
        )
    unknown = set(args.include_for_metrics) - {"inputs"}
    if unknown:
        raise ValueError(
            f"TrainingArguments: include_for_metrics={sorted(unknown)} is not gathered. Leave "
            "it out."
        )
    config: Any = args.accelerator_config
    if config.split_batches or config.dispatch_batches:
        raise ValueError(
            "TrainingArguments: accelerator_config deals batches to equal ranks "
            "(split_batches, dispatch_batches). Leave it out."
        )


def check_optimizer(optimizer: torch.optim.Optimizer | None, params: set[int]) -> None:
    """Raise if a given optimizer holds parameters other than this rank's rows."""
    if optimizer is None:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held <= params:
        raise ValueError(
            "HetTrainer: optimizers=(...) was made from the whole model. Wrap the model with "
            "HetFSDP, make the optimizer from its parameters(), and pass both."
        )


def is_same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are the same; a missing index matches any, and so does the CPU's."""
    return a.type == b.type and (a.type == "cpu" or None in (a.index, b.index) or a == b)
