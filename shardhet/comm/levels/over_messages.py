"""Uneven collectives in two levels by messages, as over gloo.

    gather    owner --> those of its node    owner ==cable==> taker of another node --> mates
    reduce    mates --> taker ==cable==> owner

What follows on what arrives is sent by a thread of the channel, so that it does not wait for
the caller, who computes.  The thread takes collectives in the order of their launches, which is
the same on every rank.  Its messages have a tag of their own: the caller may launch the next
collective before them.
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch import Tensor

from shardhet.comm.calls import (
    Gathering,
    Messages,
    Pending,
    Reduction,
    Seats,
    pieces_of,
    sum_into,
)
from shardhet.records.nodes import TwoLevels

FOLLOWING = 1  # the tag of messages that follow on others


def gather(call: Gathering) -> Pending:
    """Perform ``all_gather_uneven``; its receivers are the positions that compute."""
    geometry, position = _geometry(call.channel), call.channel.position
    first = Messages(call.channel)
    for receiver in geometry.first_receivers(position):
        first.send(call.shard, receiver)
    if call.output is None:
        return first.post()
    pieces, mates = pieces_of(call.output, call.split_numels), geometry.mates(position)
    for owner, piece in enumerate(pieces):
        if position in geometry.first_receivers(owner):
            first.receive(piece, owner)
    arriving = first.post()

    def pass_on() -> None:
        arriving.wait()
        second = Messages(call.channel, tag=FOLLOWING)
        for owner, piece in enumerate(pieces):
            if geometry.are_together(owner, position):
                continue
            taker = geometry.taker(owner, position)
            for mate in mates if taker == position else ():
                second.send(piece, mate)
            second.receive(piece, taker)
        second.post().complete()
        arriving.wait_sent()

    job = _follow(call.channel, pass_on)
    call.copy_own_shard()
    return Pending(receiving=[job], sending=[job], tensors=[call.output, call.shard])


def reduce(call: Reduction) -> Pending:
    """Perform ``reduce_scatter_uneven``; its contributors are the positions that compute."""
    geometry, position = _geometry(call.channel), call.channel.position
    output, lent = call.output, list[Tensor]()
    first = Messages(call.channel)
    # By owner: what is added up here for it, in plan order.
    parts_by_owner: dict[int, list[Tensor]] = {}
    pieces = None if call.full is None else pieces_of(call.full, call.split_numels)

    def received(numel: int) -> Tensor:
        lent.append(call.scratch.lend(numel, dtype=output.dtype, device=output.device))
        return lent[-1]

    for owner, piece in enumerate(pieces or ()):
        taker = geometry.taker(owner, position)
        first.send(piece, taker)
        if taker == position and piece.numel():
            parts_by_owner[owner] = [
                piece if mate == position else received(piece.numel())
                for mate in geometry.mates(position)
            ]
            for mate, part in zip(geometry.mates(position), parts_by_owner[owner], strict=True):
                first.receive(part, mate)
    # What is added up elsewhere for this rank, by node.
    sums = {
        taker: received(output.numel())
        for taker in geometry.takers[position]
        if taker != position and output.numel()
    }
    arriving = first.post()

    def pass_on() -> None:
        arriving.wait()
        second = Messages(call.channel, tag=FOLLOWING)
        for owner, parts in parts_by_owner.items():
            if owner != position:
                # Not into this rank's own part, which is the caller's.
                total = parts[geometry.mates(position)[0] == position and len(parts) > 1]
                sum_into(total, parts)
                second.send(total, owner)
        for taker, part in sums.items():
            second.receive(part, taker)
        second.post().complete()
        arriving.wait_sent()

    def add_up() -> None:
        parts: list[Tensor] = []
        for taker in geometry.takers[position]:
            parts += parts_by_owner.get(position, []) if taker == position else []
            parts += [sums[taker]] if taker in sums else []
        sum_into(output, parts)
        for buffer in lent:
            call.scratch.take_back(buffer)

    job = _follow(call.channel, pass_on)
    read = [] if call.full is None else [call.full]
    return Pending(receiving=[job], sending=[job], finish=add_up, tensors=read)


def _geometry(seats: Seats) -> TwoLevels:
    assert seats.levels is not None
    return seats.levels.geometry


class _Job:
    """Something that the thread of a channel does; see ``calls.InFlight``."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.future = Future[None]()

    def wait(self) -> None:
        self.future.result()

    def is_completed(self) -> bool:
        return self.future.done()


_Jobs = SimpleQueue[_Job | None]  # None: the group is gone
_jobs_by_group: WeakKeyDictionary[dist.ProcessGroup, _Jobs] = WeakKeyDictionary()


def _follow(seats: Seats, run: Callable[[], None]) -> _Job:
    """Run it after what the channel was given before, in its thread."""
    assert seats.group is not None
    jobs, job = _jobs_by_group.get(seats.group), _Job(run)
    if jobs is None:
        jobs = _jobs_by_group[seats.group] = SimpleQueue()
        finalize(seats.group, jobs.put, None)
        Thread(target=_work, args=(jobs,), name="second level", daemon=True).start()
    jobs.put(job)
    return job


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.run()
        except BaseException as error:  # raised where the caller waits
            job.future.set_exception(error)
        else:
            job.future.set_result(None)
