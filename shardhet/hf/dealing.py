"""A data loader that gives each rank its samples of every global batch, in plan order."""

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, Sampler

from shardhet.records.layout import Span
from shardhet.records.plan import Plan


def dealt(plan: Plan, position: int, num_samples: int) -> Span:
    """The samples of a batch of ``num_samples``, at most the plan's, for ``position``.

    If a batch is smaller, as at the end of an epoch, the last positions get fewer or none.
    """
    start = min(plan.first_sample(position), num_samples)
    return Span(start, min(start + plan.ranks[position].rank_batch_size, num_samples))


def num_rows(batch: Any) -> int:
    """The number of samples in a collated batch: dim 0 of its first tensor."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 0


def rows_of(batch: Any, rows: Span) -> Any:
    """The samples ``rows`` of a collated batch."""
    whole = num_rows(batch)

    def take(tensor: Tensor) -> Tensor:
        is_batched = tensor.dim() > 0 and len(tensor) == whole
        return tensor[rows.start : rows.stop] if is_batched else tensor

    return tree_map_only(Tensor, take, batch)


class PlanBatchSampler(BatchSampler):
    """Indices of this rank's samples; if it has none of a batch, the batch's first index."""

    def __init__(
        self, sampler: Sampler[int], plan: Plan, position: int, *, drop_last: bool, whole: bool
    ) -> None:
        """If ``whole``, every rank gets all indices and takes its rows after collating."""
        super().__init__(sampler, plan.global_batch_size, drop_last)
        self._plan = plan
        self._position = position
        self._whole = whole

    def spans(self) -> Iterator[tuple[Span, int]]:
        """This rank's part of every batch, and the number of samples in the batch."""
        assert isinstance(self.sampler, Sized)
        left = len(self.sampler)
        for _ in range(len(self)):
            num_samples = min(left, self.batch_size)
            left -= num_samples
            yield dealt(self._plan, self._position, num_samples), num_samples

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            span = dealt(self._plan, self._position, len(batch))
            yield batch if self._whole else batch[span.start : span.stop] or batch[:1]


class PlanLoader:
    """Collated batches of one rank, with no rows if it has no samples."""

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler[int],
        plan: Plan,
        position: int,
        *,
        collate_fn: Callable[[list[Any]], Any],
        drop_last: bool,
        collates_whole_batch: bool,
        **options: Any,
    ) -> None:
        """``options`` are passed to the DataLoader."""
        self.dataset = dataset
        self._collates_whole_batch = collates_whole_batch
        self._batches = PlanBatchSampler(
            sampler, plan, position, drop_last=drop_last, whole=collates_whole_batch
        )
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._batches, collate_fn=collate_fn, **options
        )

    def __len__(self) -> int:
        """The number of global batches in an epoch."""
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Let a seeded sampler draw the epoch's order."""
        if hasattr(self._batches.sampler, "set_epoch"):
            self._batches.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        loaded = zip(self._batches.spans(), self._loader, strict=True)
        for (span, num_samples), collated in loaded:
            # A BatchEncoding is not a dict, so torch's pytree functions do not traverse it.
            batch = dict(collated) if isinstance(collated, Mapping) else collated
            if self._collates_whole_batch:
                self._check(batch, num_samples)
                yield rows_of(batch, span)
            else:
                self._check(batch, max(1, span.numel))
                yield batch if span.numel else rows_of(batch, Span(0, 0))

    def _check(self, batch: Any, num_samples: int) -> None:
        if num_rows(batch) != num_samples:
            shapes = [tuple(t.shape) for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
            raise ValueError(
                f"data_collator: {num_samples} samples became tensors of shapes {shapes}. Use "
                "a collator that keeps one row per sample; flattened ones cannot be dealt."
            )
