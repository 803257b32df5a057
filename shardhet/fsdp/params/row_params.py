"""Parameters as users see them, and the hooks on them.

They are rows, of which a norm or a sum is over the whole parameter.  While an optimizer steps,
its rows and their gradients are plain, which torch's fast kernels take and which costs no call
in Python: it needs no more than rows, as optimizer_check.py has found.  If it needs whole
parameters, its groups have those that are here.

[Note: Hooks]
Autograd never reaches the rows that users hold, so their hooks are called here, after the
gradient of a step has been summed and before it is added to ``.grad``: once per backward, on
all ranks.  A hook of ``register_hook`` gets the whole gathered gradient on every rank and may
return another; a hook of ``register_post_accumulate_grad_hook`` gets the parameter that users
see: this rank's rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod
from zlib import crc32

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardhet.fsdp.params.optimizer_check import know, put_in_front, rows_of, takes_whole
from shardhet.fsdp.params.row_group import Rows, ShardGroup
from shardhet.fsdp.params.rows import ShardTensor, marked, rows_in
from shardhet.fsdp.sharding.flat import WAS_FROZEN, FlatTensor
from shardhet.fsdp.sharding.flat_grad import GradState
from shardhet.fsdp.step.schedule_executor import ScheduleExecutor

_plainly = torch._C.DisableTorchFunctionSubclass


@dataclass
class _Stepping:
    """Of an optimizer: which hook is ours, and what is different during the step.

    Nothing is before a step, unless the last one has failed.
    """

    hook_id: int
    plain: list[tuple[Tensor, type]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[Tensor]]] = field(default_factory=list)


_finishes = (
    WeakIdKeyDictionary()
)  # of parameters whose gradients may be late, see ``defer_grads``
_stepping: "WeakKeyDictionary[optim.Optimizer, _Stepping]" = WeakKeyDictionary()


class ShardParameter(ShardTensor):
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


def defer_grads(params: Iterable[nn.Parameter], finish: Callable[[], None]) -> None:
    """Have a method called before gradients of ``params`` are read or set, from now on."""
    for param in params:
        _finishes[param] = WeakMethod(finish)


def _settle(param: Tensor) -> None:
    method = _finishes.get(param) if _finishes else None
    if method is not None and (finish := method()) is not None:
        with rows_of(param).group.peers.fail_together("model.backward"):
            finish()


def guard(params: Iterable[tuple[nn.Parameter, Callable[[], Rows]]]) -> None:
    """Register rows, each with what says which are here, and let reductions be over all."""
    for param, rows in params:
        know(param, rows)
        put_in_front(ShardParameter, param)


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
            if issubclass(kind := type(param), ShardParameter):
                grad = param.grad  # once it is there, see ``defer_grads``
                param.__class__ = kind.__bases__[1]
                changed.plain.append((param, kind))
                if type(grad) is ShardTensor:
                    changed.plain.append((grad, ShardTensor))
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


Hooks = dict[int, Callable[..., Any]]
# ``.grad`` of any parameter, past properties of its class: no call in Python.
grad_of, set_grad = Tensor.grad.__get__, Tensor.grad.__set__  # type: ignore[union-attr]


class ParamHooks:
    """The hooks on all parameters of a model, registered before and after wrapping."""

    def __init__(self, module: nn.Module) -> None:
        """Keep the hooks that are registered on the parameters of a plain module."""
        # The same dicts, not copies: torch's handles remove hooks from them.
        self._grad_hooks: dict[str, Hooks] = {}
        self._done_hooks: dict[str, Hooks] = {}
        for fqn, param in module.named_parameters():
            if param._backward_hooks:
                self._grad_hooks[fqn] = param._backward_hooks
            if done := _done_hooks_of(param):
                self._done_hooks[fqn] = done
        self._own = frozenset[int]()
        # By fqn, of parameters that have any: of gradients, and of what is done with one.
        self.found: dict[str, tuple[list[Callable[..., Any]], list[Callable[..., Any]]]] = {}

    def leave_out_present(self, params: Mapping[str, nn.Parameter]) -> None:
        """Ignore the hooks that are on the rows now: they are HetFSDP's own."""
        self._own = frozenset(
            id(hook) for param in params.values() for hook in _done_hooks_of(param).values()
        )

    def find(self, params: Mapping[str, nn.Parameter]) -> int:
        """Note the hooks that there are now.

        Returns a number that is equal on ranks with as many hooks on the same parameters.
        """
        self.found = {}
        none: Hooks = {}
        with _plainly():
            for fqn, param in params.items():
                before, now = self._grad_hooks.get(fqn, none), param._backward_hooks or none
                on_grad = [*before.values(), *now.values()]
                before, now = (
                    self._done_hooks.get(fqn, none),
                    param._post_accumulate_grad_hooks or none,
                )
                done = [*before.values(), *now.values()]
                if on_grad or not self._own.issuperset(map(id, done)):
                    done = [hook for hook in done if id(hook) not in self._own]
                    self.found[fqn] = on_grad, done
        counts = (f"{fqn} {len(a)} {len(b)}/" for fqn, (a, b) in self.found.items())
        return crc32("".join(counts).encode())


def check_hooks_agree(rows: Sequence[Sequence[float]]) -> None:
    """Raise ``ValueError`` unless all ranks have the same fingerprint."""
    if len({row[0] for row in rows}) > 1:
        raise ValueError(
            "model.backward: hooks on parameters (register_hook, "
            "register_post_accumulate_grad_hook) differ between ranks. Register the same ones "
            "on every rank."
        )


def may_be_late(flats: Sequence[FlatTensor], hooks: ParamHooks) -> bool:
    """Whether gradients that are being reduced may be set when one of them is first read.

    Not where the reduction needs this process (a transport), or a hook is called on all ranks.
    """
    return all(
        flat.comm.reduce_scatter_channel.transport is None
        and isinstance(param, ShardParameter)
        and slot.fqn not in hooks.found
        for flat in flats
        if flat.grad.state is GradState.REDUCING
        for slot, param in zip(flat.slots, flat.sharded_params, strict=True)
    )


@torch.no_grad()
def set_sharded_grads(flat: FlatTensor, has_grad: Sequence[bool]) -> None:
    """Set or add to the gradients of its rows; None stays where no rank has a gradient."""
    reduced, sums = flat.grad.take()
    if reduced is None and not sums:
        return  # the unit is never visited
    flat_grad = None if reduced is None else reduced.to(flat.orig_dtype)
    for i, param in enumerate(flat.sharded_params):
        if param.requires_grad != flat.is_trainable:
            raise RuntimeError(flat.slots[i].fqn + WAS_FROZEN)
        if not has_grad[i]:
            continue
        if flat_grad is None:
            grad = sums[i].to(flat.orig_dtype).view_as(param)
        else:
            part, shape = flat._boxes[i]
            grad = flat_grad[part.start : part.stop].view(shape)
        if (before := grad_of(param)) is None:
            set_grad(param, grad)
        else:
            before += grad


def set_grads_with_hooks(
    flat: FlatTensor,
    has_grad: Sequence[bool],
    factor: float | None,
    hooks: ParamHooks,
    rows: ShardGroup,
    executor: ScheduleExecutor,
) -> None:
    """``set_sharded_grads``, of the flat tensor's sum times ``factor``, with the users' hooks.

    Collective if there are any.  While the sum is being reduced it is put off.
    """
    if flat.grad.state is GradState.REDUCING:
        defer_grads(flat.sharded_params, executor.finish)
        again = flat, has_grad, factor, hooks, rows, executor
        executor.when_finished(partial(set_grads_with_hooks, *again))
        return
    if factor is not None:
        flat.grad.multiply(factor)
    params, found = flat.sharded_params, hooks.found
    slots = enumerate(flat.slots if found else ())
    hooked = [i for i, slot in slots if has_grad[i] and slot.fqn in found]
    kept = {i: params[i].grad for i in hooked if found[flat.slots[i].fqn][0]}
    for i in kept:
        params[i].grad = None
    with _plainly():
        set_sharded_grads(flat, has_grad)
    for i, before in kept.items():
        for hook in found[flat.slots[i].fqn][0]:
            _call(hook, flat, i, rows)
        if before is not None:
            grad = params[i].grad
            assert grad is not None
            before += grad
            params[i].grad = before
    if rows.control.group is not None:  # a lone rank has whole gradients
        with _plainly():
            for slot, param, cut in zip(flat.slots, params, flat.cuts, strict=True):
                if (grad := grad_of(param)) is not None:
                    set_grad(param, marked(grad, Rows(rows, slot.fqn, (cut,))))
    for i in hooked:
        if params[i].grad is not None:
            for hook in found[flat.slots[i].fqn][1]:
                hook(params[i])


@torch.no_grad()
def _call(hook: Callable[..., Any], flat: FlatTensor, index: int, group: ShardGroup) -> None:
    """Call ``hook`` on the whole gradient of a parameter; store the result.  Collective."""
    param, slot = flat.sharded_params[index], flat.slots[index]
    assert param.grad is not None
    whole = Rows(group, slot.fqn, (flat.cuts[index],)).gather(param.grad).view(slot.shape)
    with torch.enable_grad():
        changed = hook(whole)
    if changed is None:
        changed = whole  # the hook may have changed it in place
    if not isinstance(changed, Tensor) or changed.shape != slot.shape:
        found = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise ValueError(
            f"{slot.fqn}: a hook on it returns {found} but its gradient is "
            f"{tuple(slot.shape)}. Return a gradient of the whole parameter's shape, or None."
        )
    rows = flat.rows[index]
    mine = changed.detach().reshape(max(1, len(slot.shape) and slot.shape[0]), *slot.shape[1:])
    param.grad.copy_(mine[rows.start : rows.stop])


def _done_hooks_of(param: nn.Parameter) -> Hooks:
    with _plainly():
        hooks: Hooks | None = param._post_accumulate_grad_hooks
    return {} if hooks is None else hooks
