"""This rank's samples of every global batch, in plan order."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader

from shardhet.fsdp.microbatch.signature import is_plain
from shardhet.records.layout import Span
from shardhet.records.plan import Plan
from shardhet.training.dealing.order import EpochOrder


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
        """Those of ``num_samples`` for ``position``, in as many rounds as they fill."""
        first, own = plan.first_sample(position), plan.ranks[position].rank_batch_size
        rounds = range(0, max(1, num_samples), plan.round_size)
        return cls(tuple(Span(at + first, at + first + own) for at in rounds))

    @property
    def numel(self) -> int:
        """How many they are."""
        return sum(span.numel for span in self.spans)

    def of(self, samples: list[Any]) -> list[Any]:
        """The rank's part of a batch's samples or indices, of which there may be fewer."""
        return [each for span in self.spans for each in samples[span.start : span.stop]]

    def shown(self, samples: list[Any]) -> list[Any]:
        """As ``of``. For a rank without samples: ``numel + 1`` copies of the batch's first
        sample, a number that no real share has; ``LocalBatchCollator`` takes the structure from
        them and drops the rows.
        """
        return self.of(samples) or samples[:1] * (self.numel + 1)


class PlanBatchSampler(BatchSampler):
    """Indices of this rank's samples of every global batch."""

    def __init__(self, order: EpochOrder, share: Share, *, whole: bool) -> None:
        """``share`` are this rank's samples of a full batch; the last batch may have fewer.

        If ``whole``, every rank gets all indices and takes its rows after collating.
        """
        super().__init__(order.sampler, order.batch_size, order.drop_last)
        self.order = order
        self._share = share
        self._whole = whole
        self._going_on: tuple[Iterable[list[Any]], int, Callable[[], None]] | None = None

    def go_on(
        self, batches: Iterable[list[Any]], num_trained: int, restore: Callable[[], None]
    ) -> None:
        """Let the next epoch be the rest of ``batches``, of which the first were trained.

        ``restore`` is called before the first batch that comes next.
        """
        self._going_on = (batches, num_trained, restore)

    def set_epoch(self, epoch: int) -> None:
        """Let a seeded sampler draw the epoch's order."""
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        going_on, self._going_on = self._going_on, None
        for i, batch in enumerate(self.order if going_on is None else going_on[0]):
            if going_on is not None and going_on[1] == i:
                going_on[2]()
            yield batch if self._whole else self._share.shown(batch)


class LocalBatchCollator:
    """Collates this rank's samples of a batch, with no rows if it has none."""

    def __init__(
        self, collate: Callable[[list[Any]], Any], share: Share, *, whole: bool = False
    ) -> None:
        self._collate = collate
        self.share = share
        self._whole = whole

    def __call__(self, samples: list[Any]) -> Any:
        if self._whole:
            return rows_of(self._collate(samples), *self.share.spans)
        if len(samples) > self.share.numel:  # see ``Share.shown``
            return without_rows(self._collate, samples[0])
        return self._collate(samples)


class OneRowEach:
    """A collator of dicts or tuples whose tensors have a row for each sample, or it raises."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        collated = self._collate(samples)
        # A BatchEncoding is not a dict, so torch's pytree functions do not traverse it.
        batch = dict(collated) if isinstance(collated, Mapping) else collated
        if num_rows(batch) != len(samples):
            shapes = [tuple(t.shape) for t in tree_leaves(batch) if isinstance(t, Tensor)]
            raise ValueError(
                f"data_collator: {len(samples)} samples became tensors of shapes {shapes}. Use "
                "a collator that keeps one row per sample; flattened ones cannot be dealt."
            )
        return batch


class PlanLoader(DataLoader[Any]):
    """Collated batches of one rank, with no rows if it has no samples."""

    def __init__(
        self,
        dataset: Any,
        batches: PlanBatchSampler,
        collator: LocalBatchCollator,
        **options: Any,
    ) -> None:
        """``options`` are the DataLoader's."""
        self.batches, self.collator = batches, collator
        super().__init__(dataset, batch_sampler=batches, collate_fn=collator, **options)

    def set_share(self, share: Share) -> None:
        """Let this rank have another share of the batches to come; without workers."""
        self.batches._share = self.collator.share = share

    def set_epoch(self, epoch: int) -> None:
        """Let a seeded sampler draw the epoch's order."""
        self.batches.set_epoch(epoch)
