"""Calls of a model with some of their samples, and of their tokens, as probes make them.

Places are those in the order of probes: samples that have rows of all ragged arguments.  An
index past the last sample wraps around; that copy is rolled along another dimension (masks keep
their first element) so that it differs. With ragged arguments only these are rolled, so that
lengths still match.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from shardhet.fsdp.microbatch.batching import BatchAxis, Rows, flatten
from shardhet.fsdp.microbatch.signature import Arguments, ModelCall
from shardhet.records.plan import RankPlan

Axes = Sequence[BatchAxis | None]  # by leaf of the arguments
# A probe keeps arguments and results of units for two samples and for three, twice each, and
# runs a unit on three at once.  So few of their tokens take less than one sample in a step.
SHARE_OF_TOKENS, LEAST_TOKENS = 1 / 12, 64
LONG = 2048  # samples of fewer tokens are tried whole, which shows more


class Fewer(NamedTuple):
    """How many tokens of each sample a probe takes, and of how many."""

    few: int
    total: int

    def of(self, tensor: Tensor, *, but: int | None) -> Tensor:
        """The tensor with so few tokens, in whichever dimensions but one it has them all."""
        if tensor.layout is not torch.strided:
            return tensor
        made, last = tensor.detach(), self.total - 1
        # The first and the last, and others at equal distances.
        places = -(torch.arange(self.few, device=tensor.device) * -last // (self.few - 1))
        for dim, length in enumerate(tensor.shape):
            if length == self.total and dim != but:
                made = made.index_select(dim, places)
        is_whole = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
        if is_whole and self.few <= tensor.max() <= self.total:
            # Perhaps places of tokens, or lengths: those among the few.
            among = made.long() * (self.few - 1) // last
            made = torch.where(made > 0, among, made).to(tensor.dtype)
        return made.requires_grad_(tensor.requires_grad)


def few_tokens(call: ModelCall, rank: RankPlan) -> Fewer | None:
    """So few that a probe takes no more memory than the largest microbatch, or a tile of it;
    None if the call has few, or if it is not clear where they are.
    """
    texts = [
        leaf.shape[0 if dim else 1]
        for leaf, dim in zip(call.leaves, call.batch_dims, strict=True)
        if isinstance(leaf, Tensor) and leaf.dim() > 1 + leaf.is_floating_point()
    ]
    total = 0 if call.is_ragged or not texts else texts[0]
    most = total * SHARE_OF_TOKENS
    if rank.tiled_units:
        most = min(most, rank.tokens_per_tile / 3)
    few = int(most * max(rank.microbatch_sizes, default=0)) // LEAST_TOKENS * LEAST_TOKENS
    few = max(few, LEAST_TOKENS)
    if total < LONG or 2 * few > total:
        return None
    return Fewer(few, total)


def with_few_tokens(call: ModelCall, rank: RankPlan) -> ModelCall:
    """The call with so few tokens of each sample; itself if it has few."""
    fewer = few_tokens(call, rank)
    if fewer is None:
        return call
    leaves = [
        fewer.of(leaf, but=dim if call.num_samples == fewer.total else None)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf, dim in zip(call.leaves, call.batch_dims, strict=True)
    ]
    return replace(call, leaves=tuple(leaves))


def with_samples(
    call: ModelCall,
    axes: Axes,
    places: Sequence[int],
    factor: float = 1.0,
) -> Arguments:
    """The arguments with the samples at ``places``; floating values of that at 0 are multiplied
    by ``factor``.
    """
    order, leaves = _order(call), []
    for leaf, axis, rows in zip(call.leaves, axes, call.rows, strict=True):
        if axis is None and rows is None:
            leaves.append(leaf)
            continue
        pieces = _pieces(call, leaf, axis, rows, places, order)
        if factor != 1.0 and leaf.is_floating_point():
            pieces = [
                piece if place else piece * factor
                for piece, place in zip(pieces, places, strict=True)
            ]
        joined = torch.cat(pieces, 0 if axis is None else axis.dim)
        leaves.append(joined.requires_grad_(leaf.requires_grad))
    return call.passed(leaves)


def rows_in(
    call: ModelCall, axes: Axes, arguments: Arguments
) -> list[tuple[Tensor, bool | None]]:
    """The tensors of such arguments; whether they have rows of samples each, or ragged ones."""
    leaves, _ = flatten(arguments)
    return [
        (leaf, True if axis is not None else False if rows else None)
        for leaf, axis, rows in zip(leaves, axes, call.rows, strict=True)
        if isinstance(leaf, Tensor)
    ]


def has_unlike_samples(call: ModelCall | None, axes: Axes, number: int) -> bool:
    """Whether the first ``number`` samples are not all the same, which would hide that they are
    mixed.

    So they are, too, if no others can be made of a single one that has one element.
    """
    if call is None:
        return False
    of_one = [flatten(with_samples(call, axes, [i]))[0] for i in range(number)]
    samples = [[leaf for leaf in each if isinstance(leaf, Tensor)] for each in of_one]
    if call.num_samples == 1 and all(each.numel() < 2 for each in samples[0]):
        return True
    return any(
        one.layout is not torch.strided or not torch.equal(one, each)
        for one, *others in zip(*samples, strict=True)
        for each in others
    )


def _order(call: ModelCall) -> list[int]:
    ragged = [each for each in call.rows if each and any(each)]
    every = range(call.num_samples)
    return [i for i in every if all(rows[i] for rows in ragged)] or list(every)


def _pieces(
    call: ModelCall,
    leaf: Tensor,
    axis: BatchAxis | None,
    rows: Rows | None,
    places: Sequence[int],
    order: Sequence[int],
) -> list[Tensor]:
    dim, whole = 0 if axis is None else axis.dim, leaf.detach()
    parts = whole.tensor_split(call.num_samples, dim) if rows is None else whole.split(rows)
    rolls = not call.has_rows or (rows is not None and leaf.is_floating_point())
    pieces = []
    for place in places:
        piece = parts[order[place % len(order)]]
        shift = place // len(order)
        rest = [d for d in range(piece.dim()) if d != dim and piece.shape[d] > 1]
        pieces.append(_rolled(piece, shift, rest[0]) if shift and rest and rolls else piece)
    return pieces


def _rolled(piece: Tensor, shift: int, dim: int) -> Tensor:
    """The sample rolled; a mask begins with what it began with.

    Padding that came to the front would leave the first tokens nothing to attend to, of which
    some models make NaN where others of their samples are numbers.
    """
    rolled = piece.roll(shift, dim)
    if piece.is_floating_point() or piece.is_complex():
        return rolled
    begins = piece.narrow(dim, 0, 1)
    kept = rolled.clone()
    kept.narrow(dim, 0, min(shift, piece.shape[dim])).copy_(begins)
    is_mask = ((piece == 0) | (piece == 1)).all()
    return torch.where(is_mask & kept.any(), kept, rolled)
