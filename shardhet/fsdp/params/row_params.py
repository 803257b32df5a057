"""Parameters as users see them: rows, of which a norm or a sum is over the whole parameter.

While an optimizer steps, its rows and their gradients are plain, which torch's fast kernels
take and which costs no call in Python: it needs no more than rows, as optimizer_gate.py has
found.  If it needs whole parameters, its groups have those that are here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardhet.fsdp.params.optimizer_gate import know, put_in_front, rows_of, takes_whole
from shardhet.fsdp.params.row_group import Rows
from shardhet.fsdp.params.rows import RowTensor, marked, rows_in

_plainly = torch._C.DisableTorchFunctionSubclass


@dataclass
class _Stepping:
    """Of an optimizer: which hook is ours, and what is different during the step.

    Nothing is before a step, unless the last one has failed.
    """

    hook_id: int
    plain: list[tuple[Tensor, type]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[Tensor]]] = field(default_factory=list)


_finishes = WeakIdKeyDictionary()  # of parameters whose gradients may be late, see ``put_off``
_stepping: "WeakKeyDictionary[optim.Optimizer, _Stepping]" = WeakKeyDictionary()


class RowParameter(RowTensor):
    """This rank's rows of a parameter."""

    _has_rows = True

    @property
    def _of(self) -> Rows:  # type: ignore[override]
        return rows_of(self)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, by a shorter way than other attributes: zero_grad asks for each."""
        _settle(self)
        with _plainly():
            grad: Tensor | None = Tensor.grad.__get__(self)  # type: ignore[union-attr]
            return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        _settle(self)
        with _plainly():
            if isinstance(grad, Tensor) and grad.dim() == self.dim():
                grad = marked(rows_in(grad, self), self._of)
            Tensor.grad.__set__(self, grad)  # type: ignore[union-attr]

    def _as_plain(self) -> nn.Parameter:
        with _plainly():
            plain = Tensor.detach(self).as_subclass(Tensor)
            return nn.Parameter(plain, requires_grad=self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._as_plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self._as_plain().__deepcopy__({}))


def put_off(params: Iterable[nn.Parameter], finish: Callable[[], None]) -> None:
    """Have a method called before gradients of ``params`` are read or set, from now on."""
    for param in params:
        _finishes[param] = WeakMethod(finish)


def _settle(param: Tensor) -> None:
    method = _finishes.get(param) if _finishes else None
    if method is not None and (finish := method()) is not None:
        with rows_of(param).group.peers.guard("model.backward"):
            finish()


def guard(params: Iterable[tuple[nn.Parameter, Callable[[], Rows]]]) -> None:
    """Register rows, each with what says which are here, and let reductions be over all."""
    for param, rows in params:
        know(param, rows)
        put_in_front(RowParameter, param)


def _prepare(optimizer: Any, args: Any, kwargs: Any) -> None:
    if optimizer not in _stepping:
        before = optimizer.register_step_pre_hook(_make_plain)
        after = optimizer.register_step_post_hook(_make_guarded)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
        _stepping[optimizer] = _Stepping(before.id)
    # Right around the step: hooks of the user's see what the user sees.
    optimizer._optimizer_step_pre_hooks.move_to_end(_stepping[optimizer].hook_id)


def _make_plain(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    changed = _stepping[optimizer]
    for group in optimizer.param_groups:
        for param in group["params"]:
            if issubclass(kind := type(param), RowParameter):
                grad = param.grad  # once it is there, see ``put_off``
                param.__class__ = kind.__bases__[1]
                changed.plain.append((param, kind))
                if type(grad) is RowTensor:
                    changed.plain.append((grad, RowTensor))
                    grad.__class__ = Tensor  # type: ignore[assignment]
        if takes_whole(optimizer):
            changed.groups.append((group, group["params"]))
            group["params"] = [param for param in group["params"] if param.numel()]


def _make_guarded(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    changed = _stepping[optimizer]
    for tensor, kind in changed.plain:
        tensor.__class__ = kind
    for group, params in reversed(changed.groups):
        group["params"] = params
    changed.plain.clear()
    changed.groups.clear()


register_optimizer_step_pre_hook(_prepare)
