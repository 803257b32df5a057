"""Rows that move among running ranks: the state and the steps of a job that was resumed.

SHARDHET_REDISTRIBUTION_CASES=600 draws more cases than the ordinary sixty.
"""

import os
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardhet import DeviceSpec, Plan, redistribute
from shardhet.checkpoint import CheckpointError
from shardhet.records.plan import PlannedUnit
from tests.checkpoint_cases import (
    OPTIMIZERS,
    Case,
    Odd,
    Together,
    batch_of,
    check_same,
    compare_moved,
    draw_plan,
    make_optimizer,
    train,
    whole_state,
    wrap,
)
from tests.hosts import on_different_hosts
from tests.selection import one_in
from tests.worlds import on_ranks, run_ranks, run_ranks_expecting_failure

NUM_CASES = int(os.environ.get("SHARDHET_REDISTRIBUTION_CASES", "60"))


def make(seed: int) -> Odd:
    torch.manual_seed(seed)
    return Odd(has_scalar=seed % 3 != 0, is_tied=seed % 2 == 0).double()


@pytest.mark.parametrize("first", one_in(12, range(0, NUM_CASES, 5)))
def test_a_moved_job_is_one_that_was_resumed(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 5):
        rng, kinds = random.Random(f"redistribution {seed}"), list(OPTIMIZERS)
        world_size = rng.randint(1, 4)
        plans = tuple(draw_plan(rng, world_size) for _ in range(2 if seed % 5 else 3))
        case = Case(
            seed=seed,
            optimizer=kinds[seed % len(kinds)],
            has_scalar=seed % 3 != 0,
            is_tied=seed % 2 == 0,
            ends=plans,
            steps=(seed // len(kinds) % 3, 3, 3),
        )
        run_ranks(compare_moved, world_size, case, tmp_path / str(seed))


@on_ranks(2)
def test_what_cannot_move_is_refused_by_name_on_all_ranks_and_nothing_changes(
    rank: int,
) -> None:
    rng = random.Random(0)
    plan, other = draw_plan(rng, 2, has_rounds=False), draw_plan(rng, 2)
    model = wrap(make(1), plan)
    optimizer = make_optimizer(model, "adamw")
    before = whole_state(model, optimizer)

    def refuses(match: str, new: Plan = other, optimizer: Any = optimizer) -> None:
        with pytest.raises(CheckpointError, match=match):
            redistribute(model, optimizer, new)
        assert model.plan.ranks == plan.ranks

    refuses("it is for 3 devices but 2 ranks are running", draw_plan(rng, 3))
    named = [replace(each, device=DeviceSpec(kind="L4")) for each in other.ranks]
    refuses("position 0 is for L4", replace(other, ranks=tuple(named)))
    units = (PlannedUnit(fqn="blocks.7", numel=3),)
    refuses("made for another model", replace(other, units=units))
    refuses("ranks pass different ones", other if rank else draw_plan(rng, 2))
    stranger = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    refuses("is not one of the model's", optimizer=stranger)
    check_same(whole_state(model, optimizer), before)
    batch = batch_of(0)
    first = plan.first_sample(rank)
    mine = {k: v[first : first + plan.ranks[rank].rank_batch_size] for k, v in batch.items()}
    output = model(**mine)
    refuses("a step is in progress")
    model.backward(*output)
    refuses("gradients: .* have one, which would not move")
    optimizer.step()
    optimizer.zero_grad()
    redistribute(model, optimizer, other)
    assert model.plan.ranks == other.ranks


def two_of(model: nn.Module) -> Together:
    """Two optimizers, each of every other parameter."""
    params = list(model.parameters())
    return Together(
        torch.optim.AdamW(params[::2], lr=1e-2),
        torch.optim.SGD(params[1::2], lr=1e-2, momentum=0.9),
    )


def move_two_optimizers(rank: int, forgets: bool) -> None:
    rng = random.Random(6)
    plain, model = make(1), wrap(make(1), draw_plan(rng, 2))
    optimizers: list[Any] = [two_of(plain), two_of(model)]
    for i in range(2):
        train(plain, optimizers[0], range(i, i + 1))
        train(model, optimizers[1], range(i, i + 1))
        redistribute(model, optimizers[1].each[: 1 if forgets else 2], draw_plan(rng, 2))
    train(plain, optimizers[0], range(2, 4))
    train(model, optimizers[1], range(2, 4))
    found, expected = model.state_dict(), plain.state_dict()
    for fqn in found:
        torch.testing.assert_close(found[fqn], expected[fqn], rtol=1e-9, atol=1e-9)


def test_the_states_of_two_optimizers_move() -> None:
    run_ranks(move_two_optimizers, 2, False)


def test_an_optimizer_that_was_left_behind_is_refused_at_its_step() -> None:
    outcomes = run_ranks_expecting_failure(move_two_optimizers, 2, True)
    assert any("SGD: its momentum_buffer has shape" in each.message for each in outcomes)
    assert any("redistribute(model, [one, other], plan)" in each.message for each in outcomes)


@pytest.mark.parametrize("apart", [False, True])
@on_ranks(3)
def test_rows_move_within_and_between_hosts_whatever_they_are_gathered_in(
    rank: int, apart: bool
) -> None:
    """Gathered in bfloat16, stored in float32, without an optimizer, and back again."""
    rng = random.Random(3)
    plans = [draw_plan(rng, 3) for _ in range(3)]
    with on_different_hosts() if apart else nullcontext():
        model = wrap(make(1).float(), plans[0], param_dtype=torch.bfloat16)
        before = {fqn: each.clone() for fqn, each in model.state_dict().items()}
        for plan in (*plans[1:], plans[0]):
            redistribute(model, None, plan)
            after = model.state_dict()
            assert before.keys() == after.keys()
            assert all(torch.equal(before[fqn], after[fqn]) for fqn in before)
