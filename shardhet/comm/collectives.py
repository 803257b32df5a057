"""Asynchronous, in-place all-gather and reduce-scatter with shards of different lengths.

Both take the group as a ``Channel``, so shards are in plan order whatever the ranks are.
Only *receivers* (the ranks that compute) get a gathered tensor, and only *contributors*
supply a gradient; a rank that only stores never holds more than its shard.  Nothing is
padded, and only a rank's own part is copied.

Tensors on the host of a channel that has a ``Transport`` are carried by that (one host, CPU);
for others ``_algorithms`` decides: NCCL's are in ``nccl.py``.  For gloo on CPU the choice was
measured (``experiments/uneven_collectives``): between hosts, point-to-point messages between
all pairs are faster than gloo's own collectives; they run on gloo's transport thread while the
caller computes, and ranks need not take part.  The other algorithms have not been compared.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.comm import devices, nccl
from shardhet.comm.calls import (
    AllGather,
    Messages,
    Pending,
    ReduceScatter,
    in_rank_order,
    pieces_of,
    received_sum,
    sum_into,
)
from shardhet.comm.channel import Channel
from shardhet.comm.devices import BufferPool


def all_gather_uneven(
    output: Tensor | None,  # [sum(split_numels)]; None if this rank receives nothing
    shard: Tensor,  # [split_numels[position]]; may be a view of output
    split_numels: Sequence[int],
    *,
    channel: Channel,
    receivers: Sequence[int],
) -> Pending:
    """Concatenate every rank's ``shard``, in plan order, into the receivers' ``output``.

    ``receivers`` are positions.  Every rank of the channel calls this, in the same order.
    """
    call = AllGather(output, shard, split_numels, channel, receivers)
    if channel.transport is not None and devices.is_on_host(shard):
        gathering: Pending = channel.transport.gather(call)
        return gathering
    return _algorithms(channel, shard.device).gather(call)


def whole_of(rows: Tensor, num_rows: Sequence[int], channel: Channel) -> Tensor:
    """All ranks' ``rows`` end to end, [sum(num_rows), ...], on every rank.  Collective."""
    whole, everyone = rows.new_empty(sum(num_rows), *rows.shape[1:]), range(channel.world_size)
    numels, own = _numels_of(rows, num_rows), rows.contiguous().view(-1)
    all_gather_uneven(
        whole.view(-1), own, numels, channel=channel, receivers=everyone
    ).complete()
    return whole


def reduce_scatter_uneven(
    output: Tensor,  # [split_numels[position]]
    full: Tensor | None,  # [sum(split_numels)]; None if this rank contributes nothing
    split_numels: Sequence[int],
    *,
    channel: Channel,
    contributors: Sequence[int],
    scratch: BufferPool,
) -> Pending:
    """Sum the contributors' ``full`` and store this rank's part of the sum in ``output``.

    Parts are added in plan order, so a repeated call gives the same bits; backends that do
    the summation themselves may promise less.  ``full`` is read until ``wait_sent`` returns.
    """
    call = ReduceScatter(output, full, split_numels, channel, contributors, scratch)
    if channel.transport is not None and devices.is_on_host(output):
        reducing: Pending = channel.transport.reduce(call)
        return reducing
    return _algorithms(channel, output.device).reduce(call)


def own_of_sum(
    whole: Tensor, num_rows: Sequence[int], channel: Channel, scratch: BufferPool
) -> Tensor:
    """This rank's rows of the sum of all ranks' ``whole``s, which ``whole_of`` is the way back
    from: [num_rows[position], ...].  Collective.
    """
    own = whole.new_empty(num_rows[channel.position], *whole.shape[1:])
    reduce_scatter_uneven(
        own.view(-1),
        whole.contiguous().view(-1),
        _numels_of(whole, num_rows),
        channel=channel,
        contributors=range(channel.world_size),
        scratch=scratch,
    ).complete()
    return own


def _numels_of(rows: Tensor, num_rows: Sequence[int]) -> list[int]:
    return [number * prod(rows.shape[1:]) for number in num_rows]


def _gather_by_send_recv(call: AllGather) -> Pending:
    messages = Messages(call.channel)
    if call.output is not None:
        for position, piece in enumerate(pieces_of(call.output, call.split_numels)):
            messages.receive(piece, position)
    for position in call.receivers:
        messages.send(call.shard, position)
    pending = messages.post()
    if call.output is not None:
        call.copy_own_shard()  # after posting: the peers' shards arrive in the meantime
    return pending


def _reduce_by_send_recv(call: ReduceScatter) -> Pending:
    messages, own = Messages(call.channel), None
    if call.full is not None:
        pieces = pieces_of(call.full, call.split_numels)
        own = pieces[call.channel.position]
        for other, piece in enumerate(pieces):
            messages.send(piece, other)
    return messages.post(finish=received_sum(call, messages, sorted(call.contributors), own))


def _gather_by_all_to_all(call: AllGather) -> Pending:
    """Gather with gloo and CUDA tensors, which gloo cannot send point to point."""
    output, shard, world_size = call.output, call.shard, call.channel.world_size
    counts_in = [shard.numel() * (i in call.receivers) for i in range(world_size)]
    counts_out = list(call.split_numels) if output is not None else [0] * world_size
    received, work = _exchange_pieces([shard] * world_size, counts_in, counts_out, call.channel)

    def copy_out() -> None:
        if output is not None:
            torch.cat(received, out=output)

    return Pending(receiving=[work], sending=[work], finish=copy_out, tensors=[shard])


def _reduce_by_all_to_all(call: ReduceScatter) -> Pending:
    """Reduce with gloo and CUDA tensors, which gloo cannot send point to point."""
    output, full, world_size = call.output, call.full, call.channel.world_size
    pieces = [output] * world_size if full is None else pieces_of(full, call.split_numels)
    counts_in = [0] * world_size if full is None else list(call.split_numels)
    counts_out = [output.numel() * (i in call.contributors) for i in range(world_size)]
    received, work = _exchange_pieces(pieces, counts_in, counts_out, call.channel)

    def add_in_plan_order() -> None:
        sum_into(output, [received[i] for i in sorted(call.contributors)])

    return Pending(receiving=[work], sending=[work], finish=add_in_plan_order)


def _exchange_pieces(
    pieces: Sequence[Tensor], counts_in: list[int], counts_out: list[int], channel: Channel
) -> tuple[list[Tensor], dist.Work]:
    """Send ``counts_in[i]`` elements of ``pieces[i]`` to position i; return what arrives."""
    ordered = in_rank_order(
        [piece[:count] for piece, count in zip(pieces, counts_in, strict=True)], channel
    )
    counts = in_rank_order(counts_out, channel)
    arrived = pieces[0].new_empty(sum(counts))
    work = dist.all_to_all_single(
        arrived,
        torch.cat(ordered),
        output_split_sizes=counts,
        input_split_sizes=[piece.numel() for piece in ordered],
        group=channel.group,
        async_op=True,
    )
    by_rank = arrived.split(counts)
    return [by_rank[rank] for rank in channel.rank_by_position], work


class _Algorithms(NamedTuple):
    gather: Callable[[AllGather], Pending]
    reduce: Callable[[ReduceScatter], Pending]


_SEND_RECV = _Algorithms(_gather_by_send_recv, _reduce_by_send_recv)
_ALGORITHMS = {  # by backend, and whether tensors are on the host
    ("gloo", True): _SEND_RECV,
    ("gloo", False): _Algorithms(_gather_by_all_to_all, _reduce_by_all_to_all),
    ("nccl", False): _Algorithms(
        partial(nccl.gather, otherwise=_gather_by_send_recv),
        partial(nccl.reduce, otherwise=_reduce_by_send_recv),
    ),
}


def _algorithms(channel: Channel, device: torch.device) -> _Algorithms:
    if channel.group is None:
        return _SEND_RECV  # there is nobody to send to
    key = (devices.backend_of(channel.group, device), devices.is_on_host(device))
    if key not in _ALGORITHMS:
        raise ValueError(
            f"No uneven collectives for backend {key[0]!r} with tensors on {device.type!r}. "
            "Initialise the process group with gloo, or on GPUs with cpu:gloo,cuda:nccl."
        )
    return _ALGORITHMS[key]
