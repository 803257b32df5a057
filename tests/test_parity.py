"""One step under any plan is the step that one process would take on the whole batch."""

import gc
from collections.abc import Callable

import pytest
import torch

from tests.parity import Result, check_covered_once, check_parity
from tests.patchwork import Case, draw_case, draw_rounds
from tests.selection import one_in, only
from tests.worlds import on_ranks, run_ranks

CASES_PER_BLOCK = 2
NUM_BLOCKS_BY_WORLD_SIZE = {1: 25, 2: 60, 3: 45, 4: 30}
BLOCKS = [
    (world_size, block)
    for world_size, num_blocks in NUM_BLOCKS_BY_WORLD_SIZE.items()
    for block in range(num_blocks)
]


def _run_block(
    rank: int, world_size: int, block: int, draw: Callable[..., Case] = draw_case
) -> list[Result]:
    """All cases of a block; a failure says which one it was."""
    results = []
    for i in range(CASES_PER_BLOCK):
        case = draw(block * CASES_PER_BLOCK + i, world_size=world_size)
        try:
            result = check_parity(rank, case.problem, case.plan, case.course)
        except Exception as error:
            error.add_note(str(case))
            raise
        results.append(Result(result.rows, result.shapes, bits=[]))
        gc.collect(1)
    return results


@pytest.mark.parametrize("world_size, block", only([(1, 0), (2, 1), (3, 2), (4, 3)], BLOCKS))
def test_a_step_is_the_step_of_one_process(world_size: int, block: int) -> None:
    results_by_rank = run_ranks(_run_block, world_size, world_size, block)
    for results in zip(*results_by_rank, strict=True):
        check_covered_once(results)


@pytest.mark.parametrize("world_size", only([3], [1, 2, 3, 4]))
@pytest.mark.parametrize("seed", one_in(3, [1000, 1001, 1002]))
@on_ranks()
def test_the_same_run_twice_is_equal_in_every_bit(
    rank: int, world_size: int, seed: int
) -> None:
    case = draw_case(seed, world_size=world_size)
    try:
        first = check_parity(rank, case.problem, case.plan, case.course)
        again = check_parity(rank, case.problem, case.plan, case.course)
    except Exception as error:
        error.add_note(str(case))
        raise
    assert len(first.bits) == len(again.bits)
    for one, other in zip(first.bits, again.bits, strict=True):
        assert torch.equal(one, other), str(case)


@pytest.mark.parametrize(
    "world_size, block",
    one_in(20, [(size, block) for size in (4, 1, 2, 3) for block in range(5)]),
)
def test_a_step_of_several_rounds_is_the_step_of_one_process(
    world_size: int, block: int
) -> None:
    results_by_rank = run_ranks(_run_block, world_size, world_size, block, draw_rounds)
    for results in zip(*results_by_rank, strict=True):
        check_covered_once(results)
