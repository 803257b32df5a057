"""The samples of a collated batch, by their rows."""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardhet.fsdp.microbatch.signature import is_plain
from shardhet.records.layout import Span
from shardhet.records.plan import Plan


def num_rows(batch: Any) -> int:
    """The number of samples in a collated batch: dim 0 of its first tensor."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 0


def rows_of(batch: Any, *spans: Span) -> Any:
    """The samples in ``spans`` of a collated batch."""
    whole = num_rows(batch)

    def take(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != whole:
            return tensor
        rows = [tensor[span.start : span.stop] for span in spans]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    return tree_map_only(Tensor, take, batch)


def rows_at(batch: Any, rows: Sequence[int]) -> Any:
    """These samples of a collated batch."""
    return rows_of(batch, *[Span(row, row + 1) for row in rows] or [Span(0, 0)])


def rounds_of(inputs: Any, plan: Plan, position: int) -> list[Any]:
    """What the rank computes of its batch in each round, of which the last may have no rows."""
    size, whole = plan.ranks[position].rank_batch_size, num_rows(inputs)
    borders = [min(i * size, whole) for i in range(plan.num_rounds + 1)]
    return [rows_of(inputs, Span(start, stop)) for start, stop in pairwise(borders)]


def without_rows(collate: Callable[[list[Any]], Any], sample: Any) -> Any:
    """What ``collate`` would make of no samples, which most cannot be given.

    What is longer for two copies of a sample than for one has a length of zero.
    """
    one, two = (collate([copy.deepcopy(sample) for _ in range(n)]) for n in (1, 2))
    return _emptied(one, two)


def _emptied(one: Any, two: Any) -> Any:
    if isinstance(one, Mapping):  # also BatchEncoding of transformers
        return {key: _emptied(one[key], two[key]) for key in one}
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return one[:0]
        parts = map(_emptied, one, two)
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    if not hasattr(one, "shape"):
        if not is_plain(one):
            raise TypeError(
                f"collate_fn: it gives a {type(one).__name__}, of which a rank without samples "
                "cannot make one without rows. Give tensors, or dicts, lists or tuples of "
                "them."
            )
        return one
    lengths = enumerate(zip(one.shape, two.shape, strict=True))
    dim = next((dim for dim, (n, more) in lengths if n != more), None)
    return one if dim is None else one[(slice(None),) * dim + (slice(0),)]
