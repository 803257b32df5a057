"""What one rank brings to an uneven collective, and where its result goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from shardhet.comm.buffers import BufferPool
from shardhet.comm.channel import Channel


@dataclass(frozen=True, slots=True, eq=False)
class Gathering:
    """An all-gather of shards; see ``collectives.all_gather_uneven``."""

    output: Tensor | None  # [sum(split_numels)]; None if this rank receives nothing
    shard: Tensor  # [split_numels[position]]; may be a view of output
    split_numels: Sequence[int]
    channel: Channel
    receivers: Sequence[int]  # positions

    def __post_init__(self) -> None:
        _check_splits(self.shard, self.output, self.split_numels, self.channel)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has a shard and receives the output."""
        return len(self.receivers) == self.channel.world_size and 0 not in self.split_numels

    def copy_own_shard(self) -> None:
        """Copy this rank's shard into its output, unless it is there already."""
        assert self.output is not None
        own = pieces_of(self.output, self.split_numels)[self.channel.position]
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A reduce-scatter of gradients; see ``collectives.reduce_scatter_uneven``."""

    output: Tensor  # [split_numels[position]]
    full: Tensor | None  # [sum(split_numels)]; None if this rank contributes nothing
    split_numels: Sequence[int]
    channel: Channel
    contributors: Sequence[int]  # positions
    scratch: BufferPool

    def __post_init__(self) -> None:
        _check_splits(self.output, self.full, self.split_numels, self.channel)

    @property
    def is_whole(self) -> bool:
        """Whether every rank contributes and stores a part of the sum."""
        all_give = len(self.contributors) == self.channel.world_size
        return all_give and 0 not in self.split_numels


def pieces_of(flat: Tensor, split_numels: Sequence[int]) -> list[Tensor]:
    """Return the consecutive parts of ``flat``, one per split, as views."""
    stops = accumulate(split_numels)
    return [flat[stop - n : stop] for n, stop in zip(split_numels, stops, strict=True)]


def has_even_layout(call: Gathering | Reduction) -> bool:
    """Whether the pieces have the layout of NCCL's own even collectives.

    With equal pieces, NCCL's list collectives go through a buffer as large as the whole tensor.
    """
    in_order = tuple(call.channel.rank_by_position) == tuple(range(call.channel.world_size))
    return in_order and len(set(call.split_numels)) == 1


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
