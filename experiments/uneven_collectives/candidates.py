"""Ways to gather and reduce shards of unequal length: ours, and others to be timed beside it.

Each candidate is made once, with all its buffers, and then called again and again on the
same tensors.  Uneven ones want ``split_numels``; those of gloo itself can only be even.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from shardhet.comm.buffers import BufferPool
from shardhet.comm.calls import Transport
from shardhet.comm.channel import Channel
from shardhet.comm.collectives import all_gather_uneven, reduce_scatter_uneven

Run = Callable[[], None]

# output: [sum(split_numels)]; shard: [split_numels[rank]]
GatherCandidate = Callable[[Tensor, Tensor, Sequence[int]], Run]
# output: [split_numels[rank]]; full: [sum(split_numels)]
ReduceCandidate = Callable[[Tensor, Tensor, Sequence[int]], Run]


def our_gather(
    output: Tensor,
    shard: Tensor,
    split_numels: Sequence[int],
    *,
    transport: Transport | None = None,
) -> Run:
    """The library's, as HetFSDP calls it; ended when the shard may be overwritten, too."""
    channel = replace(Channel.of_world(), transport=transport)

    def run() -> None:
        pending = all_gather_uneven(
            output, shard, split_numels, channel=channel, receivers=range(channel.world_size)
        )
        pending.wait()
        pending.wait_sent()

    return run


def our_reduce(
    output: Tensor,
    full: Tensor,
    split_numels: Sequence[int],
    *,
    transport: Transport | None = None,
) -> Run:
    """The library's, as HetFSDP calls it; ended when the input may be overwritten, too."""
    channel, scratch = replace(Channel.of_world(), transport=transport), BufferPool()
    everyone = range(channel.world_size)

    def run() -> None:
        pending = reduce_scatter_uneven(
            output, full, split_numels, channel=channel, contributors=everyone, scratch=scratch
        )
        pending.wait()
        pending.wait_sent()

    return run


def gloo_all_gather(output: Tensor, shard: Tensor, split_numels: Sequence[int]) -> Run:
    """Gloo's own; even splits only."""

    def run() -> None:
        dist.all_gather_single(output, shard)

    return run


def broadcasts(output: Tensor, shard: Tensor, split_numels: Sequence[int]) -> Run:
    """One asynchronous broadcast per rank into views of the output."""
    pieces = _pieces(output, split_numels)

    def run() -> None:
        pieces[dist.get_rank()].copy_(shard)
        works = [dist.broadcast(p, src, async_op=True) for src, p in enumerate(pieces)]
        for work in works:
            work.wait()

    return run


def all_to_all_gather(output: Tensor, shard: Tensor, split_numels: Sequence[int]) -> Run:
    """``all_to_all_single`` of the shard, repeated once per rank."""
    world_size = dist.get_world_size()
    repeated = shard.new_empty(world_size, shard.numel())

    def run() -> None:
        repeated.copy_(shard)
        dist.all_to_all_single(
            output, repeated.view(-1), list(split_numels), [shard.numel()] * world_size
        )

    return run


def padded_all_gather(output: Tensor, shard: Tensor, split_numels: Sequence[int]) -> Run:
    """Gloo's own with every shard padded to the largest, and a copy out."""
    widest = max(split_numels)
    padded_shard = shard.new_zeros(widest)
    padded = shard.new_empty(len(split_numels), widest)
    pieces = _pieces(output, split_numels)

    def run() -> None:
        padded_shard[: shard.numel()].copy_(shard)
        dist.all_gather_single(padded.view(-1), padded_shard)
        for piece, row in zip(pieces, padded, strict=True):
            piece.copy_(row[: piece.numel()])

    return run


def gloo_reduce_scatter(output: Tensor, full: Tensor, split_numels: Sequence[int]) -> Run:
    """Gloo's own; even splits only."""

    def run() -> None:
        dist.reduce_scatter_single(output, full)

    return run


def all_to_all_reduce(output: Tensor, full: Tensor, split_numels: Sequence[int]) -> Run:
    """``all_to_all_single`` and a local sum in rank order."""
    arrived = full.new_empty(len(split_numels), output.numel())
    counts = [output.numel()] * len(split_numels)

    def run() -> None:
        dist.all_to_all_single(arrived.view(-1), full, counts, list(split_numels))
        torch.add(arrived[0], arrived[1], out=output)
        for row in arrived[2:]:
            output.add_(row)

    return run


def padded_reduce_scatter(output: Tensor, full: Tensor, split_numels: Sequence[int]) -> Run:
    """Gloo's own with every part padded to the largest: a copy in and a copy out."""
    widest = max(split_numels)
    padded = full.new_zeros(len(split_numels), widest)
    padded_output = full.new_empty(widest)
    pieces = _pieces(full, split_numels)

    def run() -> None:
        for piece, row in zip(pieces, padded, strict=True):
            row[: piece.numel()].copy_(piece)
        dist.reduce_scatter_single(padded_output, padded.view(-1))
        output.copy_(padded_output[: output.numel()])

    return run


def list_reduce_scatter(output: Tensor, full: Tensor, split_numels: Sequence[int]) -> Run:
    """Gloo's list form, which takes unequal tensors."""
    pieces = _pieces(full, split_numels)

    def run() -> None:
        dist.reduce_scatter(output, pieces)

    return run


def reduces(output: Tensor, full: Tensor, split_numels: Sequence[int]) -> Run:
    """One asynchronous reduction per rank; they sum in place, so the input is copied first."""
    copied = torch.empty_like(full)
    pieces = _pieces(copied, split_numels)

    def run() -> None:
        copied.copy_(full)
        works = [dist.reduce(p, dst, async_op=True) for dst, p in enumerate(pieces)]
        for work in works:
            work.wait()
        output.copy_(pieces[dist.get_rank()])

    return run


def _pieces(flat: Tensor, split_numels: Sequence[int]) -> list[Tensor]:
    stops = accumulate(split_numels)
    return [flat[stop - n : stop] for n, stop in zip(split_numels, stops, strict=True)]
