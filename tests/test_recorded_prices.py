"""What steps are predicted and simulated to take and to hold is what was recorded."""

from dataclasses import astuple

import pytest

from tests.recorded_prices import SEEDS, record_of, recorded
from tests.selection import one_in


@pytest.mark.parametrize("stride", one_in(2, [4, 1]))
def test_prices_are_those_that_were_recorded(stride: int) -> None:
    """Of 400; ``python -m tests.recorded_prices`` writes all anew.

    A simulated step takes about what is predicted, and no rank holds more.
    """
    before = [*recorded()]
    assert [each.seed for each in before] == list(SEEDS)
    for each in before[::stride]:
        found = record_of(each.seed)
        assert astuple(found) == pytest.approx(astuple(each), rel=1e-9, abs=1e-15), found
        assert 0.8 < found.simulated_s / found.step_time_s < 1.6, found
        assert found.fullest <= 1 + 1e-9, found
