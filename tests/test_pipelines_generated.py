"""Drawn steps of pipelines are those of one process, or refused by name."""

import pytest

from tests.parity import check_covered_once
from tests.selection import one_in
from tests.stages_cases import check, draw
from tests.worlds import run_ranks

NUM_CASES = 200


@pytest.mark.parametrize("seed", one_in(200, range(NUM_CASES)))
def test_a_drawn_step_of_a_pipeline_is_the_step_of_one_process(seed: int) -> None:
    case = draw(seed)
    results = run_ranks(
        check, case.world_size, case, fresh_world=case.refused is not None, timeout_s=90.0
    )
    if case.refused is not None:
        assert all(isinstance(each, str) and case.refused in each for each in results), results
        return
    assert not any(isinstance(each, str) for each in results), results
    check_covered_once(results)
