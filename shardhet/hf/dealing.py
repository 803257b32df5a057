"""A data loader that gives each rank its samples of every global batch, in plan order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader

from shardhet.hf.epoch_order import EpochOrder
from shardhet.records.layout import Span
from shardhet.records.plan import Plan


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's samples of a batch."""

    spans: tuple[Span, ...]  # in order; in training one for each round

    @classmethod
    def of_step(cls, plan: Plan, position: int) -> Self:
        """Those of a global batch of the plan for ``position``, in each of its rounds."""
        rounds = [plan.round_samples(position, i) for i in range(plan.num_rounds)]
        return cls(tuple(Span(each.start, each.stop) for each in rounds))

    @classmethod
    def in_proportion(cls, plan: Plan, position: int, num_samples: int) -> Self:
        """Those of ``num_samples`` for ``position``, in the proportions of a round."""
        first, whole = plan.first_sample(position), plan.round_size
        stop = first + plan.ranks[position].rank_batch_size
        return cls((Span(num_samples * first // whole, num_samples * stop // whole),))

    @classmethod
    def in_stages(cls, plan: Plan, position: int, num_samples: int) -> Self:
        """Those of ``num_samples`` for ``position``, one step of the plan after the other."""
        starts = range(0, num_samples, plan.global_batch_size)
        one = cls.of_step(plan, position).spans
        spans = [Span(at + each.start, at + each.stop) for at in starts for each in one]
        return cls(tuple(spans))

    @property
    def numel(self) -> int:
        """How many they are."""
        return sum(span.numel for span in self.spans)

    def of(self, indices: list[int]) -> list[int]:
        """The rank's part of a batch's indices, of which there may be fewer."""
        return [i for span in self.spans for i in indices[span.start : span.stop]]


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


class PlanBatchSampler(BatchSampler):
    """Indices of this rank's samples of every global batch.

    For a batch of which the rank has none, the batch's first index comes once more often than
    the rank ever has samples, so that the collator shows what tensors without rows look like.
    """

    def __init__(self, order: EpochOrder, share: Share, *, whole: bool) -> None:
        """``share`` are this rank's samples of a full batch; the last batch may have fewer.

        If ``whole``, every rank gets all indices and takes its rows after collating.
        """
        super().__init__(order.sampler, order.batch_size, order.drop_last)
        self.order = order
        self._share = share
        self._whole = whole
        self._going_on: tuple[list[list[Any]], int, Callable[[], None]] | None = None

    def go_on(
        self, batches: list[list[Any]], num_trained: int, restore: Callable[[], None]
    ) -> None:
        """Let the next epoch be the rest of ``batches``, of which the first were trained.

        ``restore`` is called before the first batch that comes next.
        """
        self._going_on = (batches, num_trained, restore)

    def set_epoch(self, epoch: int) -> None:
        """Let a seeded sampler draw the epoch's order."""
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        going_on, self._going_on = self._going_on, None
        for i, batch in enumerate(self.order if going_on is None else going_on[0]):
            if going_on is not None and going_on[1] == i:
                going_on[2]()
            if self._whole:
                yield batch
                continue
            yield self._share.of(batch) or batch[:1] * (self._share.numel + 1)


class DealtCollator:
    """Collates this rank's samples of a batch into tensors with a row for each."""

    def __init__(
        self, collate: Callable[[list[Any]], Any], share: Share, *, whole: bool
    ) -> None:
        self._collate = collate
        self._share = share
        self._whole = whole

    def __call__(self, samples: list[Any]) -> Any:
        collated = self._collate(samples)
        # A BatchEncoding is not a dict, so torch's pytree functions do not traverse it.
        batch = dict(collated) if isinstance(collated, Mapping) else collated
        if num_rows(batch) != len(samples):
            shapes = [tuple(t.shape) for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
            raise ValueError(
                f"data_collator: {len(samples)} samples became tensors of shapes {shapes}. Use "
                "a collator that keeps one row per sample; flattened ones cannot be dealt."
            )
        if self._whole:
            return rows_of(batch, *self._share.spans)
        has_none = len(samples) > self._share.numel
        return rows_of(batch, Span(0, 0)) if has_none else batch


class PlanLoader(DataLoader[Any]):
    """Collated batches of one rank, with no rows if it has no samples."""

    def __init__(
        self,
        dataset: Any,
        order: EpochOrder,
        share: Share,
        *,
        collate_fn: Callable[[list[Any]], Any],
        collates_whole_batch: bool,
        **options: Any,
    ) -> None:
        """``share`` are this rank's samples of a batch; ``options`` are the DataLoader's."""
        whole = collates_whole_batch
        self.batches = PlanBatchSampler(order, share, whole=whole)
        collator = DealtCollator(collate_fn, share, whole=whole)
        super().__init__(dataset, batch_sampler=self.batches, collate_fn=collator, **options)

    def set_epoch(self, epoch: int) -> None:
        """Let a seeded sampler draw the epoch's order."""
        self.batches.set_epoch(epoch)
