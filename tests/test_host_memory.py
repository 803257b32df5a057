"""Reading each other's memory gives what messages give, and fails as they do."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardhet import HetFSDP, Plan, host_memory
from shardhet.collectives import BufferPool
from shardhet.distributed import Channel
from shardhet.host_memory import find_readable_pids
from tests import test_collectives, test_deaths, test_parity
from tests.test_bad_input import PLAN
from tests.worlds import rank_cache, run_ranks, run_ranks_expecting_failure

CPU = torch.device("cpu")
WORLD_SIZES = [2, 3, 4]
FLOATS = (torch.float64, torch.float32, torch.bfloat16)


@contextmanager
def whatever_the_length() -> Iterator[None]:
    """Tests are small, and small tensors travel as messages."""
    with mock.patch.object(host_memory, "SMALLEST_BYTES", 0):
        yield


def pids(world_size: int) -> tuple[int, ...]:
    """By rank; asked for once per world."""
    if "pids" not in rank_cache():
        everybody = Channel(dist.group.WORLD, tuple(range(world_size)), dist.get_rank())
        rank_cache()["pids"] = find_readable_pids(everybody, CPU)
    found: tuple[int, ...] = rank_cache()["pids"]
    return found


def read_all(rank: int, cases: list[test_collectives.Case], kind: str) -> int:
    """The collectives' own tests, by another way; how often memory was read."""
    by_rank = pids(len(cases[0].split_numels))
    channel_of = test_collectives.Case.channel

    def with_pids(case: test_collectives.Case, rank: int) -> Channel:
        channel = channel_of(case, rank)
        return replace(channel, pids=tuple(by_rank[r] for r in channel.rank_by_position))

    with (
        whatever_the_length(),
        mock.patch.object(test_collectives.Case, "channel", with_pids),
        mock.patch.object(host_memory, "read_memory", wraps=host_memory.read_memory) as read,
    ):
        for case in cases:
            if kind == "gather":
                pending, output = test_collectives.start_gather(case, rank)
                test_collectives.finish(pending)
                expected = test_collectives.expected_gather(case)
                assert output is None or torch.equal(output, expected), case
            else:
                pending, output = test_collectives.start_reduce(case, rank, BufferPool())
                test_collectives.finish(pending)
                expected = test_collectives.expected_sum(case, case.seats.index(rank))
                assert torch.equal(output, expected), case
        return int(read.call_count)


@pytest.mark.parametrize("kind", ["gather", "reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_give_the_same_bits(world_size: int, kind: str) -> None:
    dtypes = (*FLOATS, torch.int64) if kind == "gather" else FLOATS
    cases = test_collectives.random_cases(world_size, dtypes, seed=world_size)
    assert sum(run_ranks(read_all, world_size, cases, kind)) > 0


def sum_many_chunks(rank: int, smallest_shared_bytes: int) -> None:
    numel = 3 * host_memory.CHUNK_BYTES // 8 + 5
    seats = (1, 0)
    channel = Channel(
        dist.group.WORLD, seats, seats.index(rank), tuple(pids(2)[r] for r in seats)
    )
    full = torch.arange(2 * numel, dtype=torch.float64) * (rank + 1)
    output = torch.empty(numel, dtype=torch.float64)
    with mock.patch.object(host_memory, "SMALLEST_SHARED_BYTES", smallest_shared_bytes):
        pending = host_memory.reduce(output, full, (numel, numel), channel, (0, 1))
        test_collectives.finish(pending)
    expected = torch.arange(2 * numel, dtype=torch.float64).split(numel)[channel.position] * 3
    assert torch.equal(output, expected)


@pytest.mark.parametrize("smallest_shared_bytes", [0, 2**40], ids=["two threads", "one"])
def test_long_shards_are_summed_chunk_by_chunk(smallest_shared_bytes: int) -> None:
    run_ranks(sum_many_chunks, 2, smallest_shared_bytes)


def train_by_memory(rank: int, world_size: int, block: int) -> None:
    with whatever_the_length():
        test_parity._run_block(rank, world_size, block)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_is_as_exact(world_size: int, block: int) -> None:
    run_ranks(train_by_memory, world_size, world_size, block)


def die_by_memory(rank: int, misdeed: test_deaths.Misdeed) -> None:
    with whatever_the_length():
        test_deaths.train_until(rank, misdeed, PLAN)


@pytest.mark.parametrize("place", ["forward", "backward", "between"])
def test_a_death_is_told_as_soon(place: Any) -> None:
    misdeed = test_deaths.Misdeed(deed="kill", place=place)
    outcomes = run_ranks_expecting_failure(die_by_memory, 3, misdeed)
    test_deaths.check_death(outcomes, misdeed)


def refuse(*_: object) -> None:
    raise PermissionError("not permitted")


def ask_where_one_may_not(rank: int) -> object:
    everybody = Channel(dist.group.WORLD, (0, 1, 2), rank)
    if rank != 1:
        return find_readable_pids(everybody, CPU)
    with mock.patch.object(host_memory, "read_memory", refuse):
        return find_readable_pids(everybody, CPU)


def test_all_send_messages_where_one_may_not_read() -> None:
    assert run_ranks(ask_where_one_may_not, 3) == [None, None, None]


def test_alone_or_on_an_accelerator_nothing_is_read() -> None:
    alone = Channel(None, (0,), 0)
    assert find_readable_pids(alone, CPU) is None
    assert not host_memory.is_worth_it(alone, 2**30, CPU)
    several = Channel(None, (0, 1), 0, pids=(1, 2))
    assert not host_memory.is_worth_it(several, 2**30, torch.device("cuda"))
    assert host_memory.is_worth_it(several, 2**30, CPU)


def main() -> None:
    """What a program does that trains and ends."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    model = HetFSDP(net, Plan.even(2, microbatch_size=2))
    for _ in range(3):
        model.backward(model(torch.ones(2, 256)).sum(), 2)
    dist.barrier()
    dist.destroy_process_group()


def test_a_program_that_has_read_memory_ends_quietly() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc-per-node=2", "-m", "tests.test_host_memory"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr


if __name__ == "__main__":
    main()
