"""What is sent and received is waited for: nothing is let go, or read, that is in flight."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardhet
from shardhet import HetFSDP, Plan, redistribute
from shardhet.comm.calls import Pending
from shardhet.comm.groups import Communicators, among_computing, default_group
from tests.emulated.accelerator import Accelerator
from tests.hosts import on_different_hosts
from tests.test_pipelines import UNITS, Leaky, batch_of, staged
from tests.worlds import on_ranks, run_ranks

PLAN = Plan.by_hand(microbatch_sizes=[2, 1, 0], state_shares=[0.5, 0.2, 0.3])
NEXT_PLAN = Plan.by_hand(microbatch_sizes=[0, 2, 1], state_shares=[0.1, 0.4, 0.5])
STAGES = staged([1, 1, 2], [2, 1], num_rounds=2)
WIDTH = 16


@contextmanager
def noting_what_is_let_go() -> Iterator[list[str]]:
    """Yields who let go of a collective while its receives or sends were not waited for."""
    drain: list[str] = []
    init = Pending.__init__

    def noting_init(self: Any, **given: Any) -> None:
        init(self, **given)
        self.launched_by = [
            f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            for frame in traceback.extract_stack(limit=8)
            if "/shardhet/" in frame.filename
        ]

    def noting_del(self: Any) -> None:
        if self._receiving or self._sending or self._finish is not None:
            drain.append(" ".join(self.launched_by))

    with (
        mock.patch.object(Pending, "__init__", noting_init),
        mock.patch.object(Pending, "__del__", noting_del, create=True),
    ):
        yield drain
        gc.collect()


class _Net:
    """A model, of which nothing is outstanding between its calls."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(7)]
        module = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.model = HetFSDP(module, PLAN, units=[nn.Linear])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def call(self) -> Tensor:
        size = self.model.plan.ranks[self.model.position].rank_batch_size
        output: Tensor = self.model(torch.randn(size, WIDTH))
        return output

    def check(self) -> None:
        """The optimizer may write rows: nobody reads them any more."""
        assert not self.model._comm._unsent

    def step(self) -> None:
        output = self.call()
        shardhet.gather_features(output.detach())
        pairs = shardhet.gather_features(output).sum()
        self.model.backward(output.sum() + pairs, len(output))
        self.check()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _everything(rank: int, is_independent: bool) -> list[str]:
    with (
        on_different_hosts() if is_independent else nullcontext(),
        noting_what_is_let_go() as drain,
    ):
        net = _Net(rank)
        net.model.get_parameter("2.weight").register_hook(lambda grad: grad * 2)
        net.step()
        net.step()
        with torch.no_grad():
            net.call()
        net.check()
        net.call()  # is left without its backward
        net.step()
        whole = net.model.state_dict()
        net.model.load_state_dict(whole or None)
        with net.model.unit_by_unit():
            if rank != 1:
                net.model.module(torch.ones(1, WIDTH))
        net.check()
        redistribute(net.model, net.optimizer, NEXT_PLAN)
        net.step()
    return drain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_independent", [True, False], ids=["gloo", "shared memory"])
def test_nothing_is_let_go_that_is_in_flight(is_independent: bool) -> None:
    assert run_ranks(_everything, 3, is_independent) == [[]] * 3


@on_ranks(3)
def test_a_step_that_is_given_up_leaves_nothing_in_flight(rank: int) -> None:
    net = _Net(rank)
    net.step()
    net.call()
    net.model._runtime.abandon()
    net.check()


@on_ranks(3)
def test_a_step_of_stages_leaves_nothing_in_flight(rank: int) -> None:
    """The optimizer may write rows that other stages read, too: those of the root."""
    with on_different_hosts(), mock.patch.object(Pending, "is_sent", return_value=False):
        torch.manual_seed(0)
        model = HetFSDP(Leaky("late"), STAGES, units=UNITS)
        runtime: Any = model._runtime
        mine = STAGES.sample_indices(model.position)
        inputs, targets = (each[mine] for each in batch_of(STAGES.global_batch_size))
        model.forward_backward(inputs, targets)
        assert not runtime.root_comm._unsent
        runtime.begin_step()
        runtime.abandon()
        assert not runtime.root_comm._unsent


def _connects(rank: int) -> list[str]:
    with Accelerator().installed() as accelerator, noting_what_is_let_go() as drain:
        made = Communicators.over(default_group(None), accelerator.device)
        gather, _, control = made.channels((0, 1, 2), rank)
        among_computing(gather, (0, 1, 1), control=control, device=accelerator.device)
        model = HetFSDP(Leaky("late"), STAGES, units=UNITS, device=accelerator.device)
        mine = STAGES.sample_indices(model.position)
        batch = batch_of(STAGES.global_batch_size)
        model.forward_backward(*(each[mine].to(accelerator.device) for each in batch))
    # What stages hand over in a step is let go in the order of its stream.
    return [each for each in drain if "stage_transfer.py" not in each]


@pytest.mark.campaign  # steps stay
def test_what_connects_ranks_is_waited_for() -> None:
    """Over NCCL, whose messages to ranks that only store, and of stages, have own streams."""
    assert run_ranks(_connects, 3, fresh_world=True) == [[]] * 3
