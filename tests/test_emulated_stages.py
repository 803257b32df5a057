"""Steps of pipelines on emulated accelerators: right, in order, and the host does not wait."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardhet import HetFSDP
from shardhet.comm.calls import Pending
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.stages import stage_transfer
from shardhet.fsdp.stages.stage_transfer import PendingReceive, SendQueue
from tests.emulated.accelerator import Accelerator
from tests.emulated.clocks import Event
from tests.selection import one_in
from tests.test_pipelines import UNITS, Leaky, batch_of, staged
from tests.worlds import run_ranks, run_ranks_expecting_failure

PLAN = staged([1, 1, 2], [2, 1], num_rounds=4)


def _train(module: nn.Module, device: torch.device, **options: Any) -> list[Any]:
    """Losses and gradients of two steps of ``PLAN``."""
    model = HetFSDP(module, PLAN, device=device, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[Any] = []
    for step in range(2):
        inputs, targets = batch_of(PLAN.global_batch_size, step)
        mine = PLAN.sample_indices(model.position)
        seen.append(model.forward_backward(inputs[mine].to(device), targets[mine].to(device)))
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _goes_on(rank: int) -> list[float | None]:
    """The losses of four steps, of which the second has one that is not finite."""
    torch.manual_seed(0)
    with Accelerator().installed() as accelerator:
        model = HetFSDP(Leaky("late"), PLAN, units=UNITS, device=accelerator.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        seen: list[float | None] = []
        for step in range(4):
            inputs, targets = (
                each[PLAN.sample_indices(model.position)].to(accelerator.device)
                for each in batch_of(PLAN.global_batch_size)
            )
            scale = model.module.head.weight.detach()  # type: ignore[union-attr]
            kept = scale.clone()
            if step == 1:
                scale.fill_(math.inf)
                with pytest.raises(FloatingPointError, match="step 2"):
                    model.forward_backward(inputs, targets)
                scale.copy_(kept)
                assert all(p.grad is None for p in model.parameters())
                continue
            seen.append(model.forward_backward(inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
        return seen


def test_a_loss_that_is_not_finite_sets_no_gradient_and_training_goes_on() -> None:
    [losses, *others] = run_ranks(_goes_on, 3)
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3
    assert all(each == losses for each in others)


# Without one of the waits


def _in_place_of(owner: Any, name: str, made: Callable[[Any], Any]) -> Any:
    return mock.patch.object(owner, name, made(getattr(owner, name)))


def _receives_too_early(accelerator: Accelerator) -> Any:
    def without(post: Any) -> Any:
        def run(arriving: PendingReceive) -> None:
            arriving._free = Event(accelerator.host)
            post(arriving)

        return run

    return _in_place_of(PendingReceive, "post", without)


def _reads_too_early(accelerator: Accelerator) -> Any:
    def without(wait: Any) -> Any:
        def run(arriving: PendingReceive) -> Any:
            arriving._pending = Pending()
            return wait(arriving)

        return run

    return _in_place_of(PendingReceive, "wait", without)


def _sends_too_early(accelerator: Accelerator) -> Any:
    def without(send: Any) -> Any:
        def run(departures: SendQueue, *args: Any) -> None:
            with accelerator.stream(departures._way.stream):
                send(departures, *args)

        return run

    return _in_place_of(SendQueue, "send", without)


def _frees_too_early(accelerator: Accelerator) -> Any:
    def drain(unsent: deque[Pending], most: int | None = None) -> None:
        while most is not None and len(unsent) > most:
            unsent.popleft()

    return mock.patch.object(stage_transfer, "drain", drain)


def _gathers_too_early(accelerator: Accelerator) -> Any:
    return mock.patch.object(CommContext, "mark_compute", return_value=None)


@contextmanager
def _nothing(accelerator: Accelerator) -> Iterator[None]:
    with nullcontext():
        yield


def _without(rank: int, broken: Callable[[Accelerator], Any]) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator()
    with accelerator.installed(), broken(accelerator):
        _train(Leaky("late"), accelerator.device, units=UNITS)


WAITS = [
    _receives_too_early,
    _reads_too_early,
    _sends_too_early,
    _frees_too_early,
    _gathers_too_early,
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("broken", one_in(3, WAITS))
def test_a_wait_that_is_missing_is_a_race(broken: Callable[[Accelerator], Any]) -> None:
    outcomes = run_ranks_expecting_failure(_without, 3, broken, within_s=40.0)
    assert any(each.exception_name == "RaceError" for each in outcomes), outcomes


def test_with_all_waits_there_is_none() -> None:
    run_ranks(_without, 3, _nothing)
