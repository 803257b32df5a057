"""Checkpoints of pipelines go on under plans of any kind, with FSDP2 and in one process."""

import random
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardhet import HetFSDP, Plan, Stage
from shardhet.checkpoint import Replicas, load, save
from tests.checkpoint_cases import (
    BATCH,
    FORMS,
    OPTIMIZERS,
    Case,
    State,
    check_same,
    draw_plan,
    make_optimizer,
    train,
    whole_state,
)
from tests.selection import one_in
from tests.test_checkpoint import BAR, sharded_by_fsdp2, whole_of_fsdp2, world_size_of
from tests.worlds import run_ranks

NUM_CASES = 60
OTHERS = ("flat", "pipeline", "fsdp2", "plain")
CALLED = ("embedding", "blocks.0", "blocks.1", "frozen", "head")
UNITS = (CALLED, CALLED[:3], CALLED[1:3])  # the root has the others
End = Plan | int | None  # ranks of FSDP2; None: a plain module


def draw_pipeline(rng: random.Random) -> Plan:
    """Two stages or three of one to four ranks, perhaps with much on the hosts."""
    units = rng.choice(UNITS)
    number = rng.randint(2, min(3, len(units)))
    cuts = [0, *sorted(rng.sample(range(1, len(units)), number - 1)), len(units)]
    ranks = [1 + (rng.random() < 0.3) for _ in range(number)]
    num_rounds, round_size = rng.choice([(1, BATCH), (2, 3), (3, 2), (2, 4)])
    batches: list[int] = []
    shares: list[float] = []
    for n in ranks:
        first = rng.randint(0, round_size) if n == 2 else round_size
        batches += [first, round_size - first][:n]
        part = rng.choice([0.0, 0.2, 0.7]) if n == 2 else 1.0
        shares += [part, 1 - part][:n]
    recompute = rng.random() < 0.5
    return Plan.by_hand(
        microbatch_sizes=[rng.randint(1, 3) for _ in batches],
        rank_batch_sizes=batches,
        state_shares=shares,
        recompute=recompute,
        inputs_on_host=recompute and rng.random() < 0.5,
        optimizer_on_host=[rng.random() < 0.3 for _ in batches],
        num_rounds=num_rounds,
        global_batch_size=BATCH,
        stages=[
            Stage(units=units[a:b], num_ranks=n)
            for (a, b), n in zip(pairwise(cuts), ranks, strict=True)
        ],
        **rng.choice(FORMS),
    )


@dataclass(frozen=True, kw_only=True)
class Course:
    """Where a model trains, one end after the other."""

    case: Case
    ends: tuple[End, End, End]


def draw(seed: int) -> Course:
    """A pipeline, another end and the pipeline again, or the other way round."""
    rng = random.Random(f"checkpoint of stages {seed}")
    kind = OTHERS[seed % 4]
    first = draw_pipeline(rng)
    other: End = None
    if kind == "flat":
        other = draw_plan(rng)
    elif kind == "pipeline":
        other = draw_pipeline(rng)
    elif kind == "fsdp2":
        other = rng.randint(1, 3)
    # FSDP2 wants a state of every parameter, which plain SGD has not.
    has_fsdp2 = kind == "fsdp2"
    kinds = ["adamw", "sgd", "adam"] if has_fsdp2 else list(OPTIMIZERS)
    case = Case(
        seed=seed,
        optimizer=rng.choice(kinds),
        has_scalar=not has_fsdp2 and rng.random() < 0.7,
        has_unused=not has_fsdp2,
        is_tied=rng.random() < 0.5,
        num_steps=2,
        saved_as=None,
        loaded_as=None,
    )
    ends = (first, other, first) if seed // 4 % 2 == 0 else (other, first, other)
    return Course(case=case, ends=ends)


def go_on(
    rank: int, case: Case, end: End, number: int, folder: Path
) -> tuple[State | None, State | None, list[float]]:
    """What was loaded, what is saved after two steps, and their losses."""
    module = case.module()
    if number:
        with torch.no_grad():
            for each in (*module.parameters(), *module.buffers()):
                each.zero_()
    model = _placed(module, end)
    optimizer = make_optimizer(model, case.optimizer)
    source, target = folder / str(number - 1), folder / str(number)
    loaded = None
    if number and isinstance(end, int):
        _load_into_fsdp2(model, optimizer, source)
        loaded = whole_of_fsdp2(model, optimizer)
    elif number:
        load(model, optimizer, source)
        loaded = whole_state(model, optimizer)
    first = number * case.num_steps
    losses = train(model, optimizer, range(first, first + case.num_steps))
    if isinstance(end, int):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=target)
        saved = whole_of_fsdp2(model, optimizer)
    else:
        save(model, optimizer, target)
        saved = whole_state(model, optimizer)
    return (None, None, losses) if rank else (loaded, saved, losses)


def _placed(module: nn.Module, end: End) -> nn.Module:
    if isinstance(end, int):
        return sharded_by_fsdp2(module, dist.get_world_size())
    if end is None:
        return module
    units = ["blocks.0", "blocks.1"]
    if end.stages is not None:
        units = [fqn for stage in end.stages for fqn in stage.units]
    return HetFSDP(module, end, units=units)


def _load_into_fsdp2(model: nn.Module, optimizer: optim.Optimizer, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    both = {"model": model_state, "optim": optimizer_state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optim"]
    )


@pytest.mark.parametrize("seed", one_in(80, range(NUM_CASES)))
def test_pipelines_save_for_others_and_load_what_they_saved(seed: int, tmp_path: Path) -> None:
    course = draw(seed)
    before, losses = None, list[float]()
    for number, end in enumerate(course.ends):
        [(loaded, saved, own), *_] = run_ranks(
            go_on, world_size_of(end), course.case, end, number, tmp_path
        )
        if before is not None:
            check_same(loaded, before)
        before = saved
        losses += own
    _, _, alone = go_on(0, replace(course.case, num_steps=6), None, 0, tmp_path / "alone")
    assert losses == pytest.approx(alone, rel=BAR, abs=0)


def test_the_cases_drawn_are_of_every_kind() -> None:
    courses = [draw(seed) for seed in range(NUM_CASES)]
    pairs = {tuple(map(_kind_of, course.ends[:2])) for course in courses}
    assert pairs == {
        pair for other in OTHERS for pair in (("pipeline", other), (other, "pipeline"))
    }
    assert {course.case.optimizer for course in courses} == set(OPTIMIZERS)
    plans = [end for c in courses for end in c.ends if isinstance(end, Plan)]
    assert any(rank.optimizer_on_host for plan in plans for rank in plan.ranks)
    assert {len(plan.stages or ()) for plan in plans} == {0, 2, 3}
    in_tests = [draw(seed) for seed in range(0, NUM_CASES, 13)]
    assert {OTHERS[seed % 4] for seed in range(0, NUM_CASES, 13)} == set(OTHERS)
    assert len(in_tests) == 5


def _kind_of(end: End) -> str:
    if isinstance(end, Plan):
        return "flat" if end.stages is None else "pipeline"
    return "plain" if end is None else "fsdp2"


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
KEPT = Case(
    seed=0,
    optimizer="adamw",
    has_scalar=True,
    has_unused=True,
    is_tied=True,
    num_steps=2,
    saved_as=None,
    loaded_as=None,
)


def keep(rank: int, folder: Path) -> tuple[State | None, list[float]]:
    """Replicas of two steps, one node for each stage; the losses after them."""
    model = _placed(KEPT.module(), PIPELINE)
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
    module = KEPT.module()
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.zero_()
    model = _placed(module, plan)
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
