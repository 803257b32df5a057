"""No tensor outlives its step in a cycle of references, which only a collection would end.

Between two collections such tensors take memory that no plan has priced.
"""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from shardhet import Plan, Stage
from shardhet.comm.liveness.heartbeat import activity_of, stack_of
from shardhet.fsdp import HetFSDP
from tests.edge_plans import IN_ROUNDS, UNEVEN
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


@pytest.mark.parametrize(
    "plan", [UNEVEN, IN_ROUNDS, STAGES], ids=["uneven", "rounds", "stages"]
)
@on_ranks(lambda plan: plan.world_size)
def test_a_model_that_is_dropped_is_free(rank: int, plan: Plan) -> None:
    """Also if its last step has left a loss whose graph would lead back to it."""

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).square().sum(), torch.tensor(len(output))

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
