"""transformers' Trainer under a plan is transformers' Trainer on one process."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan
from tests.small_models import TRANSFORMERS_SHAPE
from tests.worlds import TRANSFORMERS, preload, run_ranks

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
preload(*TRANSFORMERS)

VOCAB_SIZE = 64
SEQ_LEN = 11
NUM_PREDICTED = 9
PLAN = Plan.by_hand(
    microbatch_sizes=[2, 3, 0], rank_batch_sizes=[4, 3, 0], state_shares=[0.5, 0.2, 0.3]
)
PARAM_BAR = 1e-12
FIRST_CASE_S = 110.0  # every rank imports transformers once, on a busy machine slowly
LOGGED_BAR = 1e-6  # transformers adds losses up in float32
TIMINGS = ("runtime", "per_second", "preparation_time")

BASE: dict[str, Any] = {
    "max_steps": 20,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "optim": "adamw_torch",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "fused": {"max_steps": 6, "optim": "adamw_torch_fused", "adam_beta2": 0.9},
    "sgd": {"max_steps": 6, "optim": "sgd", "optim_args": "momentum=0.9"},
    "accumulation": {"max_steps": 4, "gradient_accumulation_steps": 3},
    "epochs": {"max_steps": -1, "num_train_epochs": 1.4},
    "no clipping": {"max_steps": 6, "lr_scheduler_type": "cosine", "max_grad_norm": 0.0},
    "drop last": {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True},
    "seeds": {"max_steps": 6, "seed": 7, "data_seed": 9},
    "sequential": {"max_steps": 6, "train_sampling_strategy": "sequential"},
    "by length": {"max_steps": 6, "train_sampling_strategy": "group_by_length"},
    "tokens seen": {"max_steps": 3, "include_num_input_tokens_seen": True},
}


def llama(**changes: Any) -> Any:
    """A small Llama in float64; it has no key bias, whose gradient would be rounding noise."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        **TRANSFORMERS_SHAPE,
        num_hidden_layers=2,
        max_position_embeddings=32,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).double()


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


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the next word, where there is one."""
    is_there = prediction.label_ids[:, 1:] != -100
    is_right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float((is_right & is_there).sum() / is_there.sum())}


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


def make(trainer_class: Any, folder: str, variant: str, changes: Mapping[str, Any]) -> Any:
    """The trainer of a variant."""
    chosen = {**BASE, **VARIANTS[variant], **changes}
    options = {} if trainer_class is transformers.Trainer else {"plan": PLAN}
    trainer = trainer_class(
        llama(),
        arguments(folder, **chosen),
        train_dataset=texts(31, seed=1),
        eval_dataset=texts(7, seed=2),
        compute_loss_func=loss_in_float64,
        compute_metrics=accuracy if variant in ("base", "accumulation") else None,
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
        "predictions": predicted.predictions,
        "label_ids": predicted.label_ids,
    }


def train_by_plan(rank: int, folder: str, variants: list[str]) -> dict[str, Any] | None:
    """Each variant's results on rank zero."""
    from shardhet.hf import HetTrainer

    results = {}
    for variant in variants:
        with as_torchrun_starts(rank, PLAN.world_size):
            results[variant] = trained(make(HetTrainer, folder, variant, {}))
    return results if rank == 0 else None


def test_every_option_trains_as_on_one_process(tmp_path: Path) -> None:
    found = run_ranks(train_by_plan, 3, str(tmp_path), list(VARIANTS), timeout_s=FIRST_CASE_S)[
        0
    ]
    size = PLAN.global_batch_size
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    for variant in VARIANTS:
        expected = trained(make(transformers.Trainer, str(tmp_path), variant, sizes))
        for fqn, param in expected["state"].items():
            error = float((found[variant]["state"][fqn] - param).abs().max())
            assert error <= PARAM_BAR, f"{variant}: {fqn} differs by {error}"
        _compare_logs(variant, found[variant]["log"], expected["log"])
        # A plain Trainer whose training ended within an epoch predicts fewer samples than it
        # is given (transformers 5.23), so only that of whole epochs is a reference.
        if variant == "base":
            np.testing.assert_allclose(
                found[variant]["predictions"], expected["predictions"], rtol=0, atol=1e-12
            )
            np.testing.assert_array_equal(found[variant]["label_ids"], expected["label_ids"])
        assert len(found[variant]["predictions"]) == NUM_PREDICTED


def _compare_logs(variant: str, found: list[Any], expected: list[Any]) -> None:
    for entry, plain in zip(found, expected, strict=True):
        names = {name for name in plain if not any(part in name for part in TIMINGS)}
        assert names == {n for n in entry if not any(part in n for part in TIMINGS)}, variant
        for name in names:
            assert entry[name] == pytest.approx(plain[name], rel=LOGGED_BAR), (variant, name)


def into_an_encoding(rows: list[dict[str, Tensor]]) -> Any:
    """What transformers' own collators return: no dict."""
    tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return transformers.BatchEncoding(tensors)


def train_a_classifier(rank: int, folder: str) -> dict[str, Any]:
    """A model whose loss is a mean over samples, under its own loss, for five steps."""
    from shardhet.hf import HetTrainer

    with as_torchrun_starts(rank, PLAN.world_size):
        args = arguments(folder, max_steps=5)
        trainer = HetTrainer(
            classifier(),
            args,
            plan=PLAN,
            train_dataset=labelled(40),
            data_collator=into_an_encoding,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return trainer.het.state_dict()


def classifier() -> Any:
    """A small BERT with a head for three classes; no dropout."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        **TRANSFORMERS_SHAPE,
        num_hidden_layers=2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config).double()


def labelled(num_samples: int) -> list[dict[str, Tensor]]:
    """Texts with one label each."""
    return [
        {"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 3}
        for row in texts(num_samples, seed=4)
    ]


def test_a_mean_over_samples_is_trained_as_on_one_process(tmp_path: Path) -> None:
    found = run_ranks(train_a_classifier, 3, str(tmp_path), timeout_s=FIRST_CASE_S)[0]
    args = arguments(
        tmp_path,
        max_steps=5,
        per_device_train_batch_size=PLAN.global_batch_size,
    )
    model = classifier()
    trainer = transformers.Trainer(model, args, train_dataset=labelled(40))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    for fqn, param in model.state_dict().items():
        if "key.bias" in fqn:  # its gradient is 0 but for rounding, which AdamW normalises
            continue
        torch.testing.assert_close(found[fqn], param, rtol=1e-9, atol=1e-9)


def save_and_predict(rank: int, folder: str) -> bool:
    """Checkpoints of a run are folders of transformers."""
    from shardhet.hf import HetTrainer

    with as_torchrun_starts(rank, PLAN.world_size):
        args = arguments(
            folder, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True
        )
        trainer = HetTrainer(llama().float(), args, plan=PLAN, train_dataset=texts(14, seed=1))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        trainer.save_model()
        state = trainer.het.state_dict()
    if rank:
        return True
    for place in (Path(folder), Path(folder) / "checkpoint-2"):
        plain = transformers.LlamaForCausalLM.from_pretrained(place).state_dict()
        assert all(torch.equal(plain[fqn], state[fqn]) for fqn in state)
    return (Path(folder) / "checkpoint-2" / "trainer_state.json").is_file()


def test_a_saved_run_opens_with_from_pretrained(tmp_path: Path) -> None:
    assert all(run_ranks(save_and_predict, 3, str(tmp_path), timeout_s=FIRST_CASE_S))


ONE = Plan.even(1, microbatch_size=4)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "evaluation in float16": ({"fp16_full_eval": True}, "fp16_full_eval"),
    "adafactor": ({"optim": "adafactor"}, "optim='adafactor'"),
    "recompute": ({"activation_checkpointing": True}, "recompute=True"),
    "at SIGTERM": ({"enable_jit_checkpoint": True}, "ask_to_end"),
    "batch": ({"per_device_train_batch_size": 3}, "per_device_train_batch_size=3"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    "compile": ({"torch_compile": True}, "compile_units"),
    "by rank": ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
    "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plan_cannot_honour_is_refused_by_name(case: str, tmp_path: Path) -> None:
    from shardhet.hf import HetTrainer

    changes, message = REFUSED[case]
    args = arguments(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        HetTrainer(llama(), args, plan=ONE, train_dataset=texts(8, seed=1))


def test_batch_sizes_alone_are_a_plan(tmp_path: Path) -> None:
    from shardhet.hf import HetTrainer

    trainer = HetTrainer(llama(), arguments(tmp_path), plan=[8], train_dataset=texts(8, seed=1))
    assert trainer.plan == Plan.by_hand(microbatch_sizes=[8])


def test_a_plan_for_other_ranks_is_refused(tmp_path: Path) -> None:
    from shardhet.hf import HetTrainer

    with pytest.raises(ValueError, match="1 processes but the plan has 3 devices"):
        HetTrainer(llama(), arguments(tmp_path), plan=PLAN, train_dataset=texts(8, seed=1))


def test_an_optimizer_of_the_whole_model_is_refused(tmp_path: Path) -> None:
    from shardhet.hf import HetTrainer

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="Wrap the model with HetFSDP"):
        HetTrainer(
            model,
            arguments(tmp_path),
            plan=ONE,
            train_dataset=texts(8, seed=1),
            optimizers=(optimizer, None),
        )


def one_step(folder: Path, loss: Any, **changes: Any) -> None:
    """With a loss function of the user's."""
    from shardhet.hf import HetTrainer

    trainer = HetTrainer(
        llama(),
        arguments(folder, max_steps=1, **changes),
        plan=ONE,
        train_dataset=texts(8, seed=1),
        compute_loss_func=loss,
    )
    trainer.train()


def test_a_loss_that_is_no_sum_over_samples_is_refused(tmp_path: Path) -> None:
    def root(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss_in_float64(outputs, labels, num_items_in_batch).sqrt()

    with pytest.raises(ValueError, match="neither a sum over samples nor a mean over labels"):
        one_step(tmp_path, root)


def test_means_are_not_added_up(tmp_path: Path) -> None:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits[labels != -100].square().mean()

    one_step(tmp_path, mean)
    with pytest.raises(ValueError, match="give the plan more microbatches"):
        one_step(tmp_path, mean, gradient_accumulation_steps=2)


class Flattening:
    """A collator that puts all samples into one row."""

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


def test_a_collator_that_flattens_is_refused(tmp_path: Path) -> None:
    from shardhet.hf import HetTrainer

    trainer = HetTrainer(
        llama(),
        arguments(tmp_path, max_steps=1),
        plan=ONE,
        train_dataset=texts(8, seed=1),
        data_collator=Flattening(),
    )
    with pytest.raises(ValueError, match="one row per sample"):
        trainer.train()


def use_accelerate(rank: int) -> float:
    """``accelerator.prepare`` of what it can serve: the optimizer and the schedule."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with as_torchrun_starts(rank, PLAN.world_size):
        accelerator = Accelerator(cpu=True)
        model = HetFSDP(plain, PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = accelerator.prepare(optimizer)
        x = torch.randn(7, 4, dtype=torch.float64)
        first = PLAN.first_sample(model.position)
        part = x[first : first + PLAN.ranks[model.position].rank_batch_size]
        output = model(part)
        loss = output.square().sum() if len(part) else torch.zeros(())
        mean = model.backward(loss, len(part))
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            accelerator.prepare(model)
    assert mean is not None
    return mean


def test_accelerate_serves_the_optimizer_and_is_refused_the_model() -> None:
    # Ranks that have refused a model leave the group.
    means = run_ranks(use_accelerate, 3, timeout_s=FIRST_CASE_S, fresh_world=True)
    assert len(set(means)) == 1
