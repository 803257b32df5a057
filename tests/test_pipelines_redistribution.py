"""Rows that move among running ranks between plans with stages, other stages, and none."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from shardhet import HetFSDP, Plan, Stage, redistribute
from shardhet.checkpoint import CheckpointError, load, save
from tests.checkpoint_cases import (
    OPTIMIZERS,
    Odd,
    check_same,
    draw_plan,
    make_optimizer,
    train,
    whole_state,
)
from tests.selection import one_in
from tests.test_pipelines_checkpoints import CALLED, draw_pipeline
from tests.worlds import on_ranks, run_ranks

NUM_CASES = 40
NEXT_STEPS = 2


def draw_plans(seed: int) -> list[Plan]:
    """Three plans of as many ranks; of two that follow each other one has stages at least."""
    rng = random.Random(f"stages that move {seed}")
    kinds = rng.choice([("pipe", "flat", "pipe"), ("flat", "pipe", "flat"), ("pipe",) * 3])
    first = draw_pipeline(rng)
    units = sum((stage.units for stage in first.stages or ()), ())
    plans: list[Plan] = []
    for kind in kinds:
        if kind == "flat":
            plans.append(draw_plan(rng, first.world_size))
            continue
        found = first
        while plans or found is not first:
            found = draw_pipeline(rng)
            same = sum((stage.units for stage in found.stages or ()), ()) == units
            if same and found.world_size == first.world_size:
                break
        plans.append(found)
    return plans


def units_of(plans: list[Plan]) -> list[str]:
    [stages, *_] = [plan.stages for plan in plans if plan.stages is not None]
    return [fqn for stage in stages for fqn in stage.units]


def made(seed: int, plans: list[Plan], plan: Plan, *, empty: bool = False) -> HetFSDP:
    torch.manual_seed(seed)
    is_tied = seed % 2 == 0 and len(units_of(plans)) < len(CALLED)  # else units differ
    module = Odd(has_scalar=seed % 3 != 0, is_tied=is_tied).double()
    if empty:
        with torch.no_grad():
            for each in (*module.parameters(), *module.buffers()):
                each.zero_()
    return HetFSDP(module, plan, units=units_of(plans))


def compare(rank: int, seed: int, plans: list[Plan], folder: str) -> None:
    """One job moves from plan to plan, the other saves and loads."""
    kind = list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    moved = made(seed, plans, plans[0])
    optimizer = make_optimizer(moved, kind)
    num_steps = seed % 3
    train(moved, optimizer, range(num_steps))
    seen: list[str] = []
    moved.add_observer(lambda each: seen.append(each.unit))
    params = list(moved.parameters())
    for number, plan in enumerate(plans[1:]):
        save(moved, optimizer, f"{folder}/{number}")
        redistribute(moved, optimizer, plan)
        assert [id(p) for p in moved.parameters()] == [id(p) for p in params]
        resumed = made(seed, plans, plan, empty=True)
        resumed_optimizer = make_optimizer(resumed, kind)
        load(resumed, resumed_optimizer, f"{folder}/{number}")
        assert moved.plan == resumed.plan
        assert moved.step == resumed.step
        for mine, theirs in zip(moved.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(mine, theirs)  # this rank's rows, too
        check_same(whole_state(moved, optimizer), whole_state(resumed, resumed_optimizer))
        steps = range(num_steps, num_steps + NEXT_STEPS)
        num_steps += NEXT_STEPS
        seen.clear()
        losses = train(moved, optimizer, steps)
        assert seen
        assert losses == train(resumed, resumed_optimizer, steps)  # bit by bit
        check_same(whole_state(moved, optimizer), whole_state(resumed, resumed_optimizer))


@pytest.mark.parametrize("seed", one_in(40, range(NUM_CASES)))
def test_a_moved_pipeline_is_one_that_was_resumed(seed: int, tmp_path: Path) -> None:
    plans = draw_plans(seed)
    run_ranks(compare, plans[0].world_size, seed, plans, str(tmp_path))


def pipeline_of(*stages: tuple[str, ...]) -> Plan:
    """A rank each."""
    return Plan.by_hand(
        microbatch_sizes=[6 for _ in stages],
        stages=[Stage(units=units, num_ranks=1) for units in stages],
    )


@on_ranks(2)
def test_what_cannot_move_is_refused_by_name(rank: int) -> None:
    torch.manual_seed(0)
    units = ["embedding", "blocks.0", "blocks.1", "head"]
    flat = Plan.even(2, microbatch_size=3)
    pipeline = pipeline_of(("embedding", "blocks.*"), ("head",))
    tied = HetFSDP(Odd(is_tied=True).double(), flat, units=units)
    with pytest.raises(CheckpointError, match="units embedding, head share"):
        redistribute(tied, None, pipeline)
    staged = HetFSDP(Odd(is_tied=True).double(), pipeline, units=units)
    with pytest.raises(CheckpointError, match="units embedding, head share"):
        redistribute(staged, None, flat)
    apart = Odd(is_tied=False).double()
    model = HetFSDP(apart, flat, units=units)
    with pytest.raises(CheckpointError, match=r"stages\[1\] names 'tail'"):
        redistribute(model, None, pipeline_of(("embedding", "blocks.*"), ("head", "tail")))
    before = whole_state(model, make_optimizer(model, "adamw"))
    redistribute(model, None, pipeline)
    check_same(whole_state(model, make_optimizer(model, "adamw")), before)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    normed = HetFSDP(module, flat, units=["0", "2"])
    with pytest.raises(CheckpointError, match="the model has batch norm"):
        redistribute(normed, None, pipeline_of(("0",), ("2",)))
