"""Datasets that give their samples in one order only, as iterable ones do.

Every rank reads all samples, in one worker at most, and keeps its own: so each sample comes
once, whatever the plan, and ranks can compare what they have read.  What the dataset draws
follows from the seed and the epoch, so an epoch that is read again is the same.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from shardhet.fsdp.microbatch.signature import is_plain
from shardhet.training.dealing.batches import Share
from shardhet.training.dealing.order import HOST, OfEpoch
from shardhet.training.resuming import random_states, restore_random_states

TOLERANCE = 1e-6  # relative: processors of unlike hosts may round what a dataset computes


def is_stream(dataset: Any) -> bool:
    """Whether samples cannot be asked for by their index."""
    has_places = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or not has_places


class Read(NamedTuple):
    """What a rank has read of a global batch."""

    num_samples: int  # of all ranks; 0: the stream has ended
    digest: tuple[float, int]  # of all ranks' samples: of their floats and of everything else
    own: Any  # this rank's samples, collated or not yet

    def is_same(self, other: "Read") -> bool:
        """Whether both have read the same samples."""
        (floats, rest), (floats_there, rest_there) = self.digest, other.digest
        is_close = math.isclose(floats, floats_there, rel_tol=TOLERANCE)
        return self.num_samples == other.num_samples and rest == rest_there and is_close


class BatchIndices(OfEpoch):
    """(epoch, number) of every batch, without end: how many there are shows in the stream."""

    def __init__(self, stream: "SampleStream") -> None:
        self._stream = stream

    def __len__(self) -> int:
        stream = self._stream
        whole, rest = divmod(len(stream.dataset), stream.batch_size)
        return whole + bool(rest and not stream.drop_last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, number) for number in count())


class SampleStream:
    """Global batches of ``dataset``, by their keys; a rank takes its ``share`` of each."""

    def __init__(self, dataset: Any, num_workers: int, *, seed: int, drop_last: bool) -> None:
        if hasattr(dataset, "__next__"):
            raise ValueError(
                "loader: the dataset is an iterator, which can be read once. Give what it is "
                "made from, with __iter__, so that there can be a second epoch."
            )
        self.dataset, self.num_workers = dataset, num_workers
        self.batch_size, self.share = 0, Share(())  # set by the loader
        self.drop_last = drop_last
        self._seed = seed
        self._next = (-1, 0)  # the ticket that would come next
        self._samples: Iterator[Any] = iter(())
        self._states: dict[str, Any] = {}  # that the dataset draws with

    def __getitems__(self, batch_keys: Sequence[tuple[int, int]]) -> Read:
        [(epoch, number)] = batch_keys
        with self._own_draws():
            if epoch != self._next[0] or number < self._next[1]:
                self._open(epoch)
            for _ in range(self._next[1], number + 1):
                batch = list(islice(self._samples, self.batch_size))
        self._next = epoch, number + 1
        if self.drop_last and len(batch) < self.batch_size:
            batch = []
        return Read(len(batch), _digest(batch), self.share.shown(batch))

    def _open(self, epoch: int) -> None:
        seed = self._seed + epoch
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        # Of datasets 5.2: kept for all epochs, and a shuffle's leaves out what its buffer held.
        if getattr(self.dataset, "_starting_state_dict", None):
            raise ValueError(
                "loader: the dataset goes on at a resume point of its own but is read from its "
                "beginning, so that each sample comes once. Leave its load_state_dict out; "
                "that of the loader goes on within an epoch."
            )
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._samples, self._next = iter(self.dataset), (epoch, 0)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        outside = random_states(HOST)
        restore_random_states(self._states or outside, HOST)
        try:
            yield
        finally:
            self._states = random_states(HOST)
            restore_random_states(outside, HOST)


class ReadCollator:
    """Collates what a rank has read."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, read: Read) -> Read:
        return read._replace(own=self.collate(read.own) if read.num_samples else None)


def _digest(samples: Sequence[Any]) -> tuple[float, int]:
    total, rest = 0.0, list[Any]()
    for leaf in tree_leaves(samples):
        if isinstance(leaf, np.ndarray | np.generic):
            is_number = leaf.dtype.kind in "biufc"
            leaf = torch.as_tensor(leaf) if is_number else leaf.tolist()
        if isinstance(leaf, float):
            leaf = torch.tensor(leaf)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            total += float(leaf.detach().abs().double().nan_to_num().sum())
            rest.append(leaf.shape)
        elif isinstance(leaf, Tensor):
            rest.append((leaf.shape, crc32(leaf.cpu().contiguous().numpy().tobytes())))
        else:
            rest.append(leaf if is_plain(leaf) else type(leaf))
    return total, crc32(repr(rest).encode())
