"""Who plays which device, what ranks agree on, and how the failure of one reaches all."""

import itertools
import os
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardhet.comm import devices, peers
from shardhet.comm.channel import Channel, check_same_on_all_ranks, progress
from shardhet.comm.failure import LostPeerError, failing_as_peers
from shardhet.comm.groups import (
    Communicators,
    count_alike,
    default_group,
    new_group,
    part_of,
    side_channel,
)
from shardhet.comm.members import local_device_spec, match_devices
from shardhet.comm.peers import Peers
from shardhet.records.cluster import DeviceSpec
from tests.selection import one_in
from tests.worlds import Outcome, run_ranks, run_ranks_expecting_failure

GIB = 2**30
CPU = torch.device("cpu")


def card(kind: str, gib: int, host: str = "a", uuid: str | None = None) -> DeviceSpec:
    return DeviceSpec(host=host, kind=kind, memory_capacity_bytes=gib * GIB, uuid=uuid)


FOUND = [card("A100", 80), card("T4", 16), card("T4", 16, "b"), card("L4", 24, "b", "GPU-9")]


# Matching


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_devices_are_found_whatever_order_the_ranks_came_in(order: tuple[int, ...]) -> None:
    announced = [FOUND[i] for i in order]
    seats = match_devices(FOUND, announced)
    assert [announced[rank] for rank in seats] == FOUND


def test_a_match_is_found_if_and_only_if_there_is_one() -> None:
    rng = random.Random(0)
    kinds, memories = ["A100", "T4", None], [8 * GIB, 16 * GIB, None]
    num_matched = 0
    for _ in range(1500):
        planned = [
            DeviceSpec(kind=rng.choice(kinds), memory_capacity_bytes=rng.choice(memories))
            for _ in range(4)
        ]
        found = [card(rng.choice(["A100", "T4"]), rng.choice([8, 16])) for _ in range(4)]
        possible = any(
            all(p.accepts(found[rank]) for p, rank in zip(planned, ranks, strict=True))
            for ranks in itertools.permutations(range(4))
        )
        if not possible:
            with pytest.raises(ValueError, match="do not fit the plan"):
                match_devices(planned, found)
            continue
        seats = match_devices(planned, found)
        assert sorted(seats) == [0, 1, 2, 3]
        assert all(p.accepts(found[rank]) for p, rank in zip(planned, seats, strict=True))
        num_matched += 1
    assert 300 < num_matched < 1200  # both kinds of case were met


@pytest.mark.parametrize("num_planned", [1, 3, 5])
def test_a_wrong_number_of_ranks_is_refused_with_a_table(num_planned: int) -> None:
    planned = [card("T4", 16)] * num_planned
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- looked at below
        match_devices(planned, FOUND)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"The plan is for {num_planned} devices but 4 ranks were started."
    assert lines[1 : 1 + num_planned] == [
        f"  planned {i}: T4 16.0 GiB on a" for i in range(num_planned)
    ]
    assert lines[-2] == "  rank 3: L4 24.0 GiB on b (GPU-9)"
    assert lines[-1] == f"Start {num_planned} ranks or make a plan for 4 devices."


def test_a_process_that_has_not_met_the_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match=r"3 ranks .* not met the others"):
        default_group(None)


def test_devices_that_do_not_fit_are_refused_with_a_table_and_a_mend() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- looked at below
        match_devices([card("H100", 80), DeviceSpec()], FOUND[:2])
    assert str(caught.value).splitlines() == [
        "The devices found do not fit the plan.",
        "  planned 0: H100 80.0 GiB on a",
        "  planned 1: any device",
        "  rank 0: A100 80.0 GiB on a",
        "  rank 1: T4 16.0 GiB on a",
        "Run the planner on this cluster, or start the ranks on the planned devices. To try "
        "the plan on CPUs: shardhet rehearse PROGRAM --plan plan.json, or "
        "HetFSDP(model, plan, rehearse=True).",
    ]


def test_a_cpu_announces_its_host_and_all_its_memory() -> None:
    spec = local_device_spec(CPU)
    assert spec.host
    assert spec.kind == "cpu"
    assert spec.memory_capacity_bytes is not None
    assert spec.memory_capacity_bytes > GIB // 4


# Exchanges


def exchange_everything(rank: int, seats: tuple[int, ...]) -> tuple[Any, Any, Any]:
    channel = Channel(dist.group.WORLD, seats, seats.index(rank))
    numbers = channel.exchange([rank, rank / 3])
    rows = channel.gather_rows(torch.tensor([rank, 7], dtype=torch.int32))
    return numbers, rows.tolist(), channel.exchange_objects({"rank": rank})


@pytest.mark.parametrize("seats", [(0,), (1, 0), (2, 0, 1), (3, 1, 0, 2)], ids=str)
def test_what_is_exchanged_comes_in_plan_order_on_every_rank(seats: tuple[int, ...]) -> None:
    for numbers, rows, objects in run_ranks(exchange_everything, len(seats), seats):
        assert numbers == [[rank, rank / 3] for rank in seats]
        assert rows == [[rank, 7] for rank in seats]
        assert objects == [{"rank": rank} for rank in seats]


def test_a_process_without_a_group_exchanges_with_itself() -> None:
    alone = Channel(None, (0,), 0)
    assert alone.exchange([1.5]) == [[1.5]]
    assert alone.exchange_objects("x") == ["x"]
    nobody = Communicators(gather=None, reduce=None, control=None)
    assert Communicators.over(None, CPU) == nobody


def disagree(rank: int, seats: tuple[int, ...], values: list[Any]) -> str:
    channel = Channel(dist.group.WORLD, seats, seats.index(rank))
    try:
        check_same_on_all_ranks(values[rank], what="plan", channel=channel)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("odd", range(4))
def test_every_rank_is_told_which_one_differs_and_where(odd: int) -> None:
    values: list[Any] = [{"layers": list(range(200)), "width": 512}] * 4
    values[odd] = {"layers": list(range(200)), "width": 256}
    messages = run_ranks(disagree, 4, (3, 1, 0, 2), values)
    assert len(set(messages)) == 1
    assert f"plan: not the same on all ranks. Ranks [{odd}] have" in messages[0]
    assert "width: 256 where the others have width: 512" in messages[0]
    assert "Give every rank the same plan." in messages[0]
    assert len(messages[0]) < 400


# Communicators


def make_communicators_twice(rank: int) -> tuple[bool, int]:
    group = dist.group.WORLD
    first, second = Communicators.over(group, CPU), Communicators.over(group, CPU)
    assert first.gather is not None
    assert first.reduce is not None
    assert first.control is group
    return first == second, len({id(first.gather), id(first.reduce), id(first.control)})


def test_models_over_one_group_share_its_communicators() -> None:
    assert run_ranks(make_communicators_twice, 2) == [(True, 3)] * 2


def named_as_by_torch_2_15(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """A name with the number of groups that this process has made, over parts too."""
    world = dist.distributed_c10d._world
    world.group_count += 1
    return f"{'_'.join(map(str, ranks))} number {world.group_count}"


def meet_in_parts(rank: int) -> list[list[list[float]]]:
    """Groups over some of the ranks, one after the other; not all are in each."""
    heard = []
    with mock.patch.object(
        dist.distributed_c10d, "_process_group_name", named_as_by_torch_2_15
    ):
        for part in ((1, 2, 3), (0, 2, 3), (0, 1), (0, 1, 2, 3)):
            count_alike(dist.group.WORLD, CPU)
            if rank not in part:
                continue
            group = dist.new_group(
                list(part), timeout=timedelta(seconds=20), use_local_synchronization=True
            )
            seats = tuple(range(len(part)))
            *_, control = Communicators.over(group, CPU).channels(seats, group.rank())
            side = side_channel(control)
            heard.append(control.exchange([rank]))
            assert side.exchange([rank]) == heard[-1]
    return heard


def test_groups_over_parts_find_each_other_though_some_ranks_have_made_more() -> None:
    heard = run_ranks(meet_in_parts, 4, fresh_world=True)
    assert heard[3] == [[[1], [2], [3]], [[0], [2], [3]], [[0], [1], [2], [3]]]
    assert heard[1] == [[[1], [2], [3]], [[0], [1]], [[0], [1], [2], [3]]]


def meet_again(rank: int) -> tuple[list[str], list[float]]:
    """The names of two groups of the same ranks, the second in the place of the first."""
    names, heard = [], []
    if rank == 0:  # it has made one more
        new_group(dist.group.WORLD, CPU, backend="gloo", ranks=[0])
    for _ in range(2):
        count_alike(dist.group.WORLD, CPU)
        if rank < 2:
            group = new_group(dist.group.WORLD, CPU, backend="gloo", ranks=[0, 1])
            names.append(group.group_name)
            parts = [torch.zeros(1), torch.zeros(1)]
            dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
            heard += [each.item() for each in parts]
            dist.destroy_process_group(group)
    return names, heard


def test_a_group_does_not_take_the_name_of_one_that_is_gone() -> None:
    """Nor then the addresses of that one, which are still in the store."""
    first, second, _ = run_ranks(meet_again, 3, fresh_world=True)
    assert first == second
    assert first[1] == [0.0, 1.0] * 2
    assert len(set(first[0])) == 2


def meet_in_a_part(rank: int) -> float:
    control = Communicators.over(dist.group.WORLD, CPU).control
    channel = Channel(control, tuple(range(3)), rank)
    if rank == 0:  # it has made one more
        new_group(dist.group.WORLD, CPU, backend="gloo", ranks=[0])
    part = part_of(channel, (0, 1), purpose="test", control=channel, device=CPU)
    number = torch.ones(1)
    if part is not None:
        dist.all_reduce(number, group=part.group)
    return number.item()


def test_a_part_of_a_channel_meets_though_one_rank_has_made_more_groups() -> None:
    assert run_ranks(meet_in_a_part, 3, fresh_world=True) == [2.0, 2.0, 1.0]


# Failures


def peers_of(rank: int) -> Peers:
    communicators = Communicators.over(dist.group.WORLD, CPU)
    ranks = tuple(range(dist.get_world_size()))
    channel = Channel(communicators.control, ranks, rank)
    line = Peers(communicators, channel, [f"rank {r} (card {r})" for r in ranks], CPU)
    progress.mark(f"the work of {rank}")
    return line


def wait_for(peer: int) -> None:
    """What a gather does that needs ``peer``: a receive on the gather group."""
    group = Communicators.over(dist.group.WORLD, CPU).gather
    try:
        assert group is not None
        group.recv([torch.empty(1)], peer, 0).wait()
    except RuntimeError as error:
        raise LostPeerError(str(error)) from error


def raise_while_a_chain_waits(rank: int, failing: int) -> None:
    """Rank r waits for rank r + 1 only, so most do not touch the one that fails."""
    with peers_of(rank).fail_together():
        dist.barrier()
        if rank == failing:
            raise KeyError("no such sample")
        wait_for((rank + 1) % dist.get_world_size())


def told(outcomes: list[Outcome]) -> list[tuple[str | None, str]]:
    return [(outcome.exception_name, outcome.message) for outcome in outcomes]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_failure_of_one_reaches_ranks_that_wait_for_others(failing: int) -> None:
    outcomes = run_ranks_expecting_failure(raise_while_a_chain_waits, 4, failing)
    for rank, (name, message) in enumerate(told(outcomes)):
        if rank == failing:
            assert (name, message) == ("KeyError", "'no such sample'")
            note = f"rank {rank} (card {rank}) failed in the work of {rank}."
            assert note in outcomes[rank].traceback
        else:
            assert name == "RuntimeError"
            assert message.startswith(
                f"rank {failing} (card {failing}) failed in the work of {failing}: "
                f"KeyError: 'no such sample'"
            )
            assert "Fix the cause on that rank" in message
        assert outcomes[rank].is_within(5)


def die_while_a_chain_waits(rank: int, dying: int) -> None:
    with peers_of(rank).fail_together():
        dist.barrier()
        if rank == dying:
            os._exit(9)
        wait_for((rank + 1) % dist.get_world_size())


@pytest.mark.parametrize("dying", one_in(2, [3, 0]))
def test_a_death_without_a_word_is_told_by_those_who_are_left(dying: int) -> None:
    outcomes = run_ranks_expecting_failure(die_while_a_chain_waits, 4, dying)
    assert outcomes[dying].exit_code == 9
    for outcome in outcomes:
        if outcome.rank != dying:
            assert outcome.exception_name == "RuntimeError"
            assert outcome.message.startswith(
                f"rank {dying} (card {dying}) ended without a message while this rank was in "
                f"the work of {outcome.rank}."
            )
            assert outcome.is_within(10)


def fail_on_every_rank(rank: int) -> None:
    with peers_of(rank).fail_together():
        dist.barrier()
        raise ValueError(f"the fault of {rank}")


def test_a_rank_that_finds_a_fault_itself_reports_its_own() -> None:
    outcomes = run_ranks_expecting_failure(fail_on_every_rank, 3)
    expected = [("ValueError", f"the fault of {rank}") for rank in range(3)]
    assert told(outcomes) == expected


def die_while_one_computes(rank: int) -> None:
    peers.SECONDS_TO_HEAR_THE_CAUSE = 0.3
    with peers_of(rank).fail_together():
        dist.barrier()
        if rank == 2:
            os._exit(9)
        if rank == 1:
            time.sleep(1.5)  # computes, and notices nothing meanwhile
        wait_for(2)


def test_a_rank_that_is_busy_is_not_taken_for_dead() -> None:
    outcomes = run_ranks_expecting_failure(die_while_one_computes, 3)
    for outcome in outcomes[:2]:
        assert "rank 2 (card 2)" in outcome.message
        assert "rank 1 (card 1)" not in outcome.message
        assert "rank 0 (card 0)" not in outcome.message


def fail_without_a_group() -> None:
    alone = Channel(None, (0,), 0)
    with Peers(Communicators.over(None, CPU), alone, ["rank 0"], CPU).fail_together("the work"):
        raise ValueError("bad input")


def test_alone_an_error_stays_what_it_is_and_says_where() -> None:
    with pytest.raises(ValueError, match="bad input") as caught:
        fail_without_a_group()
    assert caught.value.__notes__ == ["rank 0 failed in the work."]


# The device's own failures


class Failed:
    """The module, and a stream, of a device on which a kernel has failed."""

    def current_stream(self, _device: torch.device) -> "Failed":
        return self

    def query(self) -> bool:
        raise torch.AcceleratorError("device-side assert triggered")


def test_a_failed_device_is_named_if_nccl_meets_its_failure_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, card = Channel(None, (0,), 0), torch.device("cuda", 0)
    line = Peers(Communicators.over(None, CPU), alone, ["rank 0"], card)
    monkeypatch.setattr(devices, "module_of", lambda _device: Failed())
    met = pytest.raises(torch.AcceleratorError, match="assert triggered")
    with met as caught, line.fail_together("model.backward"):
        raise LostPeerError("NCCL error: unhandled cuda error")
    assert caught.value.__notes__ == ["rank 0 failed in model.backward."]


def test_memory_that_nccl_does_not_get_is_that_of_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, card = Channel(None, (0,), 0), torch.device("cuda", 0)
    line = Peers(Communicators.over(None, CPU), alone, ["rank 0"], card)
    told = "ncclUnhandledCudaError: Call to CUDA function failed. Last error: out of memory"
    module = mock.Mock(
        max_memory_allocated=lambda _device: 3 * GIB, memory_reserved=lambda _device: 4 * GIB
    )
    monkeypatch.setattr(devices, "module_of", lambda _device: module)
    met = pytest.raises(dist.DistBackendError, match="out of memory")
    with met as caught, line.fail_together("model.backward"), failing_as_peers():
        raise dist.DistBackendError(told)
    [note] = caught.value.__notes__
    assert note.startswith("rank 0 failed in model.backward. At most 3.00 GiB were allocated")
    assert peers.is_out_of_memory(caught.value)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_exchange_of_a_device_that_fails_loses_no_peer(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_gather", mock.Mock(side_effect=kind("out of memory")))
    two = Channel(mock.Mock(), (0, 1), 0)
    with pytest.raises(kind):
        two.gather_rows(torch.zeros(1))
