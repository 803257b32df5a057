"""Checkpoints written under one plan and read under another, or without one.

SHARDHET_CHECKPOINT_CASES=150 draws more cases than the ordinary thirty.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardhet import HetFSDP, Plan
from shardhet.checkpoint import CheckpointError, load, save
from tests.checkpoint_cases import (
    OPTIMIZERS,
    Case,
    State,
    check_same,
    draw_case,
    groups_of,
    make_optimizer,
    train,
    whole_state,
    wrap,
)
from tests.selection import one_in
from tests.worlds import run_ranks

NUM_CASES = int(os.environ.get("SHARDHET_CHECKPOINT_CASES", "30"))
NEXT_STEPS = 3
BAR = 1e-9  # of losses, relative: other plans add in another order


def sharded_by_fsdp2(module: nn.Module, world_size: int) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    return module


def save_under(rank: int, case: Case, folder: str) -> tuple[State | None, list[float]]:
    """The state that was saved, and the losses of the next steps."""
    module = case.module()
    plan = case.saved_as
    if isinstance(plan, int):
        return save_with_fsdp2(case, folder)
    model = module if plan is None else wrap(module, plan)
    optimizer = make_optimizer(model, case.optimizer)
    train(model, optimizer, range(case.num_steps))
    save(model, optimizer, folder, extra={"seed": case.seed})
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, next_steps(case))
    return (state if rank == 0 else None), losses


def load_under(rank: int, case: Case, folder: str) -> tuple[State | None, list[float]]:
    module = case.module()
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.zero_()
    plan = case.loaded_as
    if isinstance(plan, int):
        return load_with_fsdp2(case, module, folder)
    model = module if plan is None else wrap(module, plan)
    optimizer = make_optimizer(model, case.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 100.0
    extra = load(model, optimizer, folder)
    assert extra == (None if isinstance(case.saved_as, int) else {"seed": case.seed})
    if isinstance(model, HetFSDP) and isinstance(case.saved_as, Plan):
        assert model.step == case.num_steps
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, next_steps(case))
    return (state if rank == 0 else None), losses


def next_steps(case: Case) -> range:
    return range(case.num_steps, case.num_steps + NEXT_STEPS)


def whole_of_fsdp2(module: nn.Module, optimizer: optim.Optimizer) -> State:
    """Under the names of ``whole_state``."""
    state: State = {}
    names = {param: fqn for fqn, param in module.named_parameters()}
    for param, fqn in names.items():
        state[fqn] = param.full_tensor().detach().clone()
        for name, value in optimizer.state.get(param, {}).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{fqn}/{name}"] = whole.clone()
    state |= {fqn: buffer.clone() for fqn, buffer in module.named_buffers()}
    return state | groups_of(optimizer, names)


def save_with_fsdp2(case: Case, folder: str) -> tuple[State, list[float]]:
    module = sharded_by_fsdp2(case.module(), dist.get_world_size())
    optimizer = make_optimizer(module, case.optimizer)
    train(module, optimizer, range(case.num_steps))
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    state = whole_of_fsdp2(module, optimizer)
    losses = train(module, optimizer, next_steps(case))
    return state, losses


def load_with_fsdp2(case: Case, module: nn.Module, folder: str) -> tuple[State, list[float]]:
    sharded_by_fsdp2(module, dist.get_world_size())
    optimizer = make_optimizer(module, case.optimizer)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    both = {"model": model_state, "optim": optimizer_state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(
        module,
        optimizer,
        model_state_dict=both["model"],
        optim_state_dict=both["optim"],
    )
    state = whole_of_fsdp2(module, optimizer)
    losses = train(module, optimizer, next_steps(case))
    return state, losses


def refuse_dtensors(rank: int, folder: Path) -> None:
    module = sharded_by_fsdp2(nn.Linear(4, 4), 2)
    with pytest.raises(CheckpointError, match=r"Save and load .* torch.distributed"):
        save(module, None, folder / "saved")


def test_a_model_of_fsdp2_is_left_to_torch(tmp_path: Path) -> None:
    run_ranks(refuse_dtensors, 2, tmp_path)
    with pytest.raises(CheckpointError, match="on the meta device"):
        save(nn.Linear(2, 2, device="meta"), None, tmp_path / "saved")


def world_size_of(end: Plan | int | None) -> int:
    return 1 if end is None else end if isinstance(end, int) else end.world_size


@pytest.mark.parametrize("seed", one_in(16, range(NUM_CASES)))
def test_any_plan_loads_what_any_other_saved(seed: int, tmp_path: Path) -> None:
    case = draw_case(seed)
    folder = str(tmp_path / "saved")
    [(saved, expected), *_] = run_ranks(save_under, world_size_of(case.saved_as), case, folder)
    [(loaded, losses), *_] = run_ranks(load_under, world_size_of(case.loaded_as), case, folder)
    check_same(loaded, saved)
    assert losses == pytest.approx(expected, rel=BAR, abs=0)


def test_the_cases_drawn_are_of_every_kind() -> None:
    cases = [draw_case(seed) for seed in range(30)]
    kinds = [(kind_of(case.saved_as), kind_of(case.loaded_as)) for case in cases]
    for other in ("plain", "fsdp2"):
        assert ("plan", other) in kinds
        assert (other, "plan") in kinds
    assert sum(kind != ("plan", "plan") for kind in kinds) == 10
    ends = [end for case in cases for end in (case.saved_as, case.loaded_as)]
    plans = [end for end in ends if isinstance(end, Plan)]
    assert {plan.world_size for plan in plans} == {1, 2, 3, 4}
    assert any(0.0 in plan.state_shares for plan in plans)
    assert {case.optimizer for case in cases} == set(OPTIMIZERS)


def kind_of(end: Plan | int | None) -> str:
    return "plain" if end is None else "fsdp2" if isinstance(end, int) else "plan"
