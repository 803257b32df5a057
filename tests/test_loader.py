"""The loader for loops of one's own: who gets which sample, and the step that comes of it."""

import copy
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import shardhet
from shardhet import HetFSDP, Plan, PlanSampler
from shardhet.checkpoint import redistribute
from shardhet.comm.channel import progress
from shardhet.models.decoder import Decoder
from shardhet.training.dealing.batches import without_rows
from tests.beside import mean_of
from tests.parity import compare_grads
from tests.small_models import small_decoder
from tests.test_pipelines import SEQ_LEN, WORDS, batch_of, staged
from tests.worlds import on_ranks, run_ranks, workers_allowed

NUM_SAMPLES = 11  # batches of 3, 3, 3 and 2
BATCHES = [3, 3, 3, 2]
PLANS = {
    "two": Plan.by_hand(microbatch_sizes=[2, 1]),
    "stores": Plan.by_hand(microbatch_sizes=[1, 0, 2]),
    "rounds": Plan.by_hand(microbatch_sizes=[1, 1], num_rounds=2, global_batch_size=3),
    "stages": staged([1, 1], [1, 1], 3),
    "unlike stages": staged([2, 1, 1], [1, 2], 2, global_batch_size=3),
    "one": Plan.by_hand(microbatch_sizes=[3]),
}


class Words:
    """Tokens, as dicts or tuples, with the sample's number and what else a dict may hold."""

    def __init__(self, kind: str = "dict", num_samples: int = NUM_SAMPLES) -> None:
        self.kind, self.num_samples = kind, num_samples
        self.columns = batch_of(num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Any:
        inputs, targets = (each[i] for each in self.columns)
        if self.kind == "tuple":
            return inputs, targets, i
        return {"inputs": inputs, "targets": targets, "number": i, "name": str(i)}


class Stream(Words, IterableDataset):
    """The same, in an order that is drawn anew in every epoch."""

    __getitem__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        order = torch.randperm(self.num_samples).tolist()
        random.shuffle(order)
        order = [order[i] for i in np.random.permutation(self.num_samples)]  # noqa: NPY002
        return (Words.__getitem__(self, i) for i in order[first::step])


def wrapped(plan: Plan) -> tuple[HetFSDP, Decoder]:
    torch.manual_seed(0)
    config = small_decoder(vocab_size=WORDS, width=8, num_layers=4, seq_len=SEQ_LEN)
    module = Decoder(config).double()
    return HetFSDP(copy.deepcopy(module), plan), module


def numbers_of(model: HetFSDP, batch: Any) -> list[int]:
    """The samples of all ranks of a group in this step, which all groups have alike."""
    number = batch["number"] if isinstance(batch, dict) else batch[-1]
    if isinstance(batch, dict):
        assert batch["name"] == [str(int(i)) for i in number]
        assert all(len(each) == len(number) for each in batch.values())
    by_position = model.exchange_objects(number.tolist())
    found = [sorted(i for p in group for i in by_position[p]) for group in model.plan.groups]
    assert len({str(each) for each in found}) == 1
    return found[0]


def train(
    model: HetFSDP, module: Decoder, loader: Any, words: Words, num_steps: int
) -> list[list[int]]:
    """The samples of each step; every step is that of one process."""
    steps = []
    for batch in itertools.islice(loader, num_steps):
        steps.append(numbers_of(model, batch))
        if isinstance(batch, dict):
            loss = model.forward_backward(batch["inputs"], batch["targets"])
        else:
            loss = model.forward_backward(*batch[:-1])
        expected = mean_of(module, *(each[steps[-1]] for each in words.columns))
        assert loss == pytest.approx(expected, rel=1e-12)
        compare_grads(model, module)
        model.zero_grad()
        if len(steps) == num_steps:
            break
    return steps


def _epochs(rank: int, plan: Plan, words: Words, options: dict[str, Any]) -> Any:
    model, module = wrapped(plan)
    loader = shardhet.loader(words, model, **options)
    assert len(loader) == len(BATCHES)
    with workers_allowed():
        epochs = [train(model, module, loader, words, 99) for _ in range(2)]
    assert loader.epoch == 2
    return epochs


def _accumulates(rank: int, plan: Plan) -> None:
    model, module = wrapped(plan)
    words = Words()
    model.batches_per_step = 2
    step: list[int] = []
    for i, batch in enumerate(shardhet.loader(words, model)):
        step += numbers_of(model, batch)
        loss = model.forward_backward(batch["inputs"], batch["targets"])
        assert model.is_between_steps == i % 2 == (loss is not None)
        if model.is_between_steps:
            expected = mean_of(module, *(each[step] for each in words.columns))
            assert loss == pytest.approx(expected, rel=1e-12)
            compare_grads(model, module)
            model.zero_grad()
            step.clear()
    assert model.step == len(BATCHES) / 2


@pytest.mark.parametrize("name", ["two", "stores", "rounds", "stages"])
def test_a_step_may_have_several_batches_of_a_loader(name: str) -> None:
    run_ranks(_accumulates, PLANS[name].world_size, PLANS[name])


KINDS = ["dict", "tuple", "stream", "dict, 2 workers", "stream, 1 worker"]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLANS)
def test_every_sample_comes_once_in_steps_of_one_process(name: str, kind: str) -> None:
    plan = PLANS[name]
    kind, _, workers = kind.partition(", ")
    words = Stream() if kind == "stream" else Words(kind)
    options = {"num_workers": int(workers[:1] or 0), "seed": 4}
    found = run_ranks(_epochs, plan.world_size, plan, words, options)
    assert all(each == found[0] for each in found)
    for epoch in found[0]:
        assert [len(step) for step in epoch] == BATCHES
        assert sorted(itertools.chain(*epoch)) == list(range(NUM_SAMPLES))
    first, second = found[0]
    assert first != second


def _some_of_an_epoch(
    rank: int, plan: Plan, kind: str, options: dict[str, Any], state: Any, num_steps: int
) -> Any:
    """The samples of so many steps after ``state``, and the state after them."""
    model, module = wrapped(plan)
    words = Stream() if kind == "stream" else Words(kind)
    if kind == "weighted":
        weights = torch.arange(1.0, NUM_SAMPLES + 1)
        options = {"sampler": WeightedRandomSampler(weights, NUM_SAMPLES, generator=seeded())}
    loader = shardhet.loader(words, model, **options)
    if state is not None:
        loader.load_state_dict(state)
        assert loader.state_dict() is not state
        assert str(loader.state_dict()) == str(state)
    steps: list[list[int]] = []
    with workers_allowed():
        while len(steps) < num_steps:
            steps += train(model, module, loader, words, num_steps - len(steps))
    return steps, loader.state_dict()


def seeded() -> torch.Generator:
    """A generator of a sampler's own."""
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("tuple", {"num_workers": 2, "persistent_workers": True}),
        ("stream", {}),
        ("stream", {"num_workers": 1, "persistent_workers": True}),
        ("weighted", {}),
    ],
)
def test_an_epoch_goes_on_under_another_plan(kind: str, options: dict[str, Any]) -> None:
    whole, state, steps = [], None, list[list[int]]()
    [whole, _], *_ = run_ranks(_some_of_an_epoch, 1, PLANS["one"], kind, options, None, 9)
    for name, num_steps in [
        ("two", 1),
        ("stores", 2),
        ("stages", 3),
        ("rounds", 1),
        ("one", 2),
    ]:
        plan, state = PLANS[name], state
        args = plan, kind, options, state, num_steps
        [[found, state], *others] = run_ranks(_some_of_an_epoch, plan.world_size, *args)
        assert all(str(each) == str((found, state)) for each in others)
        steps += found
    assert steps == whole
    assert state["epoch"] == 2


@on_ranks(2)
def test_batches_that_were_read_ahead_follow_a_new_plan(rank: int) -> None:
    model, _ = wrapped(PLANS["two"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    words = Words("tuple")
    loader = shardhet.loader(words, model, num_workers=1, persistent_workers=True)
    seen = []
    with workers_allowed():
        for i, batch in enumerate(loader):
            seen.append(numbers_of(model, batch))
            model.forward_backward(*batch[:-1])
            model.zero_grad()
            if i == 1:
                redistribute(model, optimizer, Plan.by_hand(microbatch_sizes=[0, 3]))
            assert i < 2 or len(batch[0]) == (len(seen[-1]) if rank else 0)
    assert sorted(itertools.chain(*seen)) == list(range(NUM_SAMPLES))


class Drawing(Words):
    """Samples of what a worker draws."""

    def __getitem__(self, i: int) -> Any:
        return i, torch.rand(()), random.random(), np.random.random()  # noqa: NPY002


def _draws(rank: int, plan: Plan) -> Any:
    torch.manual_seed(0)
    loader = shardhet.loader(Drawing(), plan, num_workers=2)
    with workers_allowed():
        found = [batch for _ in range(2) for batch in loader]
        loader.load_state_dict({**loader.state_dict(), "epoch": 1})
        again = list(loader)
    assert str(again) == str(found[len(BATCHES) :])
    return [row for batch in found for row in zip(*batch[1:], strict=True)]


def test_each_worker_draws_what_no_other_draws() -> None:
    """Before the model is wrapped, by the plan alone."""
    rows = list(itertools.chain(*run_ranks(_draws, 2, PLANS["two"])))
    assert len(rows) == 2 * NUM_SAMPLES
    for column in zip(*rows, strict=True):
        assert len({float(each) for each in column}) == len(rows)


class Split(Stream):
    """Gives each rank its own rows, as some do by themselves."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return itertools.islice(super().__iter__(), rank, None, size)


class Shorter(Stream):
    """Ends earlier on one rank."""

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        return itertools.islice(super().__iter__(), NUM_SAMPLES - 5 * rank)


def _refused(rank: int) -> dict[str, str]:
    """The sentence that refuses each case."""
    plan = PLANS["two"]
    cases: dict[str, Any] = {
        "size": lambda: shardhet.loader(Words(), plan, 4),
        "length": lambda: shardhet.loader(Words(num_samples=9 + rank), plan),
        "seed": lambda: shardhet.loader(Words(), plan, seed=rank),
        "plan": lambda: shardhet.loader(Words(), PLANS["stages" if rank else "two"]),
        "world": lambda: shardhet.loader(Words(), PLANS["one"]),
        "twice": lambda: shardhet.loader(Words(), plan, shuffle=True, sampler=range(5)),
        "shuffled": lambda: shardhet.loader(Stream(), plan, shuffle=True),
        "indexed": lambda: shardhet.loader(Stream(), plan, sampler=range(5)),
        "batches": lambda: shardhet.loader(Words(), plan, batch_sampler=[[1]]),
        "loader": lambda: shardhet.loader(DataLoader(Words()), plan),
        "any order": lambda: shardhet.loader(Words(), plan, num_workers=2, in_order=False),
        "workers": lambda: shardhet.loader(Stream(), plan, num_workers=2),
        "iterator": lambda: shardhet.loader(iter(Words()), plan),
        "module": lambda: shardhet.loader(Words(), torch.nn.Linear(1, 1)),
        "stream": lambda: PlanSampler(Stream(), plan),
        "split": lambda: list(shardhet.loader(Split(), plan)),
        "shorter": lambda: list(shardhet.loader(Shorter(), plan)),
        "places": lambda: list(gone_on(rank, plan)),
        "of another": lambda: gone_on(0, plan, num_samples=10),
    }
    found = {}
    for name, case in cases.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            case()
        found[name] = str(caught.value)
    return found


class Odd:
    """A batch that only its author can read."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples


def gone_on(rank: int, plan: Plan, **changes: Any) -> Any:
    """A loader that goes on at another place on every rank."""
    loader = shardhet.loader(Words(), plan)
    loader.load_state_dict({**loader.state_dict(), "num_batches": rank, **changes})
    return loader


REFUSALS = {
    "size": "loader: batch_size is 4 but a step of the plan has 3 samples",
    "length": "arguments of the loader: not the same on all ranks.*num_samples",
    "seed": "arguments of the loader: not the same on all ranks",
    "plan": "arguments of the loader: not the same on all ranks",
    "world": "the plan is for 1 devices but 2 ranks were started",
    "twice": "shuffle=True and a sampler are given",
    "shuffled": "shuffle=True and a dataset that has an order are given",
    "indexed": "a sampler and a dataset that has an order are given",
    "batches": "loader: batch_sampler is given",
    "loader": "loader: it was given a DataLoader but deals out samples",
    "any order": "loader: in_order=False is given",
    "workers": "is read by one worker",
    "iterator": "an iterator, which can be read once",
    "module": "was given a Linear after the dataset",
    "stream": "PlanSampler: a Stream gives its samples in one order",
    "split": "ranks have read other samples of the dataset",
    "shorter": r"ranks have read other samples of the dataset \(\[3, 0\] of a batch",
    "places": r"ranks go on at \[\(0, 0\), \(0, 1\)\]",
    "of another": "was written with num_samples 10 but here it is 11",
}


def test_what_cannot_be_dealt_is_one_error_on_every_rank() -> None:
    for found in run_ranks(_refused, 2):
        assert list(found) == list(REFUSALS)
        for name, sentence in REFUSALS.items():
            assert re.search(sentence, found[name]), (name, found[name])


def test_a_watch_over_ranks_knows_that_a_batch_is_loaded() -> None:
    class Looking(Words):
        def __getitem__(self, i: int) -> Any:
            return i * (progress.slow_sections == ("loading the next batch",))

    for batch in shardhet.loader(Looking(), PLANS["one"], shuffle=False):
        assert batch.sum() > 0
        assert progress.slow_sections == ()


def test_a_batch_may_be_none() -> None:
    loader = shardhet.loader(Words(), PLANS["one"], collate_fn=lambda _: None)
    assert list(loader) == [None] * len(BATCHES)


def _by_sampler(rank: int, plan: Plan) -> list[int]:
    sampler = PlanSampler(Words(), plan, seed=4)
    own = DataLoader(Words(), batch_sampler=sampler, collate_fn=sampler.collator())
    by_loader = shardhet.loader(Words(), plan, seed=4)
    for _ in range(2):
        assert str(list(own)) == str(list(by_loader))
    assert sampler.state_dict() == by_loader.state_dict()
    plain = PlanSampler(Words(), plan, shuffle=False)
    return [i for batch in plain for i in batch]


def test_the_sampler_alone_gives_indices() -> None:
    found = run_ranks(_by_sampler, 3, PLANS["stores"])
    assert found == [[0, 3, 6, 9], [], [1, 2, 4, 5, 7, 8, 10]]


def in_time(samples: Sequence[Any]) -> Any:
    """Time first; what is padded, ragged, and the same for all samples."""
    texts = torch.nn.utils.rnn.pad_sequence([torch.ones(i) for i, _ in samples])
    patches = torch.cat([torch.ones(i, 2) for i, _ in samples])
    return {"texts": texts, "patches": patches, "all": torch.arange(7), "scale": 2.0}


@pytest.mark.parametrize(
    "collate, samples, expected",
    [
        (default_collate, [(torch.ones(3), 1.0)] * 2, [(0, 3), (0,)]),
        (default_collate, [{"a": torch.ones(3), "b": "x"}], {"a": (0, 3), "b": []}),
        (default_collate, [{"a": [torch.ones(1), {"b": 2}]}], {"a": [(0, 1), {"b": (0,)}]}),
        (list, [torch.ones(3)], []),
        (in_time, [(3, 0)], {"texts": (3, 0), "patches": (0, 2), "all": (7,), "scale": 2.0}),
        (np.stack, [np.ones(4)], (0, 4)),
    ],
)
def test_a_rank_without_samples_gets_tensors_without_rows(
    collate: Any, samples: list[Any], expected: Any
) -> None:
    found = without_rows(collate, samples[0])
    shapes = tree_map(lambda leaf: getattr(leaf, "shape", leaf), found)
    assert str(shapes).replace("torch.Size([", "([").replace("([", "(").replace("])", ")") == (
        str(expected).replace(",)", ")")
    )


def test_a_batch_that_cannot_be_emptied_is_refused() -> None:
    with pytest.raises(TypeError, match="collate_fn: it gives a Odd"):
        without_rows(Odd, 1)
