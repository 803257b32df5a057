"""Drawn steps of several rounds are those of one process."""

import pytest

from tests.parity import check_covered_once
from tests.rounds_cases import check, draw, excess
from tests.selection import one_in
from tests.test_parity_low_precision import ALLOWED_FACTOR
from tests.worlds import run_ranks

NUM_CASES = 12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", one_in(4, range(NUM_CASES)))
def test_a_drawn_step_in_rounds_is_the_step_of_one_process(seed: int) -> None:
    case = draw(seed)
    reports = run_ranks(check, case.world_size, case)
    if case.is_exact:
        check_covered_once([report.covers for report in reports])
    else:
        assert excess(reports) <= ALLOWED_FACTOR, case.case
