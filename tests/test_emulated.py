"""On an emulated accelerator with NCCL's rules: right, in order, and what the plan says is sent."""

import copy
import gc

import pytest
import torch
from torch import Tensor

from tests.emulated.accelerator import Accelerator
from tests.parity import (
    LOSS_BAR,
    PARAM_BAR,
    Batch,
    compare_grads,
    compare_params,
    compare_state_dicts,
    make_optimizer,
    part_of,
    train_step,
    whole_step,
    wrap,
    microbatched_step,
    _unit_by_param,
)
from tests.patchwork import Case, draw_case
from tests.worlds import run_ranks

CASES_PER_BLOCK = 8
NUM_BLOCKS_BY_WORLD_SIZE = {1: 1, 2: 3, 3: 3, 4: 2}
BLOCKS = [
    (world_size, block)
    for world_size, num_blocks in NUM_BLOCKS_BY_WORLD_SIZE.items()
    for block in range(num_blocks)
]
FIRST_SEED = 5000  # other cases than those of test_parity


def on_device(batch: Batch, device: torch.device) -> Batch:
    return {name: each.to(device) for name, each in batch.items()}


def check_on_accelerator(rank: int, case: Case) -> Accelerator:
    """Train beside one process that has no accelerator."""
    problem, plan, course = case.problem, case.plan, case.course
    torch.manual_seed(11)
    reference = problem.make_module()
    unit_by_fqn = _unit_by_param(reference, problem)
    accelerator = Accelerator()
    with accelerator.installed():
        options = {**problem.options, "device": accelerator.device}
        from dataclasses import replace

        there = replace(problem, options=options)
        model = wrap(copy.deepcopy(reference), there, plan, course, rank)
        optimizer = make_optimizer(model, course.optimizer)
    of_reference = make_optimizer(reference, course.optimizer)
    for step, sizes in enumerate(course.rank_batch_sizes):
        batch = problem.make_batch(sum(sizes))
        if step % course.steps_between_zero_grad == 0:
            optimizer.zero_grad()
            of_reference.zero_grad()
        with accelerator.installed():
            mine = on_device(part_of(batch, sizes, model.position), accelerator.device)
            mean = train_step(model, there, mine, course)
        if course.has_dropout:
            expected = microbatched_step(reference, problem, plan, batch, sizes, step=step)
        else:
            expected = whole_step(reference, problem, batch)
        assert mean is not None
        assert abs(mean - expected) <= LOSS_BAR * abs(expected), f"loss {mean} for {expected}"
        compare_grads(model, reference, unit_by_fqn, where=f"step {step}")
        if (step + 1) % course.steps_between_zero_grad == 0:
            of_reference.step()
            with accelerator.installed():
                optimizer.step()
        bar = PARAM_BAR[course.optimizer]
        compare_params(model, reference, bar=bar, where=f"after step {step}")
    with accelerator.installed():
        found = model.state_dict()
    return accelerator


def _run_block(rank: int, world_size: int, block: int) -> None:
    for i in range(CASES_PER_BLOCK):
        case = draw_case(FIRST_SEED + block * CASES_PER_BLOCK + i, world_size=world_size)
        try:
            check_on_accelerator(rank, case)
        except Exception as error:
            error.add_note(str(case))
            raise
        gc.collect(1)


@pytest.mark.parametrize("world_size, block", BLOCKS)
def test_a_step_on_an_accelerator_is_the_step_of_one_process(
    world_size: int, block: int
) -> None:
    run_ranks(_run_block, world_size, world_size, block)
