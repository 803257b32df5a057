"""Microbatches of a device: the fastest split is found, and alike ones are preferred."""

from functools import cache

import numpy as np
import pytest

from shardhet.planner.candidates.splits import LEAST_GAIN, Splits


def fastest_s(whole_s: list[float], batch: int, largest: int) -> float:
    """By trying the first microbatch of every size; no code is shared."""

    @cache
    def least(left: int) -> float:
        if not left:
            return 0.0
        return min(
            whole_s[size] + least(left - size) for size in range(1, min(left, largest) + 1)
        )

    return least(batch)


@pytest.mark.parametrize("seed", range(20))
def test_a_split_is_the_fastest_or_alike_and_nearly_as_fast(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = int(rng.integers(1, 8))
    curve = (np.arange(1 + sizes) + rng.uniform(0, 2)) * rng.uniform(0.7, 1.3, 1 + sizes)
    curve[0] = 0.0
    parts = rng.uniform(0.1, 1, (3, 1)) * np.stack([curve, curve**2, np.sqrt(curve)])
    splits, batches = Splits(curve, 24), np.arange(25)
    seconds, whole_s = splits.seconds(parts, batches), splits.seconds(curve[None], batches)[0]
    exist = splits.exist(batches)
    for batch in batches.tolist():
        best_by_size = {}
        for split in np.flatnonzero(exist[batch]).tolist():
            found, largest = splits.sizes(batch, split), int(splits.largest[split])
            assert sum(found) == batch
            assert all(1 <= size <= largest for size in found)
            for of_part, expected in zip(parts, seconds, strict=True):
                assert expected[batch, split] == pytest.approx(of_part[list(found)].sum())
            known_s = best_by_size.get(largest, np.inf)
            best_by_size[largest] = min(known_s, whole_s[batch, split])
            if split < sizes:
                assert len(set(found[:-1])) <= 1
        for largest, seconds_here in best_by_size.items():
            best_s = fastest_s(curve.tolist(), batch, largest)
            assert best_s * (1 - 1e-9) <= seconds_here <= best_s / (1 - LEAST_GAIN) * (1 + 1e-9)


def test_on_a_straight_line_microbatches_are_full_but_the_last() -> None:
    splits = Splits(np.array([0.0, 3.0, 5.0, 7.0, 9.0]), 100)
    assert splits.sizes(23, 3) == (4,) * 5 + (3,)
    assert splits.sizes(0, 3) == ()
    assert len(splits.largest) == 4  # no other is faster


def test_a_size_that_is_slow_is_avoided() -> None:
    splits = Splits(np.array([0.0, 2.0, 2.5, 9.0, 4.0]), 10)
    assert splits.sizes(7, 3) == (4, 3)
    assert splits.sizes(7, 4 + 3) == (4, 2, 1)


def test_large_batches_are_alike() -> None:
    splits = Splits(np.array([0.0, 2.0, 2.5, 9.0]), 100_000)
    assert splits.sizes(100_000, 2) == (3,) * 33_333 + (1,)
