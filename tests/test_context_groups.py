"""Devices that compute the same samples, each its part of the tokens."""

import pytest

from tests.context_cases import Case
from tests.worlds import on_ranks


@pytest.mark.parametrize("seed", range(6))
@on_ranks(3)
def test_steps_are_those_of_one_process(rank: int, seed: int) -> None:
    Case.drawn(seed, 3).run()
