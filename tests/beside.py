"""The law of most tests of a model written by hand: its step is the step of one process.

    both = Beside(module, plan, units=[...])   # on every rank; or with ``loss=`` of an output
    both.step(x, y)                            # raises AssertionError at the first difference

Drawn models, which also change their optimizers and batches, are held by ``tests.parity``.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from tests.parity import GRAD_BAR, compare_grads
from tests.small_models import NUM_SAMPLES

# What is called with a model and a batch: the sum of its losses and their number.
Loss = Callable[..., tuple[Tensor, Any]]


def squared(model: nn.Module, *batch: Any, **shared: Any) -> tuple[Tensor, int]:
    """The squares of what a model returns, for each sample of its first argument."""
    return model(*batch, **shared).square().sum(), len(batch[0])


def summed(model: nn.Module, *batch: Any, **shared: Any) -> tuple[Tensor, int]:
    """A model that returns its loss, without a number."""
    return model(*batch, **shared), len(batch[0])


def is_exact(mean: float | None, expected: float) -> None:
    """Both are the same number, to rounding."""
    assert mean is not None
    assert abs(mean - expected) <= GRAD_BAR * abs(expected), f"loss {mean} for {expected}"


def mean_of(
    module: nn.Module,
    *batch: Any,
    loss: Loss | None = None,
    adds: bool = False,
    pieces: Iterable[int] | None = None,
    **shared: Any,
) -> float:
    """The mean loss in one process, and its gradients."""
    if not adds:
        module.zero_grad()
    parts = zip(*(each.split(list(pieces or [len(each)])) for each in batch), strict=True)
    call = loss or nn.Module.__call__
    pairs = [call(module, *part, **shared)[:2] for part in parts]
    mean = sum(loss_sum for loss_sum, _ in pairs) / sum(number for _, number in pairs)
    mean.backward()
    return float(mean.detach())


class Beside:
    """A model as HetFSDP, and the same in one process, whose steps have to be the same."""

    def __init__(
        self,
        plain: nn.Module,
        plan: Plan,
        *,
        loss: Loss | None = None,
        of: nn.Module | None = None,
        **options: Any,
    ) -> None:
        """Without ``loss`` the model returns what one would, and takes whole steps.

        ``of``: what is wrapped, in place of a copy.
        """
        self.plain, self.plan, self.loss = plain, plan, loss
        self.model = HetFSDP(copy.deepcopy(plain) if of is None else of, plan, **options)

    def part(self, *batch: Any, num_samples: int | None = None) -> list[Any]:
        """This rank's samples of a batch of all."""
        mine = self.plan.sample_indices(self.model.position, num_samples)
        return [each[mine].to(self.model.device) for each in batch]

    def step(
        self,
        *batch: Any,
        adds: bool = False,
        pieces: Iterable[int] | None = None,
        bar: float = GRAD_BAR,
        within: AbstractContextManager[Any] | None = None,
        **shared: Any,
    ) -> float:
        """One forward and backward of both; the mean loss.

        ``pieces``: microbatches in which one process computes, if it matters. ``within``: where
        the model, and not one process, does.
        """
        if not adds:
            self.zero_grad()
        num_samples = len(batch[0])
        with within or nullcontext():
            if self.loss is None:
                own = self.part(*batch, num_samples=num_samples)
                mean = self.model.forward_backward(*own, **shared)
            else:
                for i in range(self.plan.num_rounds):
                    mine = list(self.plan.round_samples(self.model.position, i, num_samples))
                    own = [each[mine].to(self.model.device) for each in batch]
                    mean = self.model.backward(*self.loss(self.model, *own, **shared))
        is_exact(mean, expected := self.step_of_one(*batch, pieces=pieces, **shared))
        compare_grads(self.model, self.plain, where=f"step {self.model.step}", bar=bar)
        return expected

    def step_of_one(self, *batch: Any, **how: Any) -> float:
        """The mean loss in one process, as ``mean_of``; gradients are added."""
        return mean_of(self.plain, *batch, loss=self.loss, adds=True, **how)

    def zero_grad(self) -> None:
        for each in (self.model, self.plain):
            each.zero_grad()

    def optimizers(
        self, make: Callable[..., torch.optim.Optimizer], **settings: Any
    ) -> list[torch.optim.Optimizer]:
        """One of each."""
        return [make(each.parameters(), **settings) for each in (self.model, self.plain)]


def microbatches(plan: Plan) -> list[int]:
    """Of all rounds and ranks, in the order of the samples."""
    one = [size for rank in plan.ranks for size in rank.microbatch_sizes]
    return one * plan.num_rounds


def check(
    plan: Plan,
    module: nn.Module,
    samples: Iterable[Tensor],
    loss: Loss = squared,
    **options: Any,
) -> HetFSDP:
    """A step for each of ``samples`` is that of one process by microbatches; the model."""
    both = Beside(module, plan, loss=loss, **options)
    for x in samples:
        both.step(x, pieces=microbatches(plan))
    return both.model


def backward_in_rounds(model: HetFSDP, call: Callable[..., Any], *args: Any) -> None:
    """A step of two rounds of the loss that the call returns."""
    scaler = torch.amp.GradScaler("cpu", enabled=model._mean.is_float16)
    for _ in range(2):
        model.backward(scaler.scale(call(*args)), NUM_SAMPLES)


def refuses(
    model: HetFSDP,
    error: Any,
    words: str,
    *batch: Any,
    call: Callable[..., Any] | None = None,
    **shared: Any,
) -> None:
    """The model's forward, or ``call``, raises ``error``, and no gradient is set."""
    with pytest.raises(error, match=words):
        (call or model)(*batch, **shared)
    assert all(param.grad is None for param in model.parameters())
