"""How a device may cut its batch into microbatches: alike but the last, or as is fastest.

Let w(s) be the compute of a microbatch of s samples.  The least compute of b samples in
microbatches of at most m is

    f_m(b) = min( f_{m-1}(b),  w(m) + f_m(b - m) ),      f_m(0) = 0,

the unbounded knapsack.  Where it is less than that of full microbatches of m and one with the
remainder, both splits are candidates: the fastest as a whole may be slower in one phase.
Curves that are straight lines tie all splits with the same number of microbatches; others
have sizes that a device is slow at.

Beyond the largest size that was measured, all curves are straight lines.  There, of the splits
into as many microbatches, only the one with the smallest is a candidate, and those whose last
microbatch is so small that it was measured; and the fastest are not looked for.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardhet.planner.candidates.dominance import dominated
from shardhet.planner.problem.problem import Bools, Floats, Ints

LEAST_GAIN = 1e-9  # of compute, for which microbatches may be unlike each other
MAX_BATCH = 2048  # beyond, only splits into microbatches that are alike but the last
MOST_KEPT = 2**15  # seconds of splits tried; more are not kept
LEAST_MIXED_SIZE = 16  # microbatches of at least so many samples are mixed as is fastest


@lru_cache(maxsize=1024)
def splits_of(whole_s: tuple[float, ...], num_measured: int, max_batch: int) -> "Splits":
    """Cached ``Splits``: they do not depend on resharding or on memory, so many plans share
    them.
    """
    return Splits(np.array(whole_s), num_measured, max_batch)


class Splits:
    """For every batch b and largest microbatch m, the sizes of the microbatches."""

    def __init__(self, whole_s: Floats, num_measured: int, max_batch: int) -> None:
        """``whole_s`` [1 + M] is the compute of one microbatch by its size; 0 at size 0.

        It is a straight line from size ``num_measured`` on.
        """
        self.num_sizes = len(whole_s) - 1
        self._num_measured = num_measured
        self.num_mixed = min(self.num_sizes, max(LEAST_MIXED_SIZE, 2 * num_measured))
        self._ends_with: list[Bools] = []  # per size m, [1 + B]: f_m(b) uses m
        self._is_other = np.zeros((min(max_batch, MAX_BATCH) + 1, self.num_mixed), dtype=bool)
        batches = np.arange(len(self._is_other))
        min_s: Floats = np.asarray(batches * whole_s[1], dtype=np.float64)
        self._ends_with.append(batches > 0)
        for size in range(2, self.num_mixed + 1):
            min_s, uses = _with_size(min_s, float(whole_s[size]), size)
            self._ends_with.append(uses)
            alike_s = batches // size * whole_s[size] + whole_s[batches % size]
            self._is_other[:, size - 1] = uses & (min_s < alike_s * (1 - LEAST_GAIN))
        # [n] the largest microbatch of each split: alike ones, then the fastest if others are.
        sizes = np.arange(1, self.num_sizes + 1)
        mixed = sizes[: self.num_mixed] if self._is_other.any() else sizes[:0]
        self.largest: Ints = np.concatenate((sizes, mixed))

    def candidates(self, batches: Ints) -> tuple[Ints, Bools]:
        """[b, n] the splits of each batch that may be worth it, and which entries there are."""
        sizes, batch = np.arange(1, self.num_sizes + 1), batches[:, None]
        exists = sizes <= batch
        first = self._num_measured  # of the sizes beyond the measured ones
        if first < self.num_sizes:
            beyond = sizes[first:]
            rest = batch % beyond
            number = batch // beyond + (rest > 0)
            is_smallest = beyond == -(-batch // np.maximum(1, number))
            exists[:, first:] &= is_smallest | ((rest > 0) & (rest < self._num_measured))
        if len(self.largest) > self.num_sizes:
            is_known = batches < len(self._is_other)
            other = self._is_other[np.where(is_known, batches, 0)] & is_known[:, None]
            exists = np.concatenate((exists, other), axis=1)
        return compressed(exists)

    def seconds(self, curves_s: Floats, batches: Ints, tried: Ints) -> Floats:
        """[K, b, n] seconds of the splits ``tried`` [b, n] of each batch.

        There are K ``curves_s`` [K, 1 + M] by microbatch size.
        """
        size, batch = self.largest[tried], batches[:, None]
        alike: Floats = batch // size * curves_s[:, size] + curves_s[:, batch % size]
        is_mixed = tried >= self.num_sizes
        if is_mixed.any():
            b, n = np.nonzero(is_mixed)
            fastest = _fastest(self, curves_s[:, : 1 + self.num_mixed].tobytes())
            alike[:, b, n] = fastest[:, batches[b], tried[b, n] - self.num_sizes]
        return alike

    def sizes(self, batch: int, split: int) -> tuple[int, ...]:
        """The microbatches of a batch under the split at this index, the largest first."""
        if not batch:
            return ()
        largest, found = int(self.largest[split]), []
        if split < self.num_sizes:
            whole, rest = divmod(batch, largest)
            return (largest,) * whole + ((rest,) if rest else ())
        while batch:
            if self._ends_with[largest - 1][batch]:
                found.append(largest)
                batch -= largest
            else:
                largest -= 1
        return tuple(found)

    def fastest(self, curves_s: Floats) -> Floats:
        """[K, 1 + B, M] seconds of the fastest split of mixed sizes."""
        sums: Floats = curves_s[:, 1:2] * np.arange(len(self._is_other))
        found = [sums]
        for size, uses in enumerate(self._ends_with[1:], start=2):
            sums = sums.copy()
            for start in range(size, sums.shape[1], size):
                stop = min(start + size, sums.shape[1])
                with_size = sums[:, start - size : stop - size] + curves_s[:, size, None]
                sums[:, start:stop] = np.where(uses[start:stop], with_size, sums[:, start:stop])
            found.append(sums)
        return np.stack(found, axis=2)


class LeastSplits:
    """Stands in for the splits of a batch: for each curve, a lower bound on the seconds of
    every split.

    For a bound on plans of several rounds, which cut a batch as none of one round does.  A
    curve is a straight line a + c m from size ``num_measured`` on.  A microbatch of twice
    that size or more is never faster than its halves if a < 0.  Else the samples y of all
    smaller ones, and a for the others, leave

        min over y of  f(y) + a + c (b - y),      f as in the module, of this curve.
    """

    largest: Ints = np.ones(1, dtype=np.int64)

    def __init__(self, num_measured: int) -> None:
        self._num_measured = num_measured

    def candidates(self, batches: Ints) -> tuple[Ints, Bools]:
        """[b, 1] the index of what stands for all splits."""
        found: Ints = np.zeros((len(batches), 1), dtype=np.int64)
        return found, batches[:, None] > 0

    def seconds(self, curves_s: Floats, batches: Ints, tried: Ints) -> Floats:
        """[K, b, 1] the least seconds by ``curves_s`` [K, 1 + M]."""
        assert not tried.any()
        most = int(batches.max(initial=0))
        return np.stack([self._least_s(each, most)[batches] for each in curves_s])[:, :, None]

    def sizes(self, batch: int, split: int) -> tuple[int, ...]:
        """Raise ``RuntimeError``: no plan is made of what only bounds plans."""
        raise RuntimeError(f"{batch} samples in split {split}: they are only for a bound.")

    def _least_s(self, curve_s: Floats, most: int) -> Floats:
        """[1 + most] the least seconds of so many samples."""
        sizes = np.arange(1, len(curve_s))
        number = min(len(sizes), max(LEAST_MIXED_SIZE, 2 * self._num_measured))
        samples = np.arange(1 + min(most, MAX_BATCH), dtype=np.float64)
        min_s: Floats = samples * float(curve_s[1])
        for size in range(2, number + 1):
            min_s, _ = _with_size(min_s, float(curve_s[size]), size)
        # Rounding must not put it above a sum of the same seconds in another order.
        min_s *= 1 - LEAST_GAIN
        if number < len(sizes):
            slope = float(curve_s[-1] - curve_s[number]) / (len(sizes) - number)
            start_s = max(0.0, float(curve_s[-1]) - slope * len(sizes))
            ahead_s = np.minimum.accumulate(min_s - slope * samples)
            min_s = np.minimum(min_s, ahead_s + slope * samples + start_s)
        found: Floats = np.arange(1 + most, dtype=np.float64) * float(
            (curve_s[1:] / sizes).min()
        )
        found[: len(min_s)] = np.maximum(found[: len(min_s)], min_s)
        return found * (1 - LEAST_GAIN)


class Tried(NamedTuple):
    """The splits of some batches that may be worth it for devices that cut them alike."""

    splits: Ints  # [b, n]
    exists: Bools  # [b, n] whether there are so many
    seconds: tuple[Floats, ...]  # per device, [K, b, n]


def worth_trying(
    splits: Splits | LeastSplits,
    curves_s: Sequence[Floats],
    batches: Ints,
    *,
    needs_more_if_larger: bool,
) -> Tried:
    """The splits of each batch, of devices with these ``curves_s`` [K, 1 + M].

    If larger microbatches need more memory, those are left out that are slower in every unit
    than one with smaller microbatches.  Steps of other forms try the same, so few are kept.
    """
    asked = (splits, tuple(curves_s), batches, needs_more_if_larger)
    numbers = len(batches) * len(splits.largest) * sum(map(len, curves_s))
    if numbers > MOST_KEPT or isinstance(splits, LeastSplits):
        return _worth_trying(*asked)
    key = (splits, *(each.tobytes() for each in curves_s), batches.tobytes(), asked[-1])
    return _kept_tried(_Keyed(key, asked))


class _Keyed:
    """Arguments that are compared by their key."""

    def __init__(
        self,
        key: tuple[object, ...],
        asked: tuple[Splits | LeastSplits, tuple[Floats, ...], Ints, bool],
    ) -> None:
        self.key, self.asked = key, asked

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@lru_cache(maxsize=256)
def _kept_tried(keyed: _Keyed) -> Tried:
    return _worth_trying(*keyed.asked)


def _worth_trying(
    splits: Splits | LeastSplits,
    curves_s: tuple[Floats, ...],
    batches: Ints,
    needs_more_if_larger: bool,
) -> Tried:
    tried, exists = splits.candidates(batches)
    seconds = [splits.seconds(each, batches, tried) for each in curves_s]
    if needs_more_if_larger:
        largest = np.where(exists, -1.0 * splits.largest[tried], -np.inf)
        kept, exists = compressed(exists & ~dominated(np.concatenate(seconds), largest))
        tried = np.take_along_axis(tried, kept, axis=1)
        seconds = [np.take_along_axis(each, kept[None], axis=2) for each in seconds]
    return Tried(tried, exists, tuple(seconds))


@lru_cache(maxsize=16)  # each is large
def _fastest(splits: Splits, curves_s: bytes) -> Floats:
    """``Splits.fastest``, kept."""
    shape = (-1, 1 + splits.num_mixed)
    return splits.fastest(np.frombuffer(curves_s, dtype=np.float64).reshape(shape))


def _with_size(min_s: Floats, microbatch_s: float, size: int) -> tuple[Floats, Bools]:
    """f_m from f_{m-1}, and where it uses a microbatch of m."""
    found, uses = min_s.copy(), np.zeros(len(min_s), dtype=bool)
    for start in range(size, len(found), size):
        stop = min(start + size, len(found))
        with_size = found[start - size : stop - size] + microbatch_s
        uses[start:stop] = with_size < found[start:stop] * (1 - 1e-12)
        found[start:stop] = np.where(uses[start:stop], with_size, found[start:stop])
    return found, uses


def compressed(exists: Bools) -> tuple[Ints, Bools]:
    """[b, n] the columns that exist in each row, the first ones first, and which entries do."""
    rows, columns = np.nonzero(exists)
    counts = exists.sum(axis=1)
    width = max(1, int(counts.max(initial=1)))
    starts = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
    found: Ints = np.zeros((len(exists), width), dtype=np.int64)
    found[rows, np.arange(len(rows)) - starts[rows]] = columns
    return found, np.arange(width) < counts[:, None]
