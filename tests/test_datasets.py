"""Iterable datasets of the datasets library: ranks see the rows that one process sees, once.

Split by its own ``split_dataset_by_node`` (datasets 5.2.0), 35 rows on four ranks of seven
workers are 14, 7, 7 and 7; ``take`` and ``skip`` hold other rows on each rank; a shuffle that
goes on from its own resume point leaves rows out.
"""

import itertools
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

import shardhet
from shardhet import Plan
from tests.worlds import preload, run_ranks, run_ranks_expecting_failure, workers_allowed

datasets = pytest.importorskip("datasets", reason="needs the dev extra")
preload("datasets")
from datasets.distributed import split_dataset_by_node  # noqa: E402  # needs datasets

NUM_ROWS, SHARDS, BATCH = 35, 7, 4
PLANS = {
    "two": Plan.by_hand(microbatch_sizes=[3, 1]),
    "four": Plan.by_hand(microbatch_sizes=[1, 0, 2, 1]),
}
FIRST_CASE_S = 60.0  # ranks import datasets, on a busy machine slowly


def rows(start: int = 0) -> Any:
    columns = {"row": list(range(start, start + NUM_ROWS))}
    return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=SHARDS)


KINDS = {
    "whole": rows,
    "taken": lambda: rows().take(9),
    "held out": lambda: rows().skip(9),
    "interleaved": lambda: datasets.interleave_datasets([rows(), rows(100)]),
    "at random": lambda: datasets.interleave_datasets(
        [rows(), rows(100)], probabilities=[0.8, 0.2], seed=5
    ),
    "shuffled": lambda: rows().shuffle(seed=3, buffer_size=10),
}


def _steps(
    rank: int, plan: Plan, kind: str, num_workers: int, state: Any, num_steps: int
) -> tuple[list[list[int]], Any]:
    """This rank's rows of so many steps after ``state``, and the state after them."""
    loader = shardhet.loader(KINDS[kind](), plan, num_workers=num_workers)
    if state is not None:
        loader.load_state_dict(state)
    found: list[list[int]] = []
    with workers_allowed():
        while len(found) < num_steps:
            batches = itertools.islice(loader, num_steps - len(found))
            found.extend(batch["row"].tolist() for batch in batches)
    return found, loader.state_dict()


def of_all(by_rank: Any) -> list[list[int]]:
    """The rows of each step."""
    return [sorted(itertools.chain(*each)) for each in zip(*by_rank, strict=True)]


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_see_the_rows_of_one_process(kind: str, num_workers: int) -> None:
    """In two epochs, the first of which is left midway and goes on under another plan."""
    dataset, expected = KINDS[kind](), list[list[int]]()
    for epoch in range(2):
        dataset.set_epoch(epoch)
        loader = DataLoader(dataset, BATCH, num_workers=num_workers)
        steps = [sorted(batch["row"].tolist()) for batch in loader]
        assert max(Counter(itertools.chain(*steps)).values()) == 1
        expected += steps
    found, state = list[list[int]](), None
    for name, num_steps in [("two", 1), ("four", len(expected) - 1)]:
        args = PLANS[name], kind, num_workers, state, num_steps
        by_rank = run_ranks(_steps, PLANS[name].world_size, *args, timeout_s=FIRST_CASE_S)
        found += of_all(rows for rows, _ in by_rank)
        state = by_rank[0][1]
    assert found == expected


def _split(rank: int) -> None:
    plan = PLANS["four"]
    list(shardhet.loader(split_dataset_by_node(rows(), rank, plan.world_size), plan))


def _going_on(rank: int) -> None:
    dataset = KINDS["shuffled"]()
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    list(shardhet.loader(dataset, PLANS["four"]))


def _with_another_worker(rank: int) -> None:
    state = shardhet.loader(rows(), PLANS["four"], num_workers=1).state_dict()
    shardhet.loader(rows(), PLANS["four"]).load_state_dict(state)


def _with_workers(rank: int) -> None:
    shardhet.loader(rows(), PLANS["four"], num_workers=SHARDS)


@pytest.mark.parametrize(
    "fn, sentence",
    [
        (_split, "ranks have read other samples of the dataset"),
        (_going_on, "the dataset goes on at a resume point of its own"),
        (_with_another_worker, "was written with num_workers 1 but here it is 0"),
        (_with_workers, "num_workers=7 but a dataset .* is read by one worker"),
    ],
)
def test_what_would_lose_or_repeat_rows_is_refused_on_every_rank(
    fn: Any, sentence: str
) -> None:
    for outcome in run_ranks_expecting_failure(fn, 4, within_s=FIRST_CASE_S):
        assert outcome.exception_name == "ValueError"
        assert pytest.raises(ValueError, match=sentence).matches(ValueError(outcome.message))
