"""Who gets which sample: the order of each epoch, one for all ranks.

A sampler is iterated as its author wrote it, on every rank, so that generators which are alike
stay alike.  They do not where a dataset or a collator draws for a rank's samples; what the
first position has drawn counts.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from shardhet.comm.channel import Channel
from shardhet.fsdp import HetFSDP
from shardhet.training.resuming import random_states, restore_random_states

HOST = torch.device("cpu")  # samplers draw there
INDICES_AT_ONCE = 2**16  # as numbers of Python, which take four times the memory


class OfEpoch(Sampler[Any]):
    """A sampler whose order depends on the epoch alone, so that no rank draws anything."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next order be that of ``epoch``."""
        self.epoch = epoch


class SeededSampler(OfEpoch):
    """All of ``num_samples`` indices, drawn from ``seed`` plus the epoch; in order if None."""

    def __init__(self, num_samples: int, seed: int | None) -> None:
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.num_samples)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        for part in order.split(INDICES_AT_ONCE):
            yield from part.tolist()


class EpochOrder(BatchSampler):
    """The indices of every global batch of an epoch.  Iterating is collective.

    They are drawn before the first of them is used, so before anything is drawn for samples.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler[Any],
        batch_size: int,
        *,
        drop_last: bool,
        collates_whole_batch: bool,
        ranks: HetFSDP | Channel,
    ) -> None:
        """If ``collates_whole_batch``, ranks begin an epoch with the same random states."""
        super().__init__(sampler, batch_size, drop_last)
        self._dataset = dataset
        self._has_one_state = collates_whole_batch
        self._ranks = ranks
        self._epoch = 0
        # What the order of the epoch in progress was drawn with, and its digest
        self.began_with: dict[str, Any] = {}

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler and the dataset, if they ask for it."""
        self._epoch = epoch
        for each in (self.sampler, self._dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._draw())

    def draw_again(self, began_with: dict[str, Any]) -> Iterable[list[Any]]:
        """The batches of an epoch that another process has begun with this."""
        self.set_epoch(began_with["epoch"])
        if "global" in began_with:
            self._put(began_with)
        batches = self._draw()
        if self.began_with.get("digest") != began_with.get("digest"):
            raise ValueError(
                f"{self._name}: it draws another order than before the checkpoint, but the "
                "epoch must go on as it began. Let it draw from a torch.Generator that it "
                "holds, or from the global one of torch, NumPy or Python."
            )
        return batches

    def _draw(self) -> Iterable[list[Any]]:
        if isinstance(self.sampler, OfEpoch):
            self.began_with = {"epoch": self._epoch}
            return super().__iter__()
        is_first = not self.began_with
        self.began_with = self._ranks.exchange_objects(self._states())[0]
        if self._has_one_state:
            self._put(self.began_with)
        batches = list(islice(super().__iter__(), len(self)))  # of samplers without an end too
        if batches and isinstance(batches[0][0], list):
            raise ValueError(
                f"{self._name}: it gives batches but the plan deals out batches of "
                f"{self.batch_size} samples. Give one index at a time."
            )
        mine = len(self._dataset), sha256(repr(batches).encode()).hexdigest()
        found = self._ranks.exchange_objects(mine)
        if is_first and len(set(found)) > 1:
            raise ValueError(
                f"{self._name}: ranks draw unlike orders, of datasets of "
                f"{[num_samples for num_samples, _ in found]} samples in plan order, but "
                "the plan deals out one order. Give all ranks the same data and the same seed, "
                "and use a sampler of the whole dataset."
            )
        self.began_with["digest"] = found[0][1]
        if len(set(found)) > 1:  # as large as the dataset is long
            sent = batches if self._ranks.position == 0 else None
            batches = self._ranks.exchange_objects(sent)[0]
        return batches

    def _states(self) -> dict[str, Any]:
        generators = [each.get_state() for each in _generators(self.sampler)]
        return {"epoch": self._epoch, "global": random_states(HOST), "own": generators}

    def _put(self, states: dict[str, Any]) -> None:
        restore_random_states(states["global"], HOST)
        for generator, state in zip(_generators(self.sampler), states["own"], strict=False):
            generator.set_state(state)

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__


def _generators(sampler: Any) -> list[torch.Generator]:
    """Those that a sampler holds, and those of samplers that it holds."""
    held = list(getattr(sampler, "__dict__", {}).values())
    inner = [_generators(each) for each in held if isinstance(each, Sampler)]
    return sum(inner, [each for each in held if isinstance(each, torch.Generator)])
