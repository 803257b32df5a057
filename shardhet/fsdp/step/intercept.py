"""Replaces the forward of modules by calls of units."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.sharding.unit import UnitModule
from shardhet.fsdp.step.calls import UnitCalls


def intercept(
    root: nn.Module, calls: UnitCalls, loss: FusedLoss, pieces: Sequence[UnitModule]
) -> None:
    """Route calls of every unit's modules, and of pieces of the root, through ``calls``."""
    head = loss.find_head(root, calls.units)
    for index, unit in enumerate(calls.units):
        for module in unit.modules:
            if module is head:
                module.module.forward = _visit_with_loss(calls, index, module, loss)
            else:
                module.module.forward = _visit(calls, index, module)
    for piece in pieces:
        piece.module.forward = _visit_piece(calls, piece)


def _visit(calls: UnitCalls, unit: int, module: UnitModule) -> Callable[..., Any]:
    def visit(*args: Any, **kwargs: Any) -> Any:
        return calls.visit(unit, module, args, kwargs)

    return visit


def _visit_piece(calls: UnitCalls, module: UnitModule) -> Callable[..., Any]:
    def visit(*args: Any, **kwargs: Any) -> Any:
        return calls.visit_piece(module, args, kwargs)

    return visit


def _visit_with_loss(
    calls: UnitCalls, unit: int, module: UnitModule, loss: FusedLoss
) -> Callable[..., Any]:
    with_loss = loss.with_loss(module)

    def visit(*args: Any, **kwargs: Any) -> Any:
        # The caller, or the model, wants the head's output.
        if calls.outside_of_steps is not None or loss.is_outside:
            return calls.visit(unit, module, args, kwargs)
        output = calls.visit(unit, with_loss, (loss.inputs, *args), kwargs)
        loss.note(output)
        return output

    return visit
