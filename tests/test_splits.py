"""Microbatches of a device: the fastest split is found, and alike ones are preferred."""

from functools import cache

import numpy as np
import pytest

from shardhet.planner.candidates.splits import MAX_BATCH, LeastSplits, Splits


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
def test_a_split_is_the_fastest_or_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = int(rng.integers(1, 8))
    curve = (np.arange(1 + sizes) + rng.uniform(0, 2)) * rng.uniform(0.7, 1.3, 1 + sizes)
    curve[0] = 0.0
    parts = rng.uniform(0.1, 1, (3, 1)) * np.stack([curve, curve**2, np.sqrt(curve)])
    splits, batches = Splits(curve, sizes, 24), np.arange(25)
    tried, exist = splits.candidates(batches)
    seconds = splits.seconds(parts, batches, tried)
    whole_s = splits.seconds(curve[None], batches, tried)[0]
    for batch in batches.tolist():
        best_by_size = dict.fromkeys(range(1, 1 + sizes), np.inf)
        for n, split in enumerate(tried[batch].tolist()):
            if not exist[batch, n]:
                continue
            found, largest = splits.sizes(batch, split), int(splits.largest[split])
            assert sum(found) == batch
            assert all(1 <= size <= largest for size in found)
            for of_part, expected in zip(parts, seconds, strict=True):
                assert expected[batch, n] == pytest.approx(of_part[list(found)].sum())
            best_by_size[largest] = min(best_by_size[largest], whole_s[batch, n])
            if split < sizes:
                assert len(set(found[:-1])) <= 1
        best_here_s = np.inf
        for largest in range(1, 1 + min(sizes, batch)):
            best_here_s = min(best_here_s, best_by_size[largest])
            best_s = fastest_s(curve.tolist(), batch, largest)
            assert best_s * (1 - 1e-9) <= best_here_s <= best_s * (1 + 2e-9)


@pytest.mark.parametrize("seed", range(6))
def test_beyond_the_measured_sizes_no_split_that_is_left_out_is_faster(seed: int) -> None:
    """Curves are straight lines from there on; each of two phases has its own."""
    rng = np.random.default_rng(seed)
    measured, largest = int(rng.integers(1, 6)), 90
    curves = np.zeros((2, 1 + largest))
    for curve in curves:
        curve[1 : 1 + measured] = np.sort(rng.uniform(1, 2 + measured, measured))
        steps = np.arange(1, 1 + largest - measured)
        curve[1 + measured :] = curve[measured] + rng.uniform(0.5, 2) * steps
    splits, batches = Splits(curves.sum(axis=0), measured, largest), np.arange(1, 1 + largest)
    tried, exist = splits.candidates(batches)
    seconds = splits.seconds(curves, batches, tried)
    for row, batch in enumerate(batches.tolist()):
        kept = [
            (int(splits.largest[tried[row, n]]), *seconds[:, row, n])
            for n in np.flatnonzero(exist[row])
        ]
        for size in range(1, 1 + batch):
            whole, rest = divmod(batch, size)
            alike = whole * curves[:, size] + curves[:, rest]
            assert any(
                m <= size and s <= alike[0] * (1 + 1e-9) and t <= alike[1] * (1 + 1e-9)
                for m, s, t in kept
            ), (batch, size)


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_faster_in_any_curve_than_what_stands_for_all(seed: int) -> None:
    """Few sizes are measured; the lines beyond fall below the origin in half of the curves."""
    rng = np.random.default_rng(seed)
    measured, largest, most = int(rng.integers(1, 5)), int(rng.choice([3, 20, 50])), 60
    first = np.sort(rng.uniform(0.1, 1.0, (2, measured)), axis=1) * np.arange(1, 1 + measured)
    slopes = first[:, -1:] / measured * np.array([[0.8], [1.3]])
    beyond = first[:, -1:] + slopes * np.arange(1, largest)
    curves = np.concatenate((np.zeros((2, 1)), first, beyond), axis=1)[:, : 1 + largest]
    splits, batches = LeastSplits(measured), np.arange(1 + most)
    tried, exist = splits.candidates(batches)
    assert exist[:, 0].tolist() == [False, *[True] * most]
    seconds = splits.seconds(curves, batches, tried)[:, :, 0]
    for curve, least in zip(curves.tolist(), seconds.tolist(), strict=True):
        for batch in range(1 + most):
            best_s = fastest_s(curve, batch, largest)
            assert least[batch] <= best_s
            assert least[batch] >= 0.7 * best_s


def test_what_stands_for_all_splits_holds_for_more_samples_than_are_tried() -> None:
    curves = np.array([[0.0, 1.0, 1.9, 2.8]])
    batches = np.array([MAX_BATCH, MAX_BATCH + 1, 3 * MAX_BATCH])
    tried, _ = LeastSplits(3).candidates(batches)
    [least] = LeastSplits(3).seconds(curves, batches, tried)[:, :, 0]
    assert (least <= batches // 3 * 2.8 + curves[0, batches % 3]).all()
    assert least == pytest.approx(batches * (2.8 / 3), rel=1e-3)
