"""Uneven collectives over NCCL.

They run among the ranks that receive or contribute: all of them, or those that compute by the
plan, on a communicator of their own.  Rows of a position that only stores pass through its
relay (``channel.Communicator``), so each rank receives every byte that it needs once:

    gather    stores only --rows--> relay --broadcast--> all that compute
    reduce    all that compute --reduce--> relay --sum--> stores only

In two levels every node has a relay for each position, and broadcasts
and reductions run inside of nodes, on a communicator of each.

Pieces of equal length are one even collective.  Unequal ones are one group of broadcasts or
reductions, which NCCL runs as one launch; empty ones are left out of it.

[Note: Streams of NCCL]
Without ``async_op``, NCCL's collectives run on the stream that is current at the launch: the
gather or the reduce stream, which have priority over compute, as in FSDP2.  The host does not
wait.  What is queued on that stream afterwards comes after the collective, so there is nothing
to wait for, and memory of that stream's pool may be freed at once.  With ``async_op`` they
would run on a stream of NCCL's own.  Point-to-point messages always do: it is given priority,
too (``groups.PRIORITY_OF_NCCL``), and the current stream joins it in ``Pending.wait``, before
their memory is freed.  So the allocator need not be told of that stream, and is not
(``devices.unrecorded``).
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shardhet.comm.calls import (
    AllGather,
    Messages,
    Pending,
    ReduceScatter,
    in_rank_order,
    pieces_of,
    received_sum,
)
from shardhet.comm.channel import Communicator
from shardhet.comm.failure import failing_as_peers


@failing_as_peers()
def gather(call: AllGather, otherwise: Callable[[AllGather], Pending]) -> Pending:
    """Perform ``all_gather_uneven``, or ``otherwise`` where no communicator has its ranks."""
    communicator = _ring_of(call, call.receivers)
    if communicator is None:
        return otherwise(call)
    pieces = _pieces_or_none(call.output, call)
    if pieces is not None and _are_in_one(call, communicator):
        assert call.output is not None
        _named("all_gather_single", "all_gather_into_tensor")(
            call.output, call.shard, group=communicator.group
        )
    elif pieces is not None and _are_all(call, communicator):
        in_order = in_rank_order(pieces, call.channel)
        dist.all_gather(in_order, call.shard, group=communicator.group)
    else:
        return _gather_in_group(call, communicator, pieces)
    return Pending()  # see [Note: Streams of NCCL]


def _gather_in_group(
    call: AllGather, communicator: Communicator, pieces: list[Tensor] | None
) -> Pending:
    messages, position = Messages(call.channel), call.channel.position
    for owner, relays in enumerate(communicator.relays_by_position):
        if owner == position:
            for relay in relays:
                messages.send(call.shard, relay)
        elif position in relays and pieces is not None:
            messages.receive(pieces[owner], owner)
    handed = messages.post()
    if pieces is None:
        return handed
    handed.wait()  # the broadcasts read what relays have received
    call.copy_own_shard()
    _each_piece(dist.broadcast, pieces, communicator, "group_src")
    return handed


@failing_as_peers()
def reduce(call: ReduceScatter, otherwise: Callable[[ReduceScatter], Pending]) -> Pending:
    """Perform ``reduce_scatter_uneven``, or ``otherwise`` where no communicator has its ranks.

    What ``full`` has for this rank and those that it carries for is overwritten.
    """
    communicator = _ring_of(call, call.contributors)
    if communicator is None:
        return otherwise(call)
    pieces = _pieces_or_none(call.full, call)
    if pieces is not None and _are_in_one(call, communicator):
        assert call.full is not None
        _named("reduce_scatter_single", "reduce_scatter_tensor")(
            call.output, call.full, group=communicator.group
        )
    elif pieces is not None and _are_all(call, communicator):
        in_order = in_rank_order(pieces, call.channel)
        dist.reduce_scatter(call.output, in_order, group=communicator.group)
    else:
        return _reduce_in_group(call, communicator, pieces)
    return Pending()  # see [Note: Streams of NCCL]


def _reduce_in_group(
    call: ReduceScatter, communicator: Communicator, pieces: list[Tensor] | None
) -> Pending:
    if pieces is not None:
        _each_piece(dist.reduce, pieces, communicator, "group_dst")
    messages, position = Messages(call.channel), call.channel.position
    for owner, relays in enumerate(communicator.relays_by_position):
        if owner != position and position in relays and pieces is not None:
            messages.send(pieces[owner], owner)
    relays = communicator.relays_by_position[position]
    own = pieces[position] if position in relays and pieces is not None else None
    add_up = received_sum(call, messages, relays, own)
    if call.output.numel() and set(relays) - {position}:
        return messages.post(finish=add_up)
    add_up()
    return messages.post()


def _each_piece(
    collective: Callable[..., object],
    pieces: list[Tensor],
    communicator: Communicator,
    root: str,
) -> None:
    """Run ``collective`` on every piece, as one group, with its relay as the root."""
    if communicator.group is None:
        return  # this rank is alone on its node
    with distributed_c10d._coalescing_manager(communicator.group, pieces[0].device):
        for owner, piece in enumerate(pieces):
            if piece.numel():
                collective(piece, group=communicator.group, **{root: communicator.root(owner)})


def _pieces_or_none(
    flat: Tensor | None, call: AllGather | ReduceScatter
) -> list[Tensor] | None:
    return None if flat is None else pieces_of(flat, call.split_numels)


def _ring_of(call: AllGather | ReduceScatter, positions: Sequence[int]) -> Communicator | None:
    channel = call.channel
    for each in (channel.levels, channel.computing):
        if each is not None and each.positions == tuple(positions):
            # Without a relay they are of another stage, which this one has asked for.
            pairs = zip(call.split_numels, each.relays_by_position, strict=True)
            return None if any(n and not relays for n, relays in pairs) else each
    everyone = tuple(range(channel.world_size))
    if everyone != tuple(positions):
        return None
    relays = tuple((i,) for i in everyone)
    return Communicator(everyone, relays, channel.ranks_among(everyone), channel.group)


def _are_all(call: AllGather | ReduceScatter, communicator: Communicator) -> bool:
    """Whether every rank of the channel takes part, and none of the pieces is empty."""
    return communicator.group is call.channel.group and 0 not in call.split_numels


def _are_in_one(call: AllGather | ReduceScatter, communicator: Communicator) -> bool:
    """Whether the pieces have the layout of NCCL's own even collectives.

    With equal pieces, NCCL's list collectives go through a buffer as large as the whole tensor.
    """
    in_order = call.channel.rank_by_position == tuple(range(call.channel.world_size))
    return in_order and len(set(call.split_numels)) == 1 and _are_all(call, communicator)


def _named(name: str, name_before: str) -> Callable[..., dist.Work]:
    """Return a collective that has another name in CUDA builds older than torch 2.13."""
    collective: Callable[..., dist.Work] = getattr(dist, name, None) or getattr(
        dist, name_before
    )
    return collective
