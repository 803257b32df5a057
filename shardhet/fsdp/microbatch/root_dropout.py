"""Dropout that the model calls as a function, outside of units and of ``nn.Dropout``.

A call of ``torch.nn.functional.dropout`` would draw once for all samples of the rank.  While
code outside of units runs, such calls are intercepted and run microbatch by microbatch, seeded
per microbatch, like calls of ``nn.Dropout``.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import (
    _get_current_function_mode,
    _pop_mode_temporarily,
)

from shardhet.fsdp.microbatch.modes import FunctionMode
from shardhet.fsdp.sharding.unit import UnitModule

DROPOUT_CALLS = "torch.nn.functional.dropout"  # the fqn of all such calls; no module has it

_FUNCTIONS = frozenset(
    (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
    )
)


class CheckpointedError(RuntimeError):
    """Raised for a unit that is called under torch's gradient checkpointing."""


Visit = Callable[[UnitModule, tuple[Any, ...], dict[str, Any]], Any]


class RootDropout:
    """Passes such calls to ``visit`` while it is switched on."""

    def __init__(self, root: nn.Module, visit: Visit) -> None:
        self._mode = _Taking(root, visit)
        self._is_taken_over = False  # in this forward

    def taken_over(self, *, is_needed: bool) -> AbstractContextManager[Any]:
        """A context for code outside of units; free for a model without such calls."""
        self._is_taken_over = is_needed
        return self._mode if is_needed else nullcontext()

    def left_alone(self) -> AbstractContextManager[None]:
        """A context for a unit or an ``nn.Dropout``, which runs by microbatch already."""
        return self._left_alone() if self._is_taken_over else nullcontext()

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        self._mode.num_left_alone += 1
        try:
            # With another mode on top it cannot be popped, and only the counter disables it.
            is_on_top = _get_current_function_mode() is self._mode
            with _pop_mode_temporarily() if is_on_top else nullcontext():
                yield
        finally:
            self._mode.num_left_alone -= 1


def is_checkpointed(*, grad_enabled: bool) -> bool:
    """Whether the current code will run again in backward, by gradient checkpointing.

    ``grad_enabled`` is whether gradients were enabled when the call of the model began.
    Reentrant checkpointing disables them; the other kind sets hooks on saved tensors.
    """
    if grad_enabled and not torch.is_grad_enabled():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


class _Taking(FunctionMode):
    def __init__(self, root: nn.Module, visit: Visit) -> None:
        super().__init__()
        self.num_left_alone = 0
        self._root = root
        self._visit = visit

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # For all values of p and training, since they may differ at the next step.
        if func in _FUNCTIONS and not self.num_left_alone:
            return self._visit(UnitModule(DROPOUT_CALLS, self._root, func, False), args, kwargs)
        return func(*args, **kwargs)
