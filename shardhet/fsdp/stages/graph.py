"""Where the graph of a stage's part of a round begins, and where its backward does.

Neither end keeps a tensor alive: what has arrived may leave for the memory of the host like any
other input of a unit, and what was made is free once it has been sent.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardhet.fsdp.stages.handover import Carried


class Arrived:
    """What a stage has received for a round, and its gradients after the round's backward."""

    def __init__(self) -> None:
        self.grads: list[Tensor | None] = []  # of those that are differentiable

    def with_grad(
        self, tensors: Sequence[Tensor], carried: Sequence[Carried], anchor: Tensor
    ) -> list[Tensor]:
        """The tensors, of which the differentiable ones require a gradient from now on.

        ``anchor`` is any tensor that does.
        """
        begun = differentiable(tensors, carried)
        self.grads = [None for _ in begun]
        made = iter(_Begin.apply(anchor, self, begun))  # type: ignore[no-untyped-call]
        return [
            next(made) if each.is_differentiable else t
            for t, each in zip(tensors, carried, strict=True)
        ]


class _Begin(torch.autograd.Function):
    """The first node of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrived: Arrived, tensors: list[Tensor]) -> Any:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.arrived.grads = list(grads)
        return None, None, None


def differentiable(tensors: Sequence[Tensor], carried: Sequence[Carried]) -> list[Tensor]:
    """Those that get a gradient."""
    return [t for t, each in zip(tensors, carried, strict=True) if each.is_differentiable]


def edges_of(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Where backward begins, for each; None for those that need no gradient."""
    return [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
