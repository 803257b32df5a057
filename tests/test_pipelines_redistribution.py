"""Rows that move among running ranks between plans with stages, other stages, and none."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from shardhet import HetFSDP, Plan, Stage, redistribute
from shardhet.checkpoint import CheckpointError
from tests.checkpoint_cases import (
    CALLED,
    OPTIMIZERS,
    Case,
    Odd,
    check_same,
    compare_moved,
    draw_pipeline,
    draw_plan,
    make_optimizer,
    units_of,
    whole_state,
)
from tests.selection import one_in
from tests.worlds import on_ranks, run_ranks

NUM_CASES = 40


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


@pytest.mark.parametrize("seed", one_in(40, range(NUM_CASES)))
def test_a_moved_pipeline_is_one_that_was_resumed(seed: int, tmp_path: Path) -> None:
    plans, kinds = draw_plans(seed), list(OPTIMIZERS)
    case = Case(
        seed=seed,
        optimizer=kinds[seed % len(kinds)],
        has_scalar=seed % 3 != 0,
        is_tied=seed % 2 == 0 and len(units_of(*plans)) < len(CALLED),  # else units differ
        ends=tuple(plans),
        steps=(seed % 3, 2, 2),
    )
    run_ranks(compare_moved, plans[0].world_size, case, tmp_path)


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
