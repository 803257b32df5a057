"""Replaces the forward of modules by calls of the runtime."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.sharding.unit import UnitModule
from shardhet.fsdp.step.runtime import Runtime


def intercept(
    root: nn.Module, runtime: Runtime, loss: FusedLoss, pieces: Sequence[UnitModule]
) -> None:
    """Route calls of every unit's modules, and of pieces of the root, through ``runtime``."""
    head = loss.find_head(root, runtime.units)
    for index, unit in enumerate(runtime.units):
        for module in unit.modules:
            if module is head:
                module.module.forward = _visit_with_loss(runtime, index, module, loss)
            else:
                module.module.forward = _visit(runtime, index, module)
    for piece in pieces:
        piece.module.forward = _visit_piece(runtime, piece)


def _visit(runtime: Runtime, unit: int, module: UnitModule) -> Callable[..., Any]:
    def visit(*args: Any, **kwargs: Any) -> Any:
        return runtime.visit(unit, module, args, kwargs)

    return visit


def _visit_piece(runtime: Runtime, module: UnitModule) -> Callable[..., Any]:
    def visit(*args: Any, **kwargs: Any) -> Any:
        return runtime.visit_piece(module, args, kwargs)

    return visit


def _visit_with_loss(
    runtime: Runtime, unit: int, module: UnitModule, loss: FusedLoss
) -> Callable[..., Any]:
    with_loss = loss.with_loss(module)

    def visit(*args: Any, **kwargs: Any) -> Any:
        if runtime.unit_by_unit is not None:  # the caller wants the head's output
            return runtime.visit(unit, module, args, kwargs)
        output = runtime.visit(unit, with_loss, (loss.inputs, *args), kwargs)
        loss.note(output)
        return output

    return visit
