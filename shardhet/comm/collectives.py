"""Asynchronous, in-place all-gather and reduce-scatter with shards of different lengths.

Both take the group as a ``Channel``, so shards are in plan order whatever the ranks are.
Only *receivers* (the ranks that compute) get a gathered tensor, and only *contributors*
supply a gradient; a rank that only stores never holds more than its shard.  Nothing is
padded, and only a rank's own part is copied.

``_algorithms`` alone decides which algorithm runs.  For gloo on CPU the choice was
measured (``experiments/uneven_collectives``).  If the channel has a ``Transport``, the
transport carries the collectives.  Between hosts, point-to-point messages between all pairs
are faster than gloo's own collectives; they run on gloo's transport thread while the caller
computes, and ranks need not take part.  The other algorithms have not been compared.

[Note: Streams of NCCL]
Without ``async_op``, NCCL's collectives run on the stream that is current at the launch: the
gather or the reduce stream, which have priority over compute, as in FSDP2.  The host does not
wait.  What is queued on that stream afterwards comes after the collective, so there is nothing
to wait for, and memory of that stream's pool may be freed at once.  With ``async_op`` they
would run on a stream of NCCL's own, without priority.  Point-to-point messages always do; the
current stream joins it in ``Pending.wait``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.buffers import BufferPool
from shardhet.comm.channel import Channel
from shardhet.comm.messages import Messages, Pending, pieces_of

T = TypeVar("T")


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
    _check_splits(shard, output, split_numels, channel)
    if channel.transport is not None and devices.is_on_host(shard):
        return channel.transport.gather(output, shard, split_numels, channel, receivers)
    algorithm = _algorithms(channel, shard.device).gather
    return algorithm(output, shard, split_numels, channel, receivers)


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
    _check_splits(output, full, split_numels, channel)
    if channel.transport is not None and devices.is_on_host(output):
        return channel.transport.reduce(output, full, split_numels, channel, contributors)
    algorithm = _algorithms(channel, output.device).reduce
    return algorithm(output, full, split_numels, channel, contributors, scratch)


def _gather_by_send_recv(
    output: Tensor | None,
    shard: Tensor,
    split_numels: Sequence[int],
    channel: Channel,
    receivers: Sequence[int],
) -> Pending:
    messages = Messages(channel)
    if output is not None:
        for position, piece in enumerate(pieces_of(output, split_numels)):
            messages.receive(piece, position)
    for position in receivers:
        messages.send(shard, position)
    pending = messages.post()
    if output is not None:
        # Copy after posting, so that the peers' shards arrive in the meantime.
        own = pieces_of(output, split_numels)[channel.position]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
    return pending


def _reduce_by_send_recv(
    output: Tensor,
    full: Tensor | None,
    split_numels: Sequence[int],
    channel: Channel,
    contributors: Sequence[int],
    scratch: BufferPool,
) -> Pending:
    # The first part from another rank is received into the output, the others into scratch
    # buffers; this rank's own part is read in place.
    messages = Messages(channel)
    others = [i for i in contributors if i != channel.position] if output.numel() else []
    buffers = [
        scratch.lend(output.numel(), dtype=output.dtype, device=output.device)
        for _ in others[1:]
    ]
    part_by_position = dict(zip(others, [output, *buffers], strict=False))
    for position, part in part_by_position.items():
        messages.receive(part, position)
    if full is not None:
        pieces = pieces_of(full, split_numels)
        part_by_position[channel.position] = pieces[channel.position]
        for position, piece in enumerate(pieces):
            messages.send(piece, position)

    def add_in_plan_order() -> None:
        _sum_into(output, [part_by_position[i] for i in sorted(part_by_position)])
        for buffer in buffers:
            scratch.take_back(buffer)

    return messages.post(finish=add_in_plan_order)


def _sum_into(output: Tensor, parts: Sequence[Tensor]) -> None:
    """Store ``parts[0] + parts[1] + ...``, added in that order, in ``output``.

    One of the first two parts may be ``output`` itself.
    """
    if not parts:
        output.zero_()
    elif len(parts) == 1:
        if parts[0].data_ptr() != output.data_ptr():
            output.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=output)
        for part in parts[2:]:
            output.add_(part)


def _gather_by_list(
    output: Tensor | None,
    shard: Tensor,
    split_numels: Sequence[int],
    channel: Channel,
    receivers: Sequence[int],
) -> Pending:
    """Gather with NCCL, which turns a list of unequal tensors into one group of broadcasts."""
    if output is None or len(receivers) < channel.world_size or 0 in split_numels:
        return _gather_by_send_recv(output, shard, split_numels, channel, receivers)
    if _is_even(split_numels, channel):
        gather = _named("all_gather_single", "all_gather_into_tensor")
        gather(output, shard, group=channel.group)
    else:
        pieces = _in_rank_order(pieces_of(output, split_numels), channel)
        dist.all_gather(pieces, shard, group=channel.group)
    return Pending()  # see [Note: Streams of NCCL]


def _reduce_by_list(
    output: Tensor,
    full: Tensor | None,
    split_numels: Sequence[int],
    channel: Channel,
    contributors: Sequence[int],
    scratch: BufferPool,
) -> Pending:
    """Reduce with NCCL, which turns a list of unequal tensors into a group of reductions."""
    if full is None or len(contributors) < channel.world_size or 0 in split_numels:
        return _reduce_by_send_recv(output, full, split_numels, channel, contributors, scratch)
    if _is_even(split_numels, channel):
        reduce = _named("reduce_scatter_single", "reduce_scatter_tensor")
        reduce(output, full, group=channel.group)
    else:
        pieces = _in_rank_order(pieces_of(full, split_numels), channel)
        dist.reduce_scatter(output, pieces, group=channel.group)
    return Pending()  # see [Note: Streams of NCCL]


def _named(name: str, name_before: str) -> Callable[..., dist.Work]:
    """Return a collective that has another name in CUDA builds older than torch 2.13."""
    collective: Callable[..., dist.Work] = getattr(dist, name, None) or getattr(
        dist, name_before
    )
    return collective


def _is_even(split_numels: Sequence[int], channel: Channel) -> bool:
    """Whether the pieces have the layout of NCCL's own even collectives.

    With equal pieces, NCCL's list collectives go through a buffer as large as the whole tensor.
    """
    in_order = tuple(channel.rank_by_position) == tuple(range(channel.world_size))
    return in_order and len(set(split_numels)) == 1


def _gather_by_all_to_all(
    output: Tensor | None,
    shard: Tensor,
    split_numels: Sequence[int],
    channel: Channel,
    receivers: Sequence[int],
) -> Pending:
    """Gather with gloo and CUDA tensors, which gloo cannot send point to point."""
    counts_in = [shard.numel() * (i in receivers) for i in range(channel.world_size)]
    counts_out = list(split_numels) if output is not None else [0] * channel.world_size
    received, work = _exchange_pieces(
        [shard] * channel.world_size, counts_in, counts_out, channel
    )

    def copy_out() -> None:
        if output is not None:
            torch.cat(received, out=output)

    return Pending(receiving=[work], sending=[work], finish=copy_out, tensors=[shard])


def _reduce_by_all_to_all(
    output: Tensor,
    full: Tensor | None,
    split_numels: Sequence[int],
    channel: Channel,
    contributors: Sequence[int],
    scratch: BufferPool,
) -> Pending:
    """Reduce with gloo and CUDA tensors, which gloo cannot send point to point."""
    pieces = [output] * channel.world_size if full is None else pieces_of(full, split_numels)
    counts_in = [0] * channel.world_size if full is None else list(split_numels)
    counts_out = [output.numel() * (i in contributors) for i in range(channel.world_size)]
    received, work = _exchange_pieces(pieces, counts_in, counts_out, channel)

    def add_in_plan_order() -> None:
        _sum_into(output, [received[i] for i in sorted(contributors)])

    return Pending(receiving=[work], sending=[work], finish=add_in_plan_order)


def _exchange_pieces(
    pieces: Sequence[Tensor], counts_in: list[int], counts_out: list[int], channel: Channel
) -> tuple[list[Tensor], dist.Work]:
    """Send ``counts_in[i]`` elements of ``pieces[i]`` to position i; return what arrives."""
    ordered = _in_rank_order(
        [piece[:count] for piece, count in zip(pieces, counts_in, strict=True)], channel
    )
    counts = _in_rank_order(counts_out, channel)
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


def _in_rank_order(by_position: Sequence[T], channel: Channel) -> list[T]:
    result = list(by_position)
    for position, rank in enumerate(channel.rank_by_position):
        result[rank] = by_position[position]
    return result


class _Algorithms(NamedTuple):
    gather: Callable[[Tensor | None, Tensor, Sequence[int], Channel, Sequence[int]], Pending]
    reduce: Callable[
        [Tensor, Tensor | None, Sequence[int], Channel, Sequence[int], BufferPool], Pending
    ]


_SEND_RECV = _Algorithms(_gather_by_send_recv, _reduce_by_send_recv)
_ALGORITHMS = {  # by backend, and whether tensors are on the host
    ("gloo", True): _SEND_RECV,
    ("gloo", False): _Algorithms(_gather_by_all_to_all, _reduce_by_all_to_all),
    ("nccl", False): _Algorithms(_gather_by_list, _reduce_by_list),
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


def _check_splits(
    shard: Tensor, full: Tensor | None, split_numels: Sequence[int], channel: Channel
) -> None:
    if len(split_numels) != channel.world_size:
        raise ValueError(
            f"{len(split_numels)} split sizes for {channel.world_size} ranks. Give one a rank."
        )
    if shard.numel() != split_numels[channel.position]:
        raise ValueError(
            f"position {channel.position}: the shard has {shard.numel()} elements but its "
            f"split is {split_numels[channel.position]}."
        )
    if full is not None and full.numel() != sum(split_numels):
        raise ValueError(
            f"position {channel.position}: the whole tensor has {full.numel()} elements but "
            f"the splits sum to {sum(split_numels)}."
        )
