"""No tensor outlives its step in a cycle of references, which only a collection would end.

Between two collections such tensors take memory that no plan has priced.
"""

import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardhet import Plan, Stage
from shardhet.comm.liveness.heartbeat import activity_of, stack_of
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.probing import known_calls
from tests.edge_plans import APART, IN_ROUNDS, UNEVEN
from tests.small_models import Chain
from tests.test_trainer import PLANS
from tests.worlds import on_ranks, run_ranks

WIDTH = 24
STAGES = Plan.by_hand(
    microbatch_sizes=[1, 1],
    num_rounds=2,
    stages=[Stage(units=(str(i),), num_ranks=1) for i in range(2)],
)


@pytest.mark.parametrize("name", ["one rank", "four ranks, all unlike"])
def test_steps_leave_no_tensor_in_a_cycle(name: str) -> None:
    plan = PLANS[name]
    assert run_ranks(_tensors_in_cycles, len(plan.ranks), name) == [[]] * len(plan.ranks)


def _tensors_in_cycles(rank: int, name: str) -> list[str]:
    plan = PLANS[name]
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    model = HetFSDP(Chain(*layers, act=torch.relu), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    my_batch_size = plan.ranks[model.position].rank_batch_size
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(2):
            model.backward(*model(torch.randn(my_batch_size, WIDTH)))
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return [str(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), torch.tensor(len(output))


@pytest.mark.parametrize(
    "plan", [UNEVEN, IN_ROUNDS, STAGES], ids=["uneven", "rounds", "stages"]
)
@on_ranks(lambda plan: plan.world_size)
def test_a_model_that_is_dropped_is_free(rank: int, plan: Plan) -> None:
    """Also if its last step has left a loss whose graph would lead back to it."""

    def train() -> list[weakref.ref[nn.Module]]:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model = HetFSDP(module, plan, units=[nn.Linear], loss_fn=loss_fn)
        mine = list(plan.sample_indices(model.position))
        x = torch.randn(plan.global_batch_size, WIDTH)[mine]
        model.forward_backward(x, loss_inputs=x)
        torch.optim.Adam(model.parameters()).step()
        return [weakref.ref(each) for each in (module, model)]

    kept = train()
    gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.parametrize("plan", [APART, STAGES], ids=["apart", "stages"])
@on_ranks()
def test_what_was_found_with_hooks_that_are_gone_is_dropped(rank: int, plan: Plan) -> None:
    """Also if one rank alone has them, and with calls of another kind in between."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = HetFSDP(module, plan, units=[nn.Linear], loss_fn=loss_fn)
    x = torch.randn(plan.global_batch_size, WIDTH)[list(plan.sample_indices(model.position))]
    most = 0
    with mock.patch.object(known_calls, "MOST_UNUSED", 4):
        model._runtime.known._most = 4
        for i in range(16):
            if rank == 0 or i % 3 == 0:
                hook = module[0].register_forward_hook(lambda *_: None)
            model.forward_backward(x, loss_inputs=x)
            with torch.no_grad():
                model(x)
            if rank == 0 or i % 3 == 0:
                hook.remove()
            most = max(most, len(model._runtime.known._findings))
    assert most <= 12


def test_looking_at_a_thread_keeps_nothing_of_it() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def train() -> None:
        held = torch.ones(3)
        kept.append(weakref.ref(held))
        ready.set()
        go_on.wait()

    ready, go_on = threading.Event(), threading.Event()
    gc.disable()
    try:
        thread = threading.Thread(target=train)
        thread.start()
        ready.wait()
        ids = frozenset({thread.ident or 0})
        assert activity_of(ids).where.startswith(__file__)
        assert "go_on.wait()" in stack_of(ids)
        go_on.set()
        thread.join()
        assert kept[0]() is None
    finally:
        gc.enable()
