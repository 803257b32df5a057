"""What is alive in each turn, and that no moment that may be the fullest is left out."""

import random

import numpy as np
import pytest

from shardhet.pricing.step_cost import Moments


@pytest.mark.parametrize("seed", range(20))
def test_the_fullest_moments_are_kept(seed: int) -> None:
    draw = random.Random(f"moments {seed}")
    number = draw.randint(1, 40)

    def some(most: int) -> np.ndarray:
        """Values in runs that rise or fall by the same steps."""
        values, value, step = [], draw.randint(0, most), 0
        for _ in range(number):
            if draw.random() < 0.2:
                value, step = draw.randint(0, most), draw.randint(-2, 2)
            value = max(0, value + step)
            values.append(float(value))
        return np.array(values)

    moments = Moments(
        unsharded_bytes=some(9),
        grad_bytes=some(9),
        input_bytes=some(9),
        graph_bytes=some(9),
        numel_bytes=1 + some(9),
        pending_bytes=some(3),
        runs=tuple(sorted(draw.choice([-1, 0, 1]) for _ in range(number))),
    )
    running = np.array([draw.randint(0, 9), draw.randint(0, 9), 0.0])
    fullest = moments.fullest()
    assert 0 < len(fullest.runs) <= number

    def most(of: Moments, batch: int, stored: int) -> float:
        own = of.fixed_bytes + running[list(of.runs)] + batch * of.sample_bytes
        return float((own + stored * of.numel_bytes).max())

    for batch, stored in ((0, 0), (1, 0), (0, 1), (3, 1), (1, 3), (50, 7), (7, 50)):
        assert most(fullest, batch, stored) == pytest.approx(most(moments, batch, stored))
