"""How a device may cut its batch into microbatches: alike but the last, or as is fastest.

Let w(s) be the compute of a microbatch of s samples.  The least compute of b samples in
microbatches of at most m is

    f_m(b) = min( f_{m-1}(b),  w(m) + f_m(b - m) ),      f_m(0) = 0,

the unbounded knapsack.  Where it is less than that of full microbatches of m and one with the
remainder, both splits are candidates: the fastest as a whole may be slower in one phase.
Curves that are straight lines tie all splits with the same number of microbatches; others
have sizes that a device is slow at.
"""

from functools import lru_cache

import numpy as np

from shardhet.planner.problem.problem import Bools, Floats, Ints

LEAST_GAIN = 1e-3  # of compute, for which microbatches may be unlike each other
MAX_BATCH = 2048  # beyond, one microbatch among so many matters little


@lru_cache(maxsize=1024)
def splits_of(whole_s: tuple[float, ...], max_batch: int) -> "Splits":
    """``Splits``, kept: plans that reshard, that do not, and with more memory have the same."""
    return Splits(np.array(whole_s), max_batch)


class Splits:
    """For every batch b and largest microbatch m, the sizes of the microbatches."""

    def __init__(self, whole_s: Floats, max_batch: int) -> None:
        """``whole_s`` [1 + M] is the compute of one microbatch by its size; 0 at size 0."""
        self.num_sizes = len(whole_s) - 1
        self._ends_with: list[Bools] = []  # per size m, [1 + B]: f_m(b) uses m
        self._is_other = np.zeros((min(max_batch, MAX_BATCH) + 1, self.num_sizes), dtype=bool)
        if max_batch <= MAX_BATCH:
            batches = np.arange(max_batch + 1)
            least_s: Floats = np.asarray(batches * whole_s[1], dtype=np.float64)
            self._ends_with.append(batches > 0)
            for size in range(2, self.num_sizes + 1):
                least_s, uses = _with_size(least_s, float(whole_s[size]), size)
                self._ends_with.append(uses)
                alike_s = batches // size * whole_s[size] + whole_s[batches % size]
                self._is_other[:, size - 1] = least_s < alike_s * (1 - LEAST_GAIN)
        # [n] the largest microbatch of each split: alike ones, then the fastest if others are.
        sizes = np.arange(1, self.num_sizes + 1)
        self.largest: Ints = np.tile(sizes, 2) if self._is_other.any() else sizes

    def exist(self, batches: Ints) -> Bools:
        """[b, n] which splits there are; the fastest is one only where it is another."""
        alike = np.ones((len(batches), self.num_sizes), dtype=bool)
        if len(self.largest) == self.num_sizes:
            return alike
        return np.concatenate((alike, self._is_other[batches]), axis=1)

    def seconds(self, curves_s: Floats, batches: Ints) -> Floats:
        """[K, b, n] seconds of each batch for K ``curves_s`` [K, 1 + M] by microbatch size."""
        sizes = np.arange(1, self.num_sizes + 1)
        whole, rest = batches[:, None] // sizes, batches[:, None] % sizes
        alike: Floats = whole * curves_s[:, None, 1:] + curves_s[:, rest]
        if len(self.largest) == self.num_sizes:
            return alike
        return np.concatenate((alike, _fastest(self, curves_s.tobytes())[:, batches]), axis=2)

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
        """[K, 1 + B, M] seconds of the fastest split."""
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


@lru_cache(maxsize=16)  # each is large
def _fastest(splits: Splits, curves_s: bytes) -> Floats:
    """``Splits.fastest``, kept."""
    shape = (-1, 1 + splits.num_sizes)
    return splits.fastest(np.frombuffer(curves_s, dtype=np.float64).reshape(shape))


def _with_size(least_s: Floats, microbatch_s: float, size: int) -> tuple[Floats, Bools]:
    """f_m from f_{m-1}, and where it uses a microbatch of m."""
    found, uses = least_s.copy(), np.zeros(len(least_s), dtype=bool)
    for start in range(size, len(found), size):
        stop = min(start + size, len(found))
        with_size = found[start - size : stop - size] + microbatch_s
        uses[start:stop] = with_size < found[start:stop] * (1 - 1e-12)
        found[start:stop] = np.where(uses[start:stop], with_size, found[start:stop])
    return found, uses
