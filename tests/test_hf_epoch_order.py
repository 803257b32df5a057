"""Samplers under a plan give the samples that they give a plain Trainer, in every epoch."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardhet import Plan
from tests.worlds import TRANSFORMERS, on_ranks, preload, run_ranks, workers_allowed

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
preload(*TRANSFORMERS)
from accelerate.data_loader import (  # noqa: E402  # needs accelerate
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from transformers.trainer_pt_utils import (  # noqa: E402  # needs transformers
    BatchRebalanceSampler,
    DistributedLengthGroupedSampler,
    LengthGroupedSampler,
    ShardSampler,
)

from tests.trainer_options import (  # noqa: E402  # needs transformers
    FIRST_CASE_S,
    arguments,
    as_torchrun_starts,
)

PLAN = Plan.by_hand(microbatch_sizes=[3, 1])
NUM_SAMPLES, NUM_EPOCHS = 12, 2
LENGTHS = [1 + i * 5 % 7 for i in range(NUM_SAMPLES)]
AS_WRITTEN = {"accelerator_config": {"use_seedable_sampler": False}}


def seeded(seed: int = 7) -> torch.Generator:
    """A generator of a sampler's own."""
    return torch.Generator().manual_seed(seed)


class OfNumpy(Sampler[int]):
    """Shuffles with a generator of its own that is not torch's, and has a part of an epoch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter(self.rng.permutation(NUM_SAMPLES)[: len(self)].tolist())


class Endless(OfNumpy):
    """Never ends, so that its length is that of an epoch."""

    def __iter__(self) -> Any:
        return itertools.cycle([3, 1, 4, 5, 9, 2, 6])


class Around(Sampler[int]):
    """Gives each index of another sampler twice."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return 2 * len(self.sampler)

    def __iter__(self) -> Any:
        return iter([i for i in self.sampler for _ in range(2)])


# What a sampler is made from: the dataset.
Making = Callable[[Any], Any]
KEPT: dict[str, Making] = {
    "none": lambda _: None,
    "a list": lambda _: [3, 1, 2, 7, 7],
    "sequential": SequentialSampler,
    "random": RandomSampler,
    "fewer": lambda ds: RandomSampler(ds, num_samples=6),
    "more": lambda ds: RandomSampler(ds, num_samples=17),
    "replacement": lambda ds: RandomSampler(ds, replacement=True, num_samples=24),
    "of another length": lambda _: RandomSampler(range(5)),
    "subset": lambda _: SubsetRandomSampler([1, 4, 5, 7, 11]),
    "subset, own": lambda _: SubsetRandomSampler([1, 4, 5, 7, 11], generator=seeded()),
    "weighted": lambda _: WeightedRandomSampler(LENGTHS, 10),
    "weighted, own": lambda _: WeightedRandomSampler(LENGTHS, 9, False, generator=seeded()),
    "weighted, each once": lambda _: WeightedRandomSampler(LENGTHS, NUM_SAMPLES, False),
    "by length": lambda _: LengthGroupedSampler(2, lengths=LENGTHS),
    "by length, own": lambda _: LengthGroupedSampler(2, lengths=LENGTHS, generator=seeded()),
    "distributed to one": lambda ds: DistributedSampler(ds, num_replicas=1, rank=0, seed=3),
    "of numpy": lambda _: OfNumpy(),
    "endless": lambda _: Endless(),
    "around another": lambda _: Around(SubsetRandomSampler([2, 3, 9], generator=seeded())),
}
KEPT_AS_WRITTEN: dict[str, Making] = {
    "random": RandomSampler,
    "generator": lambda ds: RandomSampler(ds, num_samples=7, generator=seeded()),
    "replacement": lambda ds: RandomSampler(ds, True, 10, generator=seeded()),
    "seedable": lambda ds: SeedableRandomSampler(ds, data_seed=3),
}
EQUAL_RANKS = "ranks draw unlike orders"
BATCHES = "it gives batches but the plan"
OWN_ORDER = "accelerate draws a random order from data_seed alone"
REFUSED: dict[str, tuple[Making, str]] = {
    "generator": (lambda ds: RandomSampler(ds, generator=seeded()), OWN_ORDER),
    "seedable": (lambda ds: SeedableRandomSampler(ds, data_seed=3), OWN_ORDER),
    "derived": (lambda ds: type("Own", (RandomSampler,), {})(ds), OWN_ORDER),
    "distributed": (DistributedSampler, EQUAL_RANKS),
    "distributed by length": (
        lambda _: DistributedLengthGroupedSampler(2, lengths=LENGTHS),
        EQUAL_RANKS,
    ),
    "shards": (
        lambda ds: ShardSampler(
            ds,
            num_processes=2,
            process_index=torch.distributed.get_rank(),
        ),
        EQUAL_RANKS,
    ),
    "batches": (lambda ds: BatchSampler(SequentialSampler(ds), 4, False), BATCHES),
    "skipped batches": (
        lambda ds: SkipBatchSampler(BatchSampler(SequentialSampler(ds), 4, False)),
        "has no __len__|" + BATCHES,
    ),
    "rebalanced": (lambda _: BatchRebalanceSampler(LENGTHS, 4, 2, 1), BATCHES),
    "sharded batches": (
        lambda ds: BatchSamplerShard(BatchSampler(SequentialSampler(ds), 4, False), 2, 0),
        BATCHES,
    ),
    "without a length": (lambda _: (i for i in range(9)), "has no __len__"),
}


class Numbered(list[int]):
    """Samples that tell their numbers, and the epoch."""

    epoch = -1

    def __init__(self, *, is_drawing: bool = False) -> None:
        super().__init__(range(NUM_SAMPLES))
        self.is_drawing = is_drawing

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, i: Any) -> Any:
        if self.is_drawing:
            torch.rand(i + 1)
        x = torch.tensor([float(super().__getitem__(i))])
        return {"x": x, "epoch": torch.tensor([self.epoch]), "labels": x}


class Scale(nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, epoch: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.scale * x - labels).square().mean(), "logits": x}


def run(
    trainer_class: Any,
    folder: str,
    making: Making,
    *,
    dataset: Any = None,
    evaluates: bool = False,
    resume: Any = None,
    **changes: Any,
) -> list[list[int]]:
    """The samples of each step, on this rank."""
    dataset = dataset or Numbered()
    steps: list[Any] = []

    class Recording(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return making(dataset)

        def _get_eval_sampler(self, *_: Any) -> Any:
            return making(dataset)

        def training_step(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
            steps.append(inputs["x"].flatten().int().tolist())
            assert all(inputs["epoch"] == int(self.state.epoch or 0))
            return super().training_step(model, inputs, *args, **given)

    plain = trainer_class is transformers.Trainer
    if plain:
        size = {f"per_device_{part}_batch_size": 4 for part in ("train", "eval")}
    else:
        size = {"per_device_eval_batch_size": 2}
    options = {"num_train_epochs": NUM_EPOCHS, "learning_rate": 0.0, **size, **changes}
    trainer = Recording(
        Scale(),
        arguments(folder, **options),
        train_dataset=dataset,
        **({} if plain else {"plan": PLAN}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if evaluates:
        return [trainer.predict(dataset).predictions.flatten().astype(int).tolist()]
    trainer.train(resume_from_checkpoint=resume)
    return steps


def run_by_plan(
    rank: int, folder: str, names: Sequence[str], table: str, given: dict[str, Any]
) -> list[Any]:
    """The samples of this rank for each sampler of a table, or the sentence that refuses it."""
    from shardhet.hf import HetTrainer

    found: list[Any] = []
    for name in names:
        making: Any = globals()[table][name]
        making = making[0] if isinstance(making, tuple) else making
        with as_torchrun_starts(rank, PLAN.world_size):
            try:
                found.append(run(HetTrainer, folder, making, **given))
            except ValueError as error:
                found.append(str(error))
    return found


def of_all_ranks(steps: Sequence[list[list[int]]]) -> list[list[int]]:
    """Each step's samples, in plan order."""
    return [[i for part in parts for i in part] for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize("table", ["KEPT", "KEPT_AS_WRITTEN"])
def test_samplers_give_what_they_give_one_process(table: str, tmp_path: Path) -> None:
    makings: dict[str, Making] = globals()[table]
    given = {} if table == "KEPT" else AS_WRITTEN
    args = str(tmp_path), list(makings), table, given
    found = run_ranks(run_by_plan, 2, *args, timeout_s=2 * FIRST_CASE_S)
    for name, *by_rank in zip(makings, *found, strict=True):
        assert all(isinstance(each, list) for each in by_rank), (name, by_rank)
        plain = run(transformers.Trainer, str(tmp_path), makings[name], **given)
        assert of_all_ranks(by_rank) == plain, name


EVALUATED = ("fewer", "replacement", "subset, own", "weighted", "distributed to one")


def test_samplers_of_evaluation_give_what_they_give_one_process(tmp_path: Path) -> None:
    args = str(tmp_path), EVALUATED, "KEPT", {"evaluates": True}
    found = run_ranks(run_by_plan, 2, *args, timeout_s=FIRST_CASE_S)
    for name, *by_rank in zip(EVALUATED, *found, strict=True):
        plain = run(transformers.Trainer, str(tmp_path), KEPT[name], evaluates=True)
        assert by_rank == [plain, plain], name


def test_samplers_that_deal_themselves_are_refused_by_name(tmp_path: Path) -> None:
    args = str(tmp_path), list(REFUSED), "REFUSED", {}
    found = run_ranks(run_by_plan, 2, *args, timeout_s=FIRST_CASE_S)
    for name, *by_rank in zip(REFUSED, *found, strict=True):
        for sentence in by_rank:
            assert isinstance(sentence, str), (name, sentence)
            with pytest.raises(ValueError, match=REFUSED[name][1]):
                raise ValueError(sentence)


@pytest.mark.parametrize("name", ["by length", "weighted, each once"])
def test_every_sample_is_seen_once_where_ranks_draw_for_their_samples(
    name: str, tmp_path: Path
) -> None:
    given = {"dataset": Numbered(is_drawing=True)}
    found = run_ranks(
        run_by_plan, 2, str(tmp_path), [name], "KEPT", given, timeout_s=FIRST_CASE_S
    )
    steps = of_all_ranks([of_rank for [of_rank] in found])
    for epoch in (steps[:3], steps[3:]):
        assert sorted(itertools.chain(*epoch)) == list(range(NUM_SAMPLES))
    assert sorted(steps[:3]) != sorted(steps[3:])


RESUMED = {
    "KEPT": ("random", "by length", "weighted", "subset, own", "around another"),
    "KEPT_AS_WRITTEN": ("random", "generator"),
}


def run_and_resume(rank: int, folder: str, table: str, names: Sequence[str]) -> None:
    """Each checkpoint of a run goes on with the samples that the run went on with."""
    from shardhet.hf import HetTrainer

    given = {} if table == "KEPT" else AS_WRITTEN
    for name in names:
        place = f"{folder}/{name}"
        making = globals()[table][name]
        dataset = Numbered(is_drawing=True)
        with as_torchrun_starts(rank, PLAN.world_size):
            saved = {"save_strategy": "steps", "save_steps": 1}
            whole = run(HetTrainer, place, making, dataset=dataset, **saved, **given)
            half = len(whole) // NUM_EPOCHS
            for done in (half - 1, half, half + 1):
                path = f"{place}/checkpoint-{done}"
                rest = run(HetTrainer, place, making, dataset=dataset, resume=path, **given)
                assert rest == whole[done:], (name, done)


@pytest.mark.parametrize("table", RESUMED)
def test_a_resumed_epoch_goes_on_in_its_order(table: str, tmp_path: Path) -> None:
    args = str(tmp_path), table, RESUMED[table]
    run_ranks(run_and_resume, 2, *args, timeout_s=2 * FIRST_CASE_S)


@on_ranks(2, timeout_s=FIRST_CASE_S)
def test_an_order_that_cannot_be_drawn_again_is_refused(rank: int, tmp_path: Path) -> None:
    """What is not known of a sampler's own generator is noticed when an epoch goes on."""
    with pytest.raises(ValueError, match="OfNumpy: it draws another order than before"):
        run_and_resume(rank, str(tmp_path), "KEPT", ["of numpy"])


class Drawn(Numbered):
    """Samples that are what a worker draws."""

    def __getitem__(self, i: Any) -> Any:
        x = torch.randint(2**20, (1,)).float()
        return {"x": x, "epoch": torch.tensor([self.epoch]), "labels": x}


def run_with_workers(rank: int, folder: str) -> Any:
    given = {"dataset": Drawn(), "dataloader_num_workers": 1, "num_train_epochs": 1}
    with workers_allowed():
        return run_by_plan(rank, folder, ["none"], "KEPT", given)


def test_workers_of_each_rank_draw_what_others_do_not(tmp_path: Path) -> None:
    found = run_ranks(run_with_workers, 2, str(tmp_path), timeout_s=FIRST_CASE_S)
    numbers = [i for [steps] in found for step in steps for i in step]
    assert len(set(numbers)) == len(numbers) == NUM_SAMPLES
