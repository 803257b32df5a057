"""Reading each other's memory gives what messages give, and fails as they do."""

import os
import random
import resource
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardhet.comm import calls
from shardhet.comm.calls import SWITCH, AllGather, ReduceScatter
from shardhet.comm.channel import Channel
from shardhet.comm.collectives import all_gather_uneven
from shardhet.comm.devices import BufferPool
from shardhet.comm.failure import LostPeerError
from shardhet.extras.shared_host.arena import (
    BOARD_WORDS,
    NUM_PLACES,
    READ,
    Arena,
    PeerArena,
    SharedCounters,
    own_arena,
)
from shardhet.extras.shared_host.transport import CHUNK_BYTES, SharedHost
from tests import test_collectives, test_deaths
from tests.drawn_cases import draw_case
from tests.drawn_steps import on_rank
from tests.hosts import on_different_hosts
from tests.selection import one_in
from tests.test_bad_input import PLAN
from tests.worlds import on_ranks, rank_cache, run_ranks, run_ranks_expecting_failure

WORLD_SIZES = [2, 3, 4]
FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def shared_host() -> SharedHost:
    """Met once per world."""
    if "shared_host" not in rank_cache():
        assert dist.group.WORLD is not None
        rank_cache()["shared_host"] = SharedHost.meet(dist.group.WORLD)
    met: tuple[SharedHost] = rank_cache()["shared_host"]
    return met[0]


def read_all(rank: int, cases: list[test_collectives.Case], kind: str) -> int:
    """The collectives' own tests, by another way; how often memory was read."""
    channel_of = test_collectives.Case.channel
    name = "copy_to" if kind == "gather" else "forget"
    reads = getattr(PeerArena, name)

    def among_neighbours(case: test_collectives.Case, rank: int) -> Channel:
        return replace(channel_of(case, rank), transport=shared_host())

    with (
        mock.patch.object(test_collectives.Case, "channel", among_neighbours),
        mock.patch.object(PeerArena, name, autospec=True, side_effect=reads) as read,
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


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["gather", "reduce"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_give_the_same_bits(world_size: int, kind: str) -> None:
    dtypes = (*FLOATS, torch.int64) if kind == "gather" else FLOATS
    cases = test_collectives.random_cases(world_size, dtypes, seed=world_size)
    assert sum(run_ranks(read_all, world_size, cases, kind)) > 0


@on_ranks(3)
def test_long_shards_are_summed_chunk_by_chunk(rank: int) -> None:
    numel = 3 * CHUNK_BYTES // 8 + 5
    seats = (1, 2, 0)
    channel = Channel(dist.group.WORLD, seats, seats.index(rank), shared_host())
    full = torch.arange(3 * numel, dtype=torch.float64) * (rank + 1)
    output = torch.empty(numel, dtype=torch.float64)
    summed = ReduceScatter(output, full, [numel] * 3, channel, (0, 1, 2), BufferPool())
    pending = shared_host().reduce(summed)
    test_collectives.finish(pending)
    expected = torch.arange(3 * numel, dtype=torch.float64).split(numel)[channel.position] * 6
    assert torch.equal(output, expected)


@on_ranks(2)
def test_what_lies_behind_a_peers_memory_is_no_data(rank: int) -> None:
    [peer] = [peer for peer in shared_host().peers if peer is not None]
    with pytest.raises(OSError, match="memory ends before byte"):
        peer.copy_to(torch.empty(4), shared_host().arena.nbytes - 8)


@on_ranks(2)
def test_more_collectives_than_places_may_be_under_way(rank: int) -> None:
    """Rank 0 begins more collectives than there are places before rank 1 reads the first."""
    channel = Channel(dist.group.WORLD, (0, 1), rank, shared_host())
    shards = [torch.full((8,), float(i)) for i in range(2 * NUM_PLACES)]
    started = []
    if rank == 1:
        time.sleep(0.3)
    for shard in shards:
        output = torch.empty(8) if rank == 1 else None
        own = shard if rank == 0 else torch.empty(0)
        pending = shared_host().gather(AllGather(output, own, (8, 0), channel, (1,)))
        started.append((pending, output, shard))
    for pending, output, shard in started:
        test_collectives.finish(pending)
        assert output is None or torch.equal(output, shard)


@pytest.mark.parametrize("world_size", one_in(3, [3, 2, 4]))
@on_ranks()
def test_training_across_hosts_is_as_exact(rank: int, world_size: int) -> None:
    with on_different_hosts():
        for seed in (4, 5):
            on_rank(rank, draw_case(seed, world_size=world_size), times=1)


def die_by_messages(rank: int, misdeed: test_deaths.Misdeed) -> None:
    with on_different_hosts():
        test_deaths.train_until(rank, misdeed, PLAN)


@pytest.mark.parametrize("deed", one_in(2, ["kill", "exit"]))
@pytest.mark.parametrize("place", one_in(3, ["backward", "forward", "between"]))
def test_a_death_on_another_host_is_told_as_soon(place: Any, deed: Any) -> None:
    misdeed = test_deaths.Misdeed(deed=deed, place=place)
    outcomes = run_ranks_expecting_failure(die_by_messages, 3, misdeed)
    test_deaths.check_death(outcomes, misdeed)


def refuse(*_: object) -> None:
    raise PermissionError("not permitted")


def ask_where_one_may_not(rank: int) -> bool:
    assert dist.group.WORLD is not None
    if rank != 1:
        return SharedHost.meet(dist.group.WORLD) is None
    with (
        mock.patch("shardhet.extras.shared_host.arena._peers", {}),
        mock.patch("shardhet.extras.shared_host.arena.PeerArena", refuse),
    ):
        return SharedHost.meet(dist.group.WORLD) is None


def test_all_send_messages_where_one_may_not_read() -> None:
    assert run_ranks(ask_where_one_may_not, 3) == [True, True, True]


def test_alone_or_on_an_accelerator_nothing_is_read() -> None:
    shard, output = torch.ones(2), torch.empty(2)
    alone = Channel(None, (0,), 0)
    all_gather_uneven(output, shard, (2,), channel=alone, receivers=(0,)).wait()
    assert output.eq(1).all()
    faster = mock.create_autospec(SharedHost)
    group = mock.MagicMock()
    group._get_backend.return_value.name.return_value = "another"
    several = Channel(group, (0, 1), 0, faster)
    all_gather_uneven(None, shard, (2, 0), channel=several, receivers=(1,))
    assert faster.gather.call_count == 1
    with pytest.raises(ValueError, match="No uneven collectives"):
        all_gather_uneven(None, shard.to("meta"), (2, 0), channel=several, receivers=(1,))


def meet_with(rank: int, switches: tuple[str, ...]) -> bool:
    assert dist.group.WORLD is not None
    with mock.patch.dict(os.environ, {SWITCH: switches[rank]}):
        return calls.meet(dist.group.WORLD, 1) is None


def test_it_can_be_switched_off_and_one_rank_is_enough() -> None:
    assert run_ranks(meet_with, 2, ("auto", "auto")) == [False, False]
    assert run_ranks(meet_with, 2, ("gloo", "gloo")) == [True, True]
    assert run_ranks(meet_with, 2, ("auto", "gloo")) == [True, True]


def test_a_transport_that_there_is_not_is_named() -> None:
    with (
        mock.patch.dict(os.environ, {SWITCH: "smoke"}),
        pytest.raises(ValueError, match="SHARDHET_TRANSPORT='smoke': it is one of auto, gloo"),
    ):
        calls.meet(mock.MagicMock(), 1)


def test_a_killed_process_leaves_no_shared_memory() -> None:
    """The arena has no name in any file system: it ends with the last process that has it."""
    assert str(Path(f"/proc/self/fd/{Arena().fd}").readlink()).startswith("/memfd:")


def test_what_nobody_looks_at_any_more_takes_no_memory() -> None:
    arena = Arena()
    kept = arena.empty(1000, torch.float32).fill_(1)
    before = Path(f"/proc/self/fd/{arena.fd}").stat().st_blocks
    large = arena.empty(10**6, torch.float32).fill_(2)
    view = large[10:20].view(2, 5)
    del large
    assert view.eq(2).all()
    del view
    assert Path(f"/proc/self/fd/{arena.fd}").stat().st_blocks == before
    again = arena.empty(10**6, torch.float32)
    assert again.eq(0).all()
    assert kept.eq(1).all()


def test_tensors_of_an_arena_never_overlap() -> None:
    rng, arena = random.Random(0), Arena()
    alive: list[tuple[torch.Tensor, int]] = []
    for mark in range(500):
        if alive and rng.random() < 0.5:
            tensor, written = alive.pop(rng.randrange(len(alive)))
            assert tensor.eq(written).all()
        else:
            tensor = arena.empty(rng.choice([0, 5, 900, 3000]), torch.int64)
            alive.append((tensor.fill_(mark), mark))
    assert all(each.eq(written).all() for each, written in alive)
    del tensor
    alive.clear()
    assert arena.empty(arena.nbytes // 8, torch.int64).numel() == arena.nbytes // 8


@on_ranks(1)
def test_a_forked_process_leaves_the_arena_alone(rank: int) -> None:
    arena = own_arena()
    assert arena is not None
    kept = arena.empty(1000, torch.float32).fill_(7)
    child = os.fork()
    if not child:
        del kept
        with suppress(MemoryError):
            arena.empty(1000, torch.float32).fill_(1)
            os._exit(1)
        os._exit(own_arena() is arena)
    assert os.waitpid(child, 0)[1] == 0
    assert kept.eq(7).all()


def test_a_peer_that_says_its_last_word_and_ends_is_not_lost() -> None:
    words = torch.zeros(BOARD_WORDS, dtype=torch.int64)
    board = SharedCounters(words, pid=2**22 + 1, timeout_s=60.0)  # of no process

    def say_it(*_: object) -> bool:
        words[READ] = 5
        return False

    with mock.patch("shardhet.extras.shared_host.arena._futex", say_it):
        board.wait_for(READ, 5)
        words[READ] = 0
        with pytest.raises(LostPeerError, match="is gone"):
            board.wait_for(READ, 6)


def test_a_peer_that_lives_and_never_comes_is_waited_for_as_long_as_the_group_allows() -> None:
    words = torch.zeros(BOARD_WORDS, dtype=torch.int64)
    board = SharedCounters(words, pid=os.getpid(), timeout_s=0.2)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{os.getpid()}.* not come for 0.2 s"):
        board.wait_for(READ, 1)
    assert 0.2 < time.monotonic() - start_s < 2


@on_ranks(2)
def test_what_is_being_read_lives_until_it_has_been(rank: int) -> None:
    channel = Channel(dist.group.WORLD, (0, 1), rank, shared_host())
    shard = shared_host().empty(1000, torch.float32).fill_(3) if rank == 0 else None
    output = torch.empty(1000) if rank == 1 else None
    if rank == 1:
        time.sleep(0.3)
    own = torch.empty(0) if shard is None else shard
    pending = shared_host().gather(AllGather(output, own, (1000, 0), channel, (1,)))
    del shard, own
    if rank == 0:
        del pending
        shared_host().empty(1000, torch.float32).fill_(9)
    else:
        test_collectives.finish(pending)
        assert output.eq(3).all()
    dist.barrier()


@on_ranks(1)
def test_a_limit_to_a_processs_data_holds_for_the_arena_too(rank: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    arena = Arena()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * 2**20, hard))
    try:
        for _ in range(5):  # what is given back may be had again
            kept = arena.empty(40 * 2**20, torch.uint8)
            with pytest.raises(MemoryError, match="beyond the limit"):
                arena.empty(40 * 2**20, torch.uint8)
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                torch.empty(40 * 2**20, dtype=torch.uint8)
            del kept
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
