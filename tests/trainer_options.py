"""Options of transformers' Trainer, each of which trains by plan as in one process.

``compare`` trains twice with one of them and compares everything that is logged, entry by
entry, and the parameters.  experiments/trainer_options tries all, tests/test_hf_trainer.py a
few.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from shardhet import Plan, Stage
from tests.small_models import of_transformers

VOCAB_SIZE = 64
SEQ_LEN = 11
NUM_PREDICTED = 9
PLAN = Plan.by_hand(
    microbatch_sizes=[2, 3, 0], rank_batch_sizes=[4, 3, 0], state_shares=[0.5, 0.2, 0.3]
)
IN_ROUNDS = Plan.by_hand(  # the same samples a step; the last round has only one
    microbatch_sizes=[1, 1, 0],
    rank_batch_sizes=[2, 1, 0],
    state_shares=[0.1, 0.6, 0.3],
    num_rounds=3,
    global_batch_size=7,
    reshard_after_forward=False,
    reduce_each_round=False,
)
IN_STAGES = Plan.by_hand(  # once more; a rank of the first stage stores nothing
    microbatch_sizes=[1, 1, 2],
    rank_batch_sizes=[2, 1, 3],
    state_shares=[1.0, 0.0, 1.0],
    recompute=[True, False, False],
    num_rounds=3,
    global_batch_size=7,
    stages=[
        Stage(units=("model.embed_tokens", "model.layers.0"), num_ranks=2),
        Stage(units=("model.layers.1", "lm_head"), num_ranks=1),
    ],
)
PARAM_BAR = 1e-12
FIRST_CASE_S = 110.0  # every rank imports transformers once, on a busy machine slowly
# By the loss, for everything logged, relative: transformers' own is computed in float32.
LOGGED_BAR = {"float64": 1e-12, "own": 1e-6}
TIMINGS = ("runtime", "per_second", "preparation_time", "mem_")

BASE: dict[str, Any] = {
    "max_steps": 6,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "optim": "adamw_torch",
    "per_device_eval_batch_size": 1,
}
CONSTANT = {"lr_scheduler_type": "constant"}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "long": {"max_steps": 20, "warmup_steps": 5, "eval_steps": 10},
    "fused": {"optim": "adamw_torch_fused", "adam_beta2": 0.9},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop"},
    "adam's": {"adam_beta1": 0.8, "adam_epsilon": 1e-6},
    "weight decay": {"weight_decay": 0.3},
    "cosine": {"lr_scheduler_type": "cosine"},
    "restarts": {
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2},
    },
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    "constant": CONSTANT,
    "constant with warmup": {"lr_scheduler_type": "constant_with_warmup"},
    "inverse sqrt": {"lr_scheduler_type": "inverse_sqrt"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 1},
    "minimum": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-4},
    },
    "stable, then decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
    },
    "warmup ratio": {"warmup_steps": 0.5},
    "no clipping": {"max_grad_norm": 0.0},
    "much clipping": {"max_grad_norm": 0.01},
    "accumulation": {"max_steps": 4, "gradient_accumulation_steps": 3},
    "accumulation over epochs": {  # a step of each epoch has one batch instead of two
        "max_steps": -1,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
    },
    "epochs": {"max_steps": -1, "num_train_epochs": 1.4},
    "drop last": {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True},
    "seeds": {"seed": 7, "data_seed": 9},
    "sequential": {"train_sampling_strategy": "sequential"},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "tokens seen": {"include_num_input_tokens_seen": "all"},
    "tokens seen but padding": {"include_num_input_tokens_seen": "non_padding"},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "log every third": {"logging_steps": 3},
    "log the first": {"logging_steps": 3, "logging_first_step": True},
    "log epochs": {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch"},
    "log nan": {"logging_nan_inf_filter": False},
    "evaluate epochs": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"},
    "evaluate first": {"eval_on_start": True},
    "evaluate late": {"eval_delay": 4, "eval_steps": 1},
    "evaluate two each": {"per_device_eval_batch_size": 2},
    "evaluate at once": {"per_device_eval_batch_size": 9},
    "evaluate losses": {"prediction_loss_only": True},
    "evaluate piece by piece": {"eval_accumulation_steps": 1},
    "evaluate apart": {"eval_do_concat_batches": False},
    "inputs in metrics": {"include_for_metrics": ["inputs"]},
    "losses in metrics": {"include_for_metrics": ["loss"]},
    "metrics by batch": {"batch_eval_metrics": True},
    "save": {"save_strategy": "steps", "save_steps": 2},
    "save the best": {"save_strategy": "best", "metric_for_best_model": "eval_loss"},
    "load the best": {"save_strategy": "steps", "save_steps": 3, **BEST},
    "all columns": {"remove_unused_columns": False},
    "checkpointing": {"activation_checkpointing": True},
    "batch of the plan": {"per_device_train_batch_size": 7},
    "memory": {"skip_memory_metrics": False},
    "emptied cache": {"torch_empty_cache_steps": 1},
    "determinism": {"full_determinism": True},
    "schedule-free adamw": {"optim": "schedule_free_adamw", **CONSTANT},
    "schedule-free radam": {"optim": "schedule_free_radam", **CONSTANT},
    "schedule-free sgd": {"optim": "schedule_free_sgd", **CONSTANT},
    "lion": {"optim": "lion_32bit"},
    "ademamix": {"optim": "ademamix"},
    "adafactor": {"optim": "adafactor"},
    "lion in 8 bits": {"optim": "lion_8bit"},
    "4 bits": {"optim": "adamw_torch_4bit"},
    "galore": {"optim": "galore_adamw", "optim_target_modules": ["mlp"]},
    "apollo": {"optim": "apollo_adamw", "optim_target_modules": ["mlp"]},
    "lomo": {"optim": "lomo"},
    "adalomo": {"optim": "adalomo"},
    "stable adamw": {"optim": "stable_adamw"},
    "grokadamw": {"optim": "grokadamw"},
    "noise": {"neftune_noise_alpha": 5.0},
    "compiled": {"torch_compile": True},
    "liger": {"use_liger_kernel": True},
    "found batch size": {"auto_find_batch_size": True},
    "another batch": {"per_device_train_batch_size": 3},
    "padded": {},  # with a collator that pads a batch to its longest sample
    "padded, tokens seen": {"include_num_input_tokens_seen": "all"},
}


def llama(**changes: Any) -> Any:
    """A small Llama in float64; it has no key bias, whose gradient would be rounding noise."""
    return of_transformers("LlamaForCausalLM", max_position_embeddings=32, **changes).double()


def texts(num_samples: int, seed: int) -> list[dict[str, Tensor]]:
    """Samples with unlike numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_samples):
        words = torch.randint(4, 60, (SEQ_LEN,), generator=generator)
        length = int(torch.randint(3, SEQ_LEN, (1,), generator=generator))
        mask = (torch.arange(SEQ_LEN) < length).long()
        labels = words.masked_fill(mask == 0, -100)
        rows.append({"input_ids": words, "labels": labels, "attention_mask": mask})
    return rows


def loss_in_float64(
    outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None
) -> Tensor:
    """A causal loss; transformers' own is computed in float32."""
    logits = outputs.logits[:, :-1].reshape(-1, VOCAB_SIZE)
    targets = labels[:, 1:].reshape(-1)
    if num_items_in_batch is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


@contextmanager
def as_torchrun_starts(rank: int, world_size: int) -> Iterator[None]:
    """The environment in which accelerate finds the process group that is there."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    ours |= {"LOCAL_WORLD_SIZE": world_size}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in ours.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(folder: Path | str, **changes: Any) -> Any:
    """Training arguments for a CPU, quiet, with nothing saved."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    pinned = {"dataloader_pin_memory": False}
    return transformers.TrainingArguments(
        output_dir=str(folder), log_level="error", **{**quiet, **pinned, **changes}
    )


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As collators of transformers do: to the longest sample of the batch."""
    longest = max(int(row["attention_mask"].sum()) for row in rows)
    return {name: torch.stack([row[name][:longest] for row in rows]) for name in rows[0]}


class Accuracy:
    """Of the next word, where there is one; also by batch, and for a list of batches."""

    def __init__(self) -> None:
        self.right = self.there = 0.0

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        logits, labels = prediction.predictions, prediction.label_ids
        batches = zip(logits, labels, strict=True) if isinstance(logits, list) else None
        for each, targets in batches or [(logits, labels)]:
            is_there = torch.as_tensor(targets)[:, 1:] != -100
            is_right = (
                torch.as_tensor(each)[:, :-1].argmax(-1) == torch.as_tensor(targets)[:, 1:]
            )
            self.right += float((is_right & is_there).sum())
            self.there += float(is_there.sum())
        if not compute_result:
            return {}
        found = {"accuracy": self.right / self.there}
        if getattr(prediction, "inputs", None) is not None:
            found["first"] = float(np.asarray(prediction.inputs).flat[0])
        if getattr(prediction, "losses", None) is not None:
            found["losses"] = float(np.asarray(prediction.losses).sum())
        self.__init__()  # type: ignore[misc]
        return found


def make(trainer_class: Any, folder: str, changes: Mapping[str, Any], **options: Any) -> Any:
    """A trainer with the options of BASE but for ``changes``."""
    options = {"compute_loss_func": loss_in_float64, "compute_metrics": Accuracy(), **options}
    if trainer_class is not transformers.Trainer:
        options = {"plan": PLAN, **options}
    trainer = trainer_class(
        llama(),
        arguments(folder, **{**BASE, **changes}),
        train_dataset=texts(31, seed=1),
        eval_dataset=texts(8, seed=2),
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trained(trainer: Any) -> dict[str, Any]:
    """What is compared: parameters, everything logged, and predictions."""
    trainer.train()
    predicted = trainer.predict(texts(NUM_PREDICTED, seed=3))
    model = getattr(trainer, "het", trainer.model)
    return {
        "state": model.state_dict(),
        "log": trainer.state.log_history,
        "flops": trainer.state.total_flos,
        "predictions": predicted.predictions,
        "label_ids": predicted.label_ids,
    }


def with_option(
    trainer_class: Any, folder: str, option: str, loss: str, **options: Any
) -> dict[str, Any]:
    """Train with one of OPTIONS, and with the loss "float64" or the model's "own"."""
    if loss != "float64":
        options["compute_loss_func"] = None
    if option.startswith("padded"):
        options["data_collator"] = padded
    changes = dict(OPTIONS[option])
    if trainer_class is transformers.Trainer:
        changes["per_device_train_batch_size"] = PLAN.global_batch_size
        each = {**BASE, **changes}["per_device_eval_batch_size"]
        changes["per_device_eval_batch_size"] = each * PLAN.world_size
    return trained(
        make(trainer_class, f"{folder}/{trainer_class.__name__}", changes, **options)
    )


def train_by_plan(
    rank: int, folder: str, cases: list[tuple[str, str]], plan: Plan = PLAN
) -> list[dict[str, Any] | str] | None:
    """On rank zero the result of each case, (option, loss), or why it is refused."""
    from shardhet.hf import HetTrainer

    results: list[dict[str, Any] | str] = []
    for option, loss in cases:
        with as_torchrun_starts(rank, PLAN.world_size):
            try:
                results.append(with_option(HetTrainer, folder, option, loss, plan=plan))
            except (ValueError, ImportError) as error:
                results.append(f"{type(error).__name__}: {error}")
    return results if rank == 0 else None


def difference(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float]:
    """The largest of anything logged, relative, and of a parameter; infinite for entries that
    only one of them has.
    """
    logged = 0.0
    if len(found["log"]) != len(expected["log"]) or found["flops"] != expected["flops"]:
        return float("inf"), 0.0
    for entry, plain in zip(found["log"], expected["log"], strict=True):
        ours, theirs = map(_compared, (entry, plain))
        if ours.keys() != theirs.keys():
            return float("inf"), 0.0
        for name, value in theirs.items():
            scale = max(abs(value), abs(ours[name]), 1e-30)
            logged = max(logged, abs(ours[name] - value) / scale)
    state = expected["state"].items()
    of_params = [float((found["state"][fqn] - value).abs().max()) for fqn, value in state]
    return logged, max(of_params)


def _compared(entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in entry.items()
        if not any(part in name for part in TIMINGS)
    }
