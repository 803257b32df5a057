"""One step under any plan is the step that one process would take on the whole batch.

In one round, in several, in stages; on hosts and on emulated accelerators.  What is drawn and
how it is compared: ``tests.drawn_steps``.
"""

from dataclasses import replace

import pytest

from tests.drawn_cases import draw_case, draw_rounds
from tests.drawn_steps import check, draw_in_rounds, draw_stages
from tests.selection import one_in, only

SEEDS_BY_WORLD_SIZE = {1: 50, 2: 120, 3: 90, 4: 60}
ALL = [(size, seed) for size, number in SEEDS_BY_WORLD_SIZE.items() for seed in range(number)]
FEW = [(1, 0), (2, 2), (2, 3), (3, 4), (3, 5), (4, 6)]


@pytest.mark.parametrize("world_size, seed", only(FEW, ALL))
def test_a_step_is_the_step_of_one_process(world_size: int, seed: int) -> None:
    check(draw_case(seed, world_size=world_size), times=1)


@pytest.mark.parametrize("world_size", only([3], [1, 2, 3, 4]))
@pytest.mark.parametrize("seed", one_in(3, [1000, 1001, 1002]))
def test_the_same_run_twice_is_equal_in_every_bit(world_size: int, seed: int) -> None:
    check(draw_case(seed, world_size=world_size))


@pytest.mark.parametrize(
    "world_size, seed",
    only([(4, 0)], [(size, seed) for size in SEEDS_BY_WORLD_SIZE for seed in range(10)]),
)
def test_a_step_of_several_rounds_is_the_step_of_one_process(
    world_size: int, seed: int
) -> None:
    check(draw_rounds(seed, world_size=world_size), times=1)


@pytest.mark.parametrize("seed", one_in(4, range(12)))
def test_a_step_in_rounds_in_any_precision_is_repeated(seed: int) -> None:
    check(draw_in_rounds(seed))


@pytest.mark.parametrize("seed", one_in(6, range(6)))
def test_autocast_errs_no_more_than_plain_pytorch_does(seed: int) -> None:
    check(replace(draw_in_rounds(seed), precision="autocast"), times=1)


@pytest.mark.parametrize(
    "on_accelerators, seed",
    only(
        [(False, 0), (True, 120)], [(on, seed) for on in (False, True) for seed in range(200)]
    ),
)
def test_a_step_of_a_pipeline_is_the_step_of_one_process(
    on_accelerators: bool, seed: int
) -> None:
    check(draw_stages(seed), on_accelerators=on_accelerators)
