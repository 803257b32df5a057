"""Checkpoints of pipelines go on under plans of any kind, with FSDP2 and in one process."""

import shutil
from pathlib import Path

import pytest

from shardhet import Plan, Stage
from shardhet.checkpoint import Replicas
from tests.checkpoint_cases import (
    BAR,
    CALLED,
    Case,
    State,
    check_ends,
    check_same,
    draw_stages,
    make_optimizer,
    placed,
    train,
    whole_state,
)
from tests.selection import one_in
from tests.worlds import run_ranks

NUM_CASES = 60


@pytest.mark.parametrize("seed", one_in(80, range(NUM_CASES)))
def test_pipelines_save_for_others_and_load_what_they_saved(seed: int, tmp_path: Path) -> None:
    check_ends(draw_stages(seed), tmp_path)


PIPELINE = Plan.by_hand(
    microbatch_sizes=[2, 1, 3],
    state_shares=[0.7, 0.3, 1],
    num_rounds=2,
    stages=[Stage(units=CALLED[:3], num_ranks=2), Stage(units=CALLED[3:], num_ranks=1)],
)
BACK = Plan.by_hand(
    microbatch_sizes=[3, 1, 2],
    num_rounds=2,
    stages=[Stage(units=CALLED[:1], num_ranks=1), Stage(units=CALLED[1:], num_ranks=2)],
)
KEPT = Case()


def keep(rank: int, folder: Path) -> tuple[State | None, list[float]]:
    """Replicas of two steps, one node for each stage; the losses after them."""
    model = placed(KEPT.module(), PIPELINE)
    optimizer = make_optimizer(model, KEPT.optimizer)
    replicas = Replicas(folder / f"node{rank // 2}")
    for step in range(2):
        train(model, optimizer, [step])
        replicas.save(model, optimizer)
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, range(2, 4))  # while copies are on their way
    replicas.wait(model)
    return (None if rank else state), losses


def take_up(rank: int, plan: Plan, folder: Path) -> tuple[State | None, list[float]]:
    """What the node that is left gives to ranks under another plan."""
    model = placed(KEPT.module(empty=True), plan)
    optimizer = make_optimizer(model, KEPT.optimizer)
    found = Replicas(folder / f"node{rank}").load_latest(model, optimizer)
    assert found is not None
    assert found.step == model.step == 2
    state = whole_state(model, optimizer)
    return (None if rank else state), train(model, optimizer, range(2, 4))


def test_the_loss_of_the_node_of_a_stage_loses_no_step(tmp_path: Path) -> None:
    [(saved, losses), *_] = run_ranks(keep, PIPELINE.world_size, tmp_path)
    shutil.rmtree(tmp_path / "node1")
    for plan in (Plan.even(2, microbatch_size=3), BACK):
        folder = tmp_path / str(plan.world_size)
        shutil.copytree(tmp_path / "node0", folder / "node0")
        [(loaded, after), *_] = run_ranks(take_up, plan.world_size, plan, folder)
        check_same(loaded, saved)
        assert after == pytest.approx(losses, rel=BAR, abs=0)
