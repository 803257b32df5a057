"""Checkpoints and redistribution of matrices that one rank stores whole, and their states."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from shardhet import Plan, redistribute
from shardhet.checkpoint import CheckpointError, Replicas, load, save
from tests.ordinary import Net
from tests.selection import one_in
from tests.test_whole_matrices import (
    KINDS,
    NUM_CASES,
    TWO,
    Wholes,
    batch_of,
    draw_plan,
    end_step,
    two_optimizers,
)
from tests.worlds import run_ranks


def begin(rank: int, plan: Plan, kind: str, folder: str, in_copies: bool = False) -> None:
    pair = Wholes(plan, kind)
    for step in range(2):
        pair.step(step)
    if not in_copies:
        save(pair.model, pair.mine, folder)
        return
    replicas = Replicas(Path(folder, str(rank)))
    replicas.save(pair.model, pair.mine)
    replicas.wait(pair.model)


def go_on(rank: int, plan: Plan, kind: str, folder: str, in_copies: bool = False) -> None:
    pair = Wholes(plan, kind)
    for step in range(2):
        pair.step_plain(step)
    if in_copies:
        assert Replicas(Path(folder, str(rank))).load_latest(pair.model, pair.mine) is not None
    else:
        load(pair.model, pair.mine, folder)
    pair.same_params(1e-12)
    for step in range(2, 4):
        pair.step(step)
    if in_copies:
        return
    plain = Net()
    optimizers = two_optimizers(plain, kind)
    load(plain, optimizers, folder)  # in one process
    for step in range(2, 4):
        loss_sum, num = plain(**batch_of(step))
        (loss_sum / num).backward()
        end_step(plain, optimizers, None)
    for mine, theirs in zip(plain.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", one_in(5, range(NUM_CASES)))
def test_a_checkpoint_of_owners_loads_under_any_plan_of_owners(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(f"saved {seed}")
    kind, folder = [*KINDS][seed % len(KINDS)], str(tmp_path / "saved")
    plans = [draw_plan(draw, has_stages=draw.random() < 0.3) for _ in range(2)]
    run_ranks(begin, plans[0].world_size, plans[0], kind, folder)
    run_ranks(go_on, plans[1].world_size, plans[1], kind, folder)


@pytest.mark.parametrize("seed", one_in(3, range(len(KINDS))))
def test_owners_go_on_from_replicas_when_a_node_is_lost(seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"replicas {seed}")
    plans, kind = [draw_plan(draw, 3) for _ in range(2)], [*KINDS][seed]
    run_ranks(begin, 3, plans[0], kind, str(tmp_path), True)
    shutil.rmtree(tmp_path / "1")
    run_ranks(go_on, 3, plans[1], kind, str(tmp_path), True)


def move(rank: int, plans: list[Plan], kind: str) -> None:
    pair = Wholes(plans[0], kind)
    steps = iter(range(99))
    for plan in (*plans, plans[0]):
        redistribute(pair.model, pair.mine, plan)
        pair.plan = plan
        for _ in range(2):
            pair.step(next(steps))


@pytest.mark.parametrize("seed", one_in(5, range(NUM_CASES)))
def test_owners_change_between_steps(seed: int) -> None:
    draw = random.Random(f"moved {seed}")
    world_size = draw.randint(1, 4)
    plans = [draw_plan(draw, world_size) for _ in range(3)]
    run_ranks(move, world_size, plans, [*KINDS][seed % len(KINDS)])


def cut(rank: int, kind: str, folder: str) -> None:
    whole, rows = (Plan.by_hand(**TWO, num_rounds=2, whole_matrices=w) for w in (True, False))
    pair = Wholes(whole, kind)
    pair.step(0)
    save(pair.model, pair.mine, folder)
    other = Wholes(rows, kind)
    if kind == "muon":  # its states have the shape of the matrix
        load(other.model, other.mine, folder)
        redistribute(pair.model, pair.mine, rows)
        return
    with pytest.raises(CheckpointError, match="which is cut into rows"):
        load(other.model, other.mine, folder)
    with pytest.raises(CheckpointError, match="which the plan cuts into rows"):
        redistribute(pair.model, pair.mine, rows)
    pair.step(1)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_the_whole_are_not_cut(kind: str, tmp_path: Path) -> None:
    run_ranks(cut, 2, kind, str(tmp_path / "saved"))
