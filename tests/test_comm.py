"""Which stream waits for what is in flight, and what ends waits; on a CPU streams are names."""

import json
import sys
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardhet.comm import calls, devices, groups
from shardhet.comm.calls import Pending, wait_all
from shardhet.comm.channel import Channel
from shardhet.comm.failure import LostPeerError, end_waits
from shardhet.fsdp.sharding.comm import MAX_UNSENT_GATHERS, CommContext
from tests.worlds import on_ranks, run_ranks


class Sending:
    """A send that notes on which stream it was waited for."""

    def __init__(self, waited_on: list[object], *, is_done: bool = False) -> None:
        self._waited_on = waited_on
        self._is_done = is_done

    def wait(self) -> None:
        self._waited_on.append(torch.cpu.current_stream())

    def is_completed(self) -> bool:
        return self._is_done


def make_comm() -> CommContext:
    alone = Channel(None, (0,), 0)
    return CommContext(torch.device("cpu"), alone, alone)


def test_few_gathers_are_unsent_at_a_time() -> None:
    comm = make_comm()
    waited_on: list[object] = []
    for _ in range(MAX_UNSENT_GATHERS):
        comm.keep_until_sent(Pending(sending=[Sending(waited_on)]))
    assert waited_on == []
    comm.keep_until_sent(Pending(sending=[Sending(waited_on)]))
    assert len(waited_on) == 1  # the oldest of one too many
    comm.wait_all_sent()
    assert len(waited_on) == MAX_UNSENT_GATHERS + 1


def test_a_copy_is_let_go_as_soon_as_it_is_sent() -> None:
    comm = make_comm()
    waited_on: list[object] = []
    comm.keep_until_sent(Pending(sending=[Sending(waited_on, is_done=True)]))
    assert len(waited_on) == 1  # which returns at once
    comm.wait_all_sent()
    assert len(waited_on) == 1


class Failing:
    """Something in flight that ends with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_completed(self) -> bool:
        return False


def test_a_device_that_fails_is_no_lost_peer() -> None:
    with pytest.raises(LostPeerError, match="Connection reset"):
        wait_all([Failing(RuntimeError("Connection reset by peer"))])
    for error in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("x")):
        with pytest.raises(type(error)):
            wait_all([Failing(error)])


class Communicator:
    """A group of two ranks with NCCL: to abort it ends once another is aborted, too."""

    are_aborted = Barrier(2)

    def __init__(self, *, has_gloo: bool) -> None:
        self.has_gloo = has_gloo
        self.events: list[str] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def abort(self) -> None:
        self.are_aborted.wait(timeout=5.0)  # else a RuntimeError, which is suppressed
        self.events.append("aborted")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.events.append(f"closed to {source}")
        raise RuntimeError("timed out")


def test_communicators_are_aborted_together_and_what_gloo_has_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, part = groups = [Communicator(has_gloo=has_gloo) for has_gloo in (True, False)]
    monkeypatch.setattr(dist, "get_backend", lambda _group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(devices, "carries", lambda group, _device: group.has_gloo)
    end_waits(cast("list[dist.ProcessGroup]", groups))
    assert sorted(world.events) == ["aborted", "closed to 1"]
    assert part.events == ["aborted"]


@pytest.mark.parametrize(
    "name, known",
    [("gloo", "gloo"), ("nccl", "nccl"), ("nccl2", "nccl"), ("nccl-lazy", "nccl")],
)
def test_nccl_is_known_however_torch_talks_to_it(name: str, known: str) -> None:
    """A group that torch 2.15 makes for "nccl" calls itself nccl2."""
    group: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: name))
    assert devices.backend_of(group, torch.device("cuda")) == known


def asked_for(rank: int, named: set[str], backend: str) -> list[str]:
    """The backends of the groups that are made where torch names these."""
    asked: list[str] = []

    def make(*_: Any, backend: str, **__: Any) -> Any:
        asked.append(backend)
        return dist.group.WORLD

    names = SimpleNamespace(names=named)
    with (
        mock.patch.object(dist, "new_group", make),
        mock.patch.object(groups, "entry_points", return_value=names),
    ):
        groups.new_group(dist.group.WORLD, torch.device("cpu"), backend=backend)
    return asked


def test_communicators_are_made_as_those_that_were_tried() -> None:
    for named, backend, expected in (
        (set[str](), "nccl", "nccl"),
        ({"nccl", "nccl2", "nccl-legacy"}, "nccl", "nccl-legacy"),
        ({"nccl", "nccl2", "nccl-legacy"}, "gloo", "gloo"),
    ):
        assert run_ranks(asked_for, 1, named, backend) == [[expected]]


def test_memory_that_no_stream_is_recorded_of_is_the_same_memory() -> None:
    whole = torch.arange(24.0, dtype=torch.bfloat16)
    part = whole.view(4, 6)[1:3]
    alias = devices.unrecorded(part)
    assert torch.equal(alias, part)
    assert alias.data_ptr() == part.data_ptr()
    # What an allocator is told of a storage does not concern that of others.
    assert alias.untyped_storage()._cdata != part.untyped_storage()._cdata
    alias.zero_()
    assert whole.tolist() == [*range(6), *[0] * 12, *range(18, 24)]
    del whole, part
    assert alias.sum() == 0  # it keeps the memory


def num_recorded(rank: int) -> int:
    """Of the collectives of this process, after 150."""
    for _ in range(150):
        dist.all_reduce(torch.zeros(1))
    record: bytes = torch._C._distributed_c10d._dump_fr_trace_json(True, False)
    return len(json.loads(record).get("entries", ()))


def test_torch_keeps_no_record_that_grows_for_thousands_of_steps() -> None:
    assert max(run_ranks(num_recorded, 2)) <= 100


@on_ranks(2)
def test_without_the_folder_of_extras_ranks_of_a_host_talk_over_gloo(rank: int) -> None:
    assert dist.group.WORLD is not None
    with mock.patch.dict(sys.modules, {calls.SHARED_HOST: None}):
        assert calls.meet(dist.group.WORLD, 1) is None
