"""Ranks of pipelines that are late by chance: every step ends, with the same bits."""

import random
import time

import pytest
import torch
from torch import Tensor

from shardhet import HetFSDP
from tests.selection import one_in
from tests.test_bytes_of_stages import drawn_plan
from tests.test_pipelines import UNITS, Leaky, batch_of
from tests.worlds import run_ranks

NUM_SCHEDULES, CASES_OF_A_WORLD = 200, 4
DELAYS_S = (0, 0, 0.001, 0.01)


def _run(rank: int, world_size: int, block: int) -> None:
    """Schedules of a block; each rank is late at other places in each step."""
    for number in range(block * CASES_OF_A_WORLD, (block + 1) * CASES_OF_A_WORLD):
        plan = drawn_plan(random.Random(f"plan {number}"), world_size)
        torch.manual_seed(0)
        model = HetFSDP(Leaky("late"), plan, units=UNITS)
        late = random.Random(f"{number}/{rank}")
        for block_of_model in model.module.blocks:  # type: ignore[union-attr]
            block_of_model.spring = lambda _: time.sleep(late.choice(DELAYS_S))  # noqa: B023
        inputs, targets = batch_of(plan.global_batch_size)
        mine = plan.sample_indices(model.position)
        found: list[list[Tensor]] = []
        for _ in range(2):
            time.sleep(late.choice(DELAYS_S))
            model.forward_backward(inputs[mine], targets[mine])
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found)), plan


@pytest.mark.parametrize("block", one_in(50, range(NUM_SCHEDULES // CASES_OF_A_WORLD)))
def test_ranks_that_are_late_by_chance_end_with_the_same_bits(block: int) -> None:
    world_size = 2 + block % 4
    run_ranks(_run, world_size, world_size, block, timeout_s=200.0)
