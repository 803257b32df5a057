"""Uneven all-gather and reduce-scatter over gloo: results, bits, bytes sent, and bad calls.

A rank takes many cases per visit of its world; an assertion that fails there names its case.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.comm import collectives
from shardhet.comm.channel import Channel
from shardhet.comm.collectives import Pending, all_gather_uneven, reduce_scatter_uneven
from shardhet.comm.devices import BufferPool
from tests.worlds import on_ranks, run_ranks

CASES_PER_WORLD = 60
FLOATS = (torch.float64, torch.float32, torch.bfloat16)
WORLD_SIZES = (1, 2, 3, 4)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One gather or one reduction."""

    seats: tuple[int, ...]  # rank by position
    split_numels: tuple[int, ...]  # by position
    computing: tuple[int, ...]  # positions that receive, or contribute
    dtype: torch.dtype

    def channel(self, rank: int) -> Channel:
        return Channel(dist.group.WORLD, self.seats, self.seats.index(rank))

    def piece(self, position: int, whole: Tensor) -> Tensor:
        stop = sum(self.split_numels[: position + 1])
        return whole[stop - self.split_numels[position] : stop]


def random_cases(world_size: int, dtypes: Sequence[torch.dtype], seed: int) -> list[Case]:
    rng = random.Random(seed)
    cases = []
    for i in range(CASES_PER_WORLD):
        seats = rng.sample(range(world_size), world_size)
        splits = [rng.choice([0, 1, rng.randint(0, 9), 1000]) for _ in seats]
        computing = [p for p in range(world_size) if rng.random() < 0.7]
        dtype = dtypes[i % len(dtypes)]
        cases.append(Case(tuple(seats), tuple(splits), tuple(computing), dtype))
    return cases


def content(case: Case, position: int, seed: int = 0) -> Tensor:
    """What ``position`` brings, [sum(split_numels)]; full of roundings where it is a float."""
    generator = torch.Generator().manual_seed(1000 * seed + position)
    numel = sum(case.split_numels)
    if case.dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(case.dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(case.dtype)


def expected_gather(case: Case, seed: int = 0) -> Tensor:
    shards = [case.piece(p, content(case, p, seed)) for p in range(len(case.seats))]
    return torch.cat(shards)


def expected_sum(case: Case, position: int, seed: int = 0) -> Tensor:
    """Added one after the other in plan order, in the dtype of the case."""
    parts = [case.piece(position, content(case, p, seed)) for p in sorted(case.computing)]
    if not parts:
        return torch.zeros(case.split_numels[position], dtype=case.dtype)
    return list(accumulate(parts, torch.add))[-1]


def start_gather(case: Case, rank: int, seed: int = 0) -> tuple[Pending, Tensor | None]:
    channel = case.channel(rank)
    receives = channel.position in case.computing
    output = torch.full((sum(case.split_numels),), 77).to(case.dtype) if receives else None
    shard = case.piece(channel.position, content(case, channel.position, seed)).clone()
    pending = all_gather_uneven(
        output, shard, case.split_numels, channel=channel, receivers=case.computing
    )
    return pending, output


def start_reduce(
    case: Case, rank: int, scratch: BufferPool, seed: int = 0
) -> tuple[Pending, Tensor]:
    channel = case.channel(rank)
    contributes = channel.position in case.computing
    output = torch.full((case.split_numels[channel.position],), 77).to(case.dtype)
    pending = reduce_scatter_uneven(
        output,
        content(case, channel.position, seed) if contributes else None,
        case.split_numels,
        channel=channel,
        contributors=case.computing,
        scratch=scratch,
    )
    return pending, output


def finish(pending: Pending) -> None:
    pending.wait()
    pending.wait_sent()


# Results


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Run what another backend would, as far as gloo on CPU can."""
    by_name = {
        "send_recv": collectives._SEND_RECV,
        "all_to_all": collectives._ALGORITHMS[("gloo", False)],
        "nccl": collectives._ALGORITHMS[("nccl", False)],
    }
    with mock.patch.dict(collectives._ALGORITHMS, {("gloo", True): by_name[name]}):
        yield


def gather_all(rank: int, cases: list[Case], name: str) -> None:
    with algorithm(name):
        for case in cases:
            pending, output = start_gather(case, rank)
            finish(pending)
            if output is not None:
                assert torch.equal(output, expected_gather(case)), case


def reduce_all(rank: int, cases: list[Case], name: str) -> None:
    scratch = BufferPool()
    with algorithm(name):
        for case in cases:
            pending, output = start_reduce(case, rank, scratch)
            finish(pending)
            expected = expected_sum(case, case.seats.index(rank))
            assert torch.equal(output, expected), case


def gather_and_reduce_evenly(rank: int) -> list[str]:
    called = []

    def noted(function: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(function.__name__)
            return function(*args, **kwargs)

        return mock.patch.object(dist, function.__name__, call)

    forms = (dist.all_gather, dist.all_gather_single)
    reduced = (dist.reduce_scatter, dist.reduce_scatter_single)
    for seats in ((0, 1, 2), (2, 0, 1)):
        case = Case(seats, (5, 5, 5), (0, 1, 2), torch.int64)
        with noted(forms[0]), noted(forms[1]), noted(reduced[0]), noted(reduced[1]):
            gather_all(rank, [case], "nccl")
            reduce_all(rank, [case], "nccl")
    return called


def test_nccl_is_asked_for_even_pieces_in_one_tensor_where_they_lie_so() -> None:
    for called in run_ranks(gather_and_reduce_evenly, 3):
        assert called == [
            *("all_gather_single", "reduce_scatter_single"),
            *("all_gather", "reduce_scatter"),
        ]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["send_recv", "all_to_all"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_receivers_get_every_shard_in_plan_order(world_size: int, name: str) -> None:
    cases = random_cases(world_size, (*FLOATS, torch.int64, torch.int32), seed=world_size)
    run_ranks(gather_all, world_size, cases, name)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["send_recv", "all_to_all"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sums_are_bit_equal_to_adding_in_plan_order(world_size: int, name: str) -> None:
    run_ranks(reduce_all, world_size, random_cases(world_size, FLOATS, seed=world_size), name)


def gather_in_place(rank: int, case: Case) -> None:
    channel = case.channel(rank)
    output = torch.full((sum(case.split_numels),), 77.0, dtype=case.dtype)
    own = case.piece(channel.position, output)
    own.copy_(case.piece(channel.position, content(case, channel.position)))
    finish(
        all_gather_uneven(
            output, own, case.split_numels, channel=channel, receivers=case.computing
        )
    )
    assert torch.equal(output, expected_gather(case))


def test_the_shard_may_be_a_view_of_the_output() -> None:
    case = Case((2, 0, 1), (5, 0, 3), (0, 1, 2), torch.float32)
    run_ranks(gather_in_place, 3, case)


def test_alone_without_a_group_both_are_copies() -> None:
    alone = Channel(None, (0,), 0)
    shard, output = torch.arange(5.0), torch.zeros(5)
    finish(all_gather_uneven(output, shard, [5], channel=alone, receivers=[0]))
    assert torch.equal(output, shard)
    total = torch.zeros(5)
    pool = BufferPool()
    finish(
        reduce_scatter_uneven(total, shard, [5], channel=alone, contributors=[0], scratch=pool)
    )
    assert torch.equal(total, shard)


# Several at once


def run_many_at_once(rank: int, cases: list[Case], wait_order: str) -> None:
    scratch = BufferPool()
    started: list[tuple[Pending, Tensor | None, Tensor]] = []
    for seed, case in enumerate(cases):
        gather, whole = start_gather(case, rank, seed)
        started.append((gather, whole, expected_gather(case, seed)))
        reduction, part = start_reduce(case, rank, scratch, seed)
        started.append((reduction, part, expected_sum(case, case.seats.index(rank), seed)))
    if wait_order == "last first":
        started.reverse()
    elif wait_order == "any":
        random.Random(rank).shuffle(started)
    for pending, output, expected in started:
        pending.wait()
        assert output is None or torch.equal(output, expected)
    for pending, _, _ in started:
        pending.wait_sent()


@pytest.mark.parametrize("wait_order", ["first first", "last first", "any"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_in_flight_together_do_not_mix(world_size: int, wait_order: str) -> None:
    cases = random_cases(world_size, FLOATS, seed=7)[:12]
    run_ranks(run_many_at_once, world_size, cases, wait_order)


@on_ranks(2)
def test_the_input_may_be_overwritten_once_it_is_sent(rank: int) -> None:
    case = Case((0, 1), (60_000, 60_000), (0, 1), torch.float64)
    channel, scratch = case.channel(rank), BufferPool()
    full = content(case, rank)
    output = torch.empty(60_000, dtype=case.dtype)
    for _ in range(20):
        pending = reduce_scatter_uneven(
            output,
            full,
            case.split_numels,
            channel=channel,
            contributors=case.computing,
            scratch=scratch,
        )
        pending.wait_sent()
        full.fill_(float("nan"))  # nobody reads it any more
        full.copy_(content(case, rank))
        pending.wait()
        assert torch.equal(output, expected_sum(case, rank))


# Bytes


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Bytes that this rank posts for receiving and sending inside the context."""
    counted = {"received": 0, "sent": 0}
    post = dist.batch_isend_irecv

    def count(ops: list[dist.P2POp]) -> list[dist.Work]:
        for op in ops:
            key = "received" if op.op is dist.irecv else "sent"
            counted[key] += op.tensor.numel() * op.tensor.element_size()
        return post(ops)

    with mock.patch.object(dist, "batch_isend_irecv", count):
        yield counted


def count_all(rank: int, cases: list[Case]) -> list[tuple[dict[str, int], dict[str, int]]]:
    scratch = BufferPool()
    counts = []
    for case in cases:
        with counted_bytes() as of_gather:
            finish(start_gather(case, rank)[0])
        with counted_bytes() as of_reduction:
            finish(start_reduce(case, rank, scratch)[0])
        counts.append((of_gather, of_reduction))
    return counts


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nothing_is_padded_and_who_does_not_compute_receives_nothing(world_size: int) -> None:
    cases = random_cases(world_size, FLOATS, seed=10 + world_size)
    counts_by_rank = run_ranks(count_all, world_size, cases)
    for i, case in enumerate(cases):
        for position, rank in enumerate(case.seats):
            of_gather, of_reduction = counts_by_rank[rank][i]
            own = case.split_numels[position] * case.dtype.itemsize
            others = sum(case.split_numels) * case.dtype.itemsize - own
            is_computing = position in case.computing
            others_computing = len(set(case.computing) - {position})
            assert of_gather["received"] == (others if is_computing else 0), case
            assert of_gather["sent"] == own * others_computing, case
            assert of_reduction["received"] == own * others_computing, case
            assert of_reduction["sent"] == (others if is_computing else 0), case


# Buffers


def test_lent_buffers_never_overlap_whatever_is_lent_and_taken_back() -> None:
    rng, pool = random.Random(0), BufferPool()
    lent: list[tuple[Tensor, int]] = []
    for mark in range(500):
        if lent and rng.random() < 0.5:
            tensor, written = lent.pop(rng.randrange(len(lent)))
            assert tensor.eq(written).all()
            pool.take_back(tensor)
        else:
            tensor = pool.lend(rng.choice([0, 5, 900, 3000]), dtype=torch.int64, device=CPU)
            lent.append((tensor.fill_(mark), mark))
    assert all(tensor.eq(mark).all() for tensor, mark in lent)


def count_buffers(rank: int) -> int:
    case = Case((0, 1, 2), (3000, 2000, 4000), (0, 1, 2), torch.float32)
    pool = BufferPool()
    lend, addresses = pool.lend, set()

    def watch(numel: int, **how: Any) -> Tensor:
        tensor = lend(numel, **how)
        addresses.add(tensor.data_ptr())
        return tensor

    with mock.patch.object(pool, "lend", watch):
        for _ in range(10):
            finish(start_reduce(case, rank, pool)[0])
    return len(addresses)


def test_reductions_one_after_the_other_share_their_buffers() -> None:
    # Three contribute: a rank's own part is read in place, another lands in the output.
    assert run_ranks(count_buffers, 3) == [1, 1, 1]


# Bad calls


def gather(output_numel: int, shard_numel: int, splits: Sequence[int]) -> None:
    all_gather_uneven(
        torch.zeros(output_numel),
        torch.zeros(shard_numel),
        splits,
        channel=Channel(None, (0, 1), 1),
        receivers=[0, 1],
    )


def reduce(full_numel: int, shard_numel: int, splits: Sequence[int]) -> None:
    reduce_scatter_uneven(
        torch.zeros(shard_numel),
        torch.zeros(full_numel),
        splits,
        channel=Channel(None, (0, 1), 1),
        contributors=[0, 1],
        scratch=BufferPool(),
    )


@pytest.mark.parametrize("call", [gather, reduce])
@pytest.mark.parametrize(
    "numels, message",
    [
        ((7, 3, [4]), "1 split sizes for 2 ranks"),
        ((7, 3, [4, 3, 0]), "3 split sizes for 2 ranks"),
        ((7, 4, [4, 3]), "position 1: the shard has 4 elements but its split is 3"),
        ((8, 3, [4, 3]), "position 1: the whole tensor has 8 elements but the splits sum to 7"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_before_anything_is_sent(
    call: Callable[..., None], numels: tuple[int, int, list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(*numels)


@on_ranks(2)
def test_a_device_without_an_algorithm_is_refused_by_name(rank: int) -> None:
    shard = torch.zeros(2, device="meta")
    channel = Channel(dist.group.WORLD, (0, 1), rank)
    with pytest.raises((ValueError, RuntimeError), match="backend"):
        all_gather_uneven(None, shard, [2, 2], channel=channel, receivers=[])
