"""Applies ``loss_fn`` to the output of the last unit, microbatch by microbatch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule

LossFn = Callable[..., tuple[Tensor, Tensor]]


class LossUsedError(TypeError):
    """The model computes with the loss as if it were the last unit's output."""


class FusedLoss:
    """Makes the last unit return the loss of its output instead of the output."""

    def __init__(self, loss_fn: LossFn | None) -> None:
        self._loss_fn = loss_fn
        self._inputs: tuple[Any, ...] = ()  # of the forward in progress
        self._head = ""
        self._is_there = False  # whether the head has returned in this forward

    def find_head(self, module: nn.Module, units: Sequence[FSDPUnit]) -> UnitModule | None:
        """The last of the units' modules, in the model's order; None without a ``loss_fn``."""
        if self._loss_fn is None:
            return None
        position_by_fqn = {fqn: i for i, (fqn, _) in enumerate(module.named_modules())}
        modules = [each for unit in units for each in unit.modules]
        head = max(modules, key=lambda each: position_by_fqn[each.fqn], default=None)
        self._head = "" if head is None else head.fqn
        return head

    def with_loss(self, head: UnitModule) -> UnitModule:
        """``head`` with ``loss_inputs`` as its first argument, and the loss as its output."""
        loss_fn = self._loss_fn
        assert loss_fn is not None

        def forward(loss_inputs: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            return loss_fn(head.forward(*args, **kwargs), *loss_inputs)

        return replace(head, forward=forward)

    @contextmanager
    def of(self, loss_inputs: tuple[Any, ...]) -> Iterator[None]:
        """A context for one forward of the model.  Raises ``LossUsedError``."""
        self._inputs, self._is_there = loss_inputs, False
        try:
            yield
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            if not self._is_there:
                raise
            raise LossUsedError(
                f"loss_fn: after unit {self._head!r}, to whose output it is applied, the model "
                f"goes on computing ({type(error).__name__}: {error}). Leave loss_fn out, and "
                "compute the loss from what model(...) returns: "
                "model.backward(*loss_fn(output, labels))."
            ) from error
        finally:
            self._inputs = ()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of ``loss_fn`` after the head's output."""
        return self._inputs

    def note(self) -> None:
        """Note that the head has returned the loss; later errors come from its use."""
        self._is_there = True
