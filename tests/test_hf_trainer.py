"""transformers' Trainer under a plan is transformers' Trainer on one process."""

import inspect
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan, Stage
from shardhet.records.plan import HoldsFor
from tests.selection import for_campaign, one_in
from tests.small_models import of_transformers
from tests.worlds import TRANSFORMERS, preload, run_ranks

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
preload(*TRANSFORMERS)
from tests.trainer_options import (  # noqa: E402  # needs transformers
    IN_ROUNDS,
    IN_STAGES,
    LOGGED_BAR,
    NUM_PREDICTED,
    PARAM_BAR,
    PLAN,
    VOCAB_SIZE,
    arguments,
    as_torchrun_starts,
    difference,
    llama,
    loss_in_float64,
    texts,
    train_by_plan,
    with_option,
)

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ANSWER = ("start_positions", "end_positions")
FIRST_CASE_S = 110.0  # every rank imports transformers once, on a busy machine slowly
# Under ``PLAN`` every option is tried by experiments/trainer_options.
TRIED_IN_STAGES = [("padded, tokens seen", "float64"), ("accumulation", "float64")]
TRIED_IN_ROUNDS = [("padded, tokens seen", "float64"), ("accumulation over epochs", "float64")]


@pytest.mark.parametrize(
    "plan, tried",
    [
        (IN_STAGES, [("long", "float64")]),
        for_campaign(IN_STAGES, TRIED_IN_STAGES),
        for_campaign(IN_ROUNDS, TRIED_IN_ROUNDS),
    ],
)
def test_options_log_what_one_process_logs(
    tmp_path: Path, plan: Plan, tried: list[tuple[str, str]]
) -> None:
    args = str(tmp_path), tried, plan
    found = run_ranks(train_by_plan, 3, *args, timeout_s=2 * FIRST_CASE_S)[0]
    for (option, loss), by_plan in zip(tried, found, strict=True):
        plain = with_option(transformers.Trainer, str(tmp_path), option, loss)
        logged, param = difference(by_plan, plain)
        assert logged <= LOGGED_BAR[loss], option
        assert param <= PARAM_BAR, option
        # A plain Trainer whose training ended within an epoch predicts fewer samples than it
        # is given (transformers 5.23), so only that of whole epochs is a reference.
        if option == "long":
            np.testing.assert_allclose(
                by_plan["predictions"], plain["predictions"], rtol=0, atol=1e-12
            )
            np.testing.assert_array_equal(by_plan["label_ids"], plain["label_ids"])
        assert len(by_plan["predictions"]) == NUM_PREDICTED


def into_an_encoding(rows: list[dict[str, Tensor]]) -> Any:
    """What transformers' own collators return: no dict."""
    tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return transformers.BatchEncoding(tensors)


def train_a_classifier(rank: int, folder: str, plan: Plan, num_batches: int) -> dict[str, Any]:
    """A model whose loss is a mean over samples, under its own loss, for five steps."""
    from shardhet.hf import HetTrainer

    with as_torchrun_starts(rank, PLAN.world_size):
        args = arguments(folder, max_steps=5, gradient_accumulation_steps=num_batches)
        trainer = HetTrainer(
            classifier(),
            args,
            plan=plan,
            train_dataset=labelled(40),
            data_collator=into_an_encoding,
        )
        trainer.model_accepts_loss_kwargs = num_batches == 1  # else the mean of batches' means
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return trainer.het.state_dict()


def classifier() -> Any:
    """A small BERT with a head for three classes; no dropout."""
    return of_transformers("BertForSequenceClassification", num_labels=3, **NO_DROPOUT).double()


def labelled(num_samples: int) -> list[dict[str, Tensor]]:
    """Texts with one label each."""
    return [
        {"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 3}
        for row in texts(num_samples, seed=4)
    ]


CLASSIFIER_IN_STAGES = Plan.by_hand(
    microbatch_sizes=[2, 2, 0],
    rank_batch_sizes=[4, 4, 0],
    state_shares=[1.0, 0.2, 0.8],
    num_rounds=2,
    global_batch_size=7,
    stages=[
        Stage(units=("bert.embeddings", "bert.encoder.layer.0"), num_ranks=1),
        Stage(units=("bert.encoder.layer.1", "bert.pooler", "classifier"), num_ranks=2),
    ],
)


@pytest.mark.parametrize(
    "plan, num_batches",
    one_in(
        3,
        [(IN_ROUNDS, 2), (PLAN, 1), (CLASSIFIER_IN_STAGES, 1), (CLASSIFIER_IN_STAGES, 2)],
    ),
)
def test_a_mean_over_samples_is_trained_as_on_one_process(
    tmp_path: Path, plan: Plan, num_batches: int
) -> None:
    given = str(tmp_path), plan, num_batches
    found = run_ranks(train_a_classifier, 3, *given, timeout_s=FIRST_CASE_S)[0]
    args = arguments(
        tmp_path,
        max_steps=5,
        gradient_accumulation_steps=num_batches,
        per_device_train_batch_size=PLAN.global_batch_size,
    )
    model = classifier()
    trainer = transformers.Trainer(model, args, train_dataset=labelled(40))
    trainer.model_accepts_loss_kwargs = num_batches == 1
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    for fqn, param in model.state_dict().items():
        if "key.bias" in fqn:  # its gradient is 0 but for rounding, which AdamW normalises
            continue
        torch.testing.assert_close(found[fqn], param, rtol=1e-9, atol=1e-9)


def own_mean(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
    """Of the next token at each position that has one, without outputs."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten())


@pytest.mark.parametrize(
    "methods, changes",
    [
        ({"compute_loss": own_mean}, {}),
        ({"compute_loss": own_mean}, {"gradient_accumulation_steps": 2}),
        ({}, {"label_smoothing_factor": 0.1}),
    ],
)
def test_means_over_next_tokens_are_those_of_whole_batches(
    methods: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    from shardhet.hf import HetTrainer

    plan, found = Plan.by_hand(microbatch_sizes=[1], num_rounds=4), []
    for base, size, given in (
        (HetTrainer, {}, {"plan": plan}),
        (transformers.Trainer, {"per_device_train_batch_size": 4}, {}),
    ):
        args = arguments(tmp_path, max_steps=2, optim="sgd", **size, **changes)
        given["train_dataset"] = texts(16, seed=1)
        trainer = type("Own", (base,), methods)(llama(), args, **given)
        trainer.model_accepts_loss_kwargs = not methods
        trainer.train()
        found.append(getattr(trainer, "het", trainer.model).state_dict())
    for fqn, param in found[1].items():
        torch.testing.assert_close(found[0][fqn], param, rtol=0, atol=1e-9)


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


def alone(folder: Path, model: Any = None, kind: Any = None, **given: Any) -> Any:
    """A trainer of one process; ``given`` is for the trainer, or else for its arguments."""
    from shardhet.hf import HetTrainer

    of_trainer = inspect.signature(HetTrainer.__init__).parameters.keys()
    of_trainer |= inspect.signature(transformers.Trainer.__init__).parameters.keys()
    options = {name: given.pop(name) for name in [*given] if name in of_trainer}
    args = options.pop("args", None) or arguments(folder, **given)
    options = {"plan": ONE, "train_dataset": texts(8, seed=1), **options}
    trainer = (kind or HetTrainer)(llama() if model is None else model, args, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def overriding(**methods: Any) -> Any:
    from shardhet.hf import HetTrainer

    return type("Overriding", (HetTrainer,), methods)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "evaluation in float16": ({"fp16_full_eval": True}, "fp16_full_eval"),
    "adafactor": ({"optim": "adafactor"}, "optim='adafactor'"),
    "at SIGTERM": ({"enable_jit_checkpoint": True}, "ask_to_end"),
    "batch": ({"per_device_train_batch_size": 3}, "per_device_train_batch_size=3"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    "compile": ({"torch_compile": True}, "compile_units"),
    "by rank": ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
    "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plan_cannot_honour_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        alone(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision=fp8 is not supported"),
        ("ACCELERATE_USE_FSDP", "true", "the plan shards the model"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "the plan shards the model"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "the plan shards the model"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "the plan shards the model"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "compile_units"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "steps=4, which a Trainer does not"),
    ],
)
def test_what_the_launcher_asks_for_and_a_plan_cannot_honour_is_refused_by_name(
    name: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DeepSpeed, if it is not installed, is refused by transformers when arguments are made.
    is_read_first = name == "ACCELERATE_MIXED_PRECISION"
    args = None if is_read_first else arguments(tmp_path)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"accelerate launch: .*{message}"):
        alone(tmp_path, args=args)


@pytest.mark.parametrize("method", ["get_train_dataloader", "get_eval_dataloader"])
def test_loaders_that_do_not_deal_by_the_plan_are_refused(method: str, tmp_path: Path) -> None:
    samples = texts(8, seed=1)
    loader = torch.utils.data.DataLoader(samples, batch_size=4)  # type: ignore[arg-type]  # rows
    kind = overriding(**{method: lambda *_: loader})
    own = {"max_steps": 1, "eval_strategy": "epoch", "eval_dataset": samples}
    trainer = alone(tmp_path, kind=kind, **own)
    with pytest.raises(ValueError, match=f"{method}.* does not deal out batches"):
        trainer.train()


def test_batch_sizes_alone_or_the_path_of_its_file_are_a_plan(tmp_path: Path) -> None:
    plan, path = Plan.by_hand(microbatch_sizes=[8]), tmp_path / "plan.json"
    plan.save(path)
    for given in ([8], path, str(path)):
        assert alone(tmp_path, plan=given).plan == plan


def test_a_plan_is_made_for_these_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDHET_REHEARSE", "A6000")
    args = arguments(tmp_path, per_device_train_batch_size=6)
    with pytest.raises(ValueError, match=r"train_dataset.*there is none"):
        alone(tmp_path, args=args, plan="auto", train_dataset=None)
    plan = alone(tmp_path, llama().float(), args=args, plan="auto").plan
    assert plan.ranks[0].device.kind == "NVIDIA RTX A6000"
    assert plan.global_batch_size == 6


def test_an_optimizer_on_the_host_is_fused(tmp_path: Path) -> None:
    losses = []
    for on_host in (False, True):
        plan = Plan.by_hand(microbatch_sizes=[8], optimizer_on_host=on_host)
        how = {"optim": "adamw_torch", "max_steps": 2, "train_dataset": texts(16, seed=1)}
        trainer = alone(tmp_path / str(on_host), plan=plan, **how)
        losses.append(trainer.train().training_loss)
        assert bool(trainer.optimizer.optimizer.defaults["fused"]) == on_host
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_plan_for_another_optimizer_is_refused_before_the_first_step(tmp_path: Path) -> None:
    said = HoldsFor(param_dtype="float64", tokens_per_sample=99, num_moments=1)
    trainer = alone(tmp_path, plan=replace(ONE, holds_for=said))
    with pytest.raises(
        ValueError, match=r"AdamW keeps .*num_moments is 2 but the plan was made for 1"
    ):
        trainer.train()
    assert trainer.state.global_step == trainer.het.step == 0


def with_its_own_optimizer(folder: Path) -> Any:
    model = llama()
    return alone(folder, model, optimizers=(torch.optim.AdamW(model.parameters()), None))


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda folder: alone(folder, kind=overriding(prediction_step=lambda *_: None)),
            "Overriding overrides prediction_step",
        ),
        (lambda folder: alone(folder, plan=PLAN), "1 processes but the plan has 3 devices"),
        (with_its_own_optimizer, "Wrap the model with HetFSDP"),
    ],
)
def test_what_a_trainer_cannot_use_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        make(tmp_path)


def one_step(folder: Path, loss: Any, **changes: Any) -> None:
    """With a loss function of the user's."""
    alone(folder, compute_loss_func=loss, max_steps=1, **changes).train()


def test_a_loss_that_is_no_sum_over_samples_is_refused(tmp_path: Path) -> None:
    def root(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss_in_float64(outputs, labels, num_items_in_batch).sqrt()

    with pytest.raises(ValueError, match="neither a sum over samples nor a mean over labels"):
        one_step(tmp_path, root)


def test_a_small_term_that_is_not_divided_by_the_items_is_refused(tmp_path: Path) -> None:
    def with_a_term(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = loss_in_float64(outputs, labels, num_items_in_batch)
        return loss + 1e-2 * outputs.logits.mean().square()

    def never_divided(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss_in_float64(outputs, labels, torch.ones(()))

    for loss in (with_a_term, never_divided):
        with pytest.raises(ValueError, match="not all of it is divided by num_items_in_batch"):
            one_step(tmp_path, loss)


def test_means_are_not_added_up(tmp_path: Path) -> None:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits[labels != -100].square().mean()

    one_step(tmp_path, mean)
    with pytest.raises(ValueError, match=r"a plan 2 times its num_rounds, or"):
        one_step(tmp_path, mean, gradient_accumulation_steps=2)


def test_what_compute_loss_keeps_when_it_is_tried_is_put_back(tmp_path: Path) -> None:
    from shardhet.hf import HetTrainer

    class Keeping(HetTrainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.losses.append(len(inputs["labels"]))
            self.log({"calls": float(self.calls)})
            return super().compute_loss(model, inputs, *args, **kwargs)

    how = {"max_steps": 3, "logging_strategy": "no", "train_dataset": labelled(12)}
    trainer = alone(tmp_path, classifier(), Keeping, **how)
    trainer.losses = []
    trainer.train()
    logged = [each["calls"] for each in trainer.state.log_history if "calls" in each]
    assert (trainer.calls, trainer.losses, logged) == (3, [4, 4, 4], [1.0, 2.0, 3.0])


def test_a_loss_of_what_compute_loss_keeps_is_refused(tmp_path: Path) -> None:
    calls: list[None] = []

    def warmed_up(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        calls.append(None)
        return loss_in_float64(outputs, labels) * min(1.0, len(calls) / 100)

    with pytest.raises(ValueError, match="another when it is computed again"):
        one_step(tmp_path, warmed_up)


WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


def weighted(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(outputs.logits, labels, weight=WEIGHTS)


def root_of_mean(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    return F.mse_loss(outputs.logits[:, 0], labels.double()).sqrt()


def overlap(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    likely = outputs.logits.sigmoid()[:, 0]
    return 1 - 2 * (likely * labels).sum() / (likely.sum() + labels.sum())


@pytest.mark.parametrize(
    "loss, batch_size", [(weighted, 1), (weighted, 4), (root_of_mean, 1), (overlap, 1)]
)
def test_what_looks_like_a_mean_of_one_class_or_sample_is_refused(
    loss: Any, batch_size: int, tmp_path: Path
) -> None:
    label = torch.tensor(0) if loss is weighted else torch.tensor(1.0, dtype=torch.float64)
    samples = [{**each, "labels": label} for each in labelled(4)]
    plan = Plan.even(1, microbatch_size=batch_size)
    how = {"plan": plan, "train_dataset": samples, "max_steps": 1, "compute_loss_func": loss}
    with pytest.raises(ValueError, match="neither a sum over samples nor a mean over labels"):
        alone(tmp_path, classifier(), **how).train()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_weights_of_samples_that_are_alike_at_first_do_not_pass_for_none(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    from shardhet.hf import HetTrainer

    class Weighing(HetTrainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            weight = inputs.pop("weight")
            losses = F.cross_entropy(model(**inputs).logits, inputs["labels"], reduction="none")
            return (weight * losses).sum() / weight.sum()

    samples = [{**each, "weight": torch.ones((), dtype=dtype)} for each in labelled(4)]
    plan = Plan.by_hand(microbatch_sizes=[1], num_rounds=4)
    how = {"max_steps": 1, "remove_unused_columns": False, "train_dataset": samples}
    trainer = alone(tmp_path, classifier(), Weighing, plan=plan, **how)
    with pytest.raises(ValueError, match="neither a sum over samples nor a mean over labels"):
        trainer.train()


def count_adapters(rank: int, folder: str) -> list[Any]:
    from peft import LoraConfig, get_peft_model

    from shardhet.hf import HetTrainer

    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
    with as_torchrun_starts(rank, PLAN.world_size):
        model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
        before = [*model.get_nb_trainable_parameters(), model.num_parameters()]
        trainer = HetTrainer(model, arguments(folder), plan=PLAN)
        inside: Any = trainer.model
        return [
            [before[0], *before],
            [
                trainer.get_num_trainable_parameters(),
                *inside.get_nb_trainable_parameters(),
                inside.num_parameters(),
            ],
        ]


def test_parameters_are_counted_for_the_whole_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for before, after in run_ranks(count_adapters, 3, str(tmp_path), timeout_s=FIRST_CASE_S):
        assert after == before


def test_batches_of_an_evaluation_stay_apart_if_asked(tmp_path: Path) -> None:
    how = {"eval_do_concat_batches": False, "per_device_eval_batch_size": 2}
    predicted = alone(tmp_path, classifier(), **how).predict(labelled(5))
    assert [len(each) for each in predicted.predictions] == [2, 2, 1]
    assert [len(each) for each in predicted.label_ids] == [2, 2, 1]


def count_labels(prediction: Any) -> dict[str, Any]:
    """A metric that knows every row."""
    right = np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids
    return {"rows": prediction.label_ids.tolist(), "right": int(right.sum())}


def evaluate_rows(rank: int, folder: str) -> Any:
    from shardhet.hf import HetTrainer

    with as_torchrun_starts(rank, PLAN.world_size):
        args = arguments(folder, per_device_eval_batch_size=2)
        trainer = HetTrainer(classifier(), args, plan=PLAN, compute_metrics=count_labels)
        return trainer.evaluate(labelled(13)), trainer.predict(labelled(13)).predictions


def test_evaluation_counts_each_row_once(tmp_path: Path) -> None:
    """Batches of six and a last one of one row, for which most ranks have none.

    accelerate's gather_for_metrics (1.15) drops a rank's mean there, and keeps one in which a
    row is repeated.
    """
    args = arguments(tmp_path, per_device_eval_batch_size=2 * PLAN.world_size)
    plain = transformers.Trainer(classifier(), args, compute_metrics=count_labels)
    expected, predicted = plain.evaluate(labelled(13)), plain.predict(labelled(13)).predictions
    assert expected["eval_rows"] == [int(row["labels"]) for row in labelled(13)]
    for metrics, predictions in run_ranks(
        evaluate_rows, PLAN.world_size, str(tmp_path), timeout_s=FIRST_CASE_S
    ):
        for name in ("eval_rows", "eval_right"):
            assert metrics[name] == expected[name]
        assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-12)
        np.testing.assert_allclose(predictions, predicted, rtol=0, atol=1e-12)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples in one order."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


class MeasuredStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


@pytest.mark.parametrize("kind", [Stream, MeasuredStream])
def test_streams_are_refused(kind: Any, tmp_path: Path) -> None:
    stream = kind(labelled(4))
    trainer = alone(tmp_path, classifier(), train_dataset=stream, max_steps=1)
    with pytest.raises(ValueError, match="dataset for training cannot be dealt out"):
        trainer.train()
    with pytest.raises(ValueError, match="dataset for evaluation cannot be dealt out"):
        trainer.evaluate(stream)


def pad_to_longest(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As transformers' DataCollatorWithPadding does."""
    inputs = [row["input_ids"] for row in rows]
    batch = {name: torch.stack([row[name] for row in rows]) for name in ANSWER}
    batch["input_ids"] = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


def train_on_answers(trainer_class: Any, folder: str, **options: Any) -> Any:
    """Answers are places among all tokens of a batch, padded ones too."""
    model = of_transformers("BertForQuestionAnswering", **NO_DROPOUT).double()
    samples = [
        {"input_ids": torch.arange(4, 6 + i), **dict.fromkeys(ANSWER, torch.tensor(i % 2))}
        for i in range(12)
    ]
    args = arguments(folder, max_steps=2, logging_steps=1, per_device_eval_batch_size=3)
    if trainer_class is transformers.Trainer:
        args.per_device_train_batch_size, args.per_device_eval_batch_size = 7, 9
    options |= {"train_dataset": samples, "eval_dataset": samples}
    trainer = trainer_class(model, args, data_collator=pad_to_longest, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


def answers_by_plan(rank: int, folder: str) -> Any:
    from shardhet.hf import HetTrainer

    with as_torchrun_starts(rank, PLAN.world_size):
        return train_on_answers(HetTrainer, folder, plan=PLAN)


def test_batches_are_padded_alike_where_losses_depend_on_it(tmp_path: Path) -> None:
    found = run_ranks(answers_by_plan, 3, str(tmp_path), timeout_s=FIRST_CASE_S)[0]
    plain = train_on_answers(transformers.Trainer, str(tmp_path))
    assert found == pytest.approx(plain, rel=LOGGED_BAR["float64"])


def test_answers_outside_of_their_texts_are_refused(tmp_path: Path) -> None:
    model = of_transformers("BertForQuestionAnswering")
    samples = [
        {"input_ids": each["input_ids"], "start_positions": i, "end_positions": 9 * i}
        for i, each in enumerate(texts(4, seed=4))
    ]
    trainer = alone(tmp_path, model, train_dataset=samples)
    with pytest.raises(ValueError, match="end_positions: 2 of 4 samples have their answer"):
        trainer.train()


class Averaged(nn.Module):
    """A classifier that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB_SIZE, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids).mean(dim=1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_model_that_is_not_of_transformers_is_saved_by_its_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    how = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = alone(tmp_path, Averaged(), train_dataset=labelled(8), **how)
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    Averaged().load_state_dict(saved)
    assert torch.equal(saved["head.bias"], trainer.het.state_dict()["head.bias"])
    assert trainer.train(resume_from_checkpoint=True).global_step == 2


class StopWithin(transformers.TrainerCallback):
    """Ends the training in the middle of the second step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 1


def test_a_step_that_is_stopped_in_its_middle_is_dropped(tmp_path: Path) -> None:
    datasets = {"train_dataset": texts(24, seed=1), "eval_dataset": texts(4, seed=2)}
    how = {"max_steps": 3, "gradient_accumulation_steps": 3, "callbacks": [StopWithin()]}
    plan = Plan.by_hand(microbatch_sizes=[1], num_rounds=2)
    trainer = alone(tmp_path, plan=plan, **datasets, **how)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.het.is_between_steps
    assert trainer.het.batches_per_step == 1
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.remove_callback(StopWithin)
    trainer.train()
    assert trainer.state.global_step == 3


class Flattening:
    """A collator that puts all samples into one row."""

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


def test_a_collator_that_flattens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one row per sample"):
        alone(tmp_path, max_steps=1, data_collator=Flattening()).train()


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
