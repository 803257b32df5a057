"""Calls hooks on parameters with whole gradients, once per backward, on all ranks.

Autograd never reaches the rows that users hold, so their hooks are called here, after the
gradient of a step has been summed and before it is added to ``.grad``.  A hook of
``register_hook`` gets the whole gathered gradient on every rank and may return another; a hook
of ``register_post_accumulate_grad_hook`` gets the parameter that users see: this rank's rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from shardhet.fsdp.params.row_group import RowGroup, Rows
from shardhet.fsdp.params.rows import marked
from shardhet.fsdp.sharding.flat import FlatTensor

Hooks = dict[int, Callable[..., Any]]
_plainly = torch._C.DisableTorchFunctionSubclass  # each look is a call in Python otherwise


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

    def leave_out_present(self, params: Mapping[str, nn.Parameter]) -> None:
        """Ignore the hooks that are on the rows now: they are HetFSDP's own."""
        self._own = frozenset(
            id(hook) for param in params.values() for hook in _done_hooks_of(param).values()
        )

    def on_grad(self, fqn: str, param: nn.Parameter) -> list[Callable[..., Any]]:
        """Hooks registered by ``register_hook``."""
        with _plainly():
            now: Hooks = param._backward_hooks or {}
        return [*self._grad_hooks.get(fqn, {}).values(), *now.values()]

    def when_done(self, fqn: str, param: nn.Parameter) -> list[Callable[..., Any]]:
        """Hooks registered by ``register_post_accumulate_grad_hook``."""
        hooks = [*self._done_hooks.get(fqn, {}).values(), *_done_hooks_of(param).values()]
        return [hook for hook in hooks if id(hook) not in self._own]

    def fingerprint(self, params: Mapping[str, nn.Parameter]) -> int:
        """A number that is equal on ranks with as many hooks on the same parameters."""
        text = "".join(
            f"{fqn} {on_grad} {done}/"
            for fqn, param in params.items()
            if (on_grad := len(self.on_grad(fqn, param)))
            + (done := len(self.when_done(fqn, param)))
        )
        return crc32(text.encode())


def check_hooks_agree(rows: Sequence[Sequence[float]]) -> None:
    """Raise ``ValueError`` unless all ranks have the same fingerprint."""
    if len({row[0] for row in rows}) > 1:
        raise ValueError(
            "model.backward: hooks on parameters (register_hook, "
            "register_post_accumulate_grad_hook) differ between ranks. Register the same ones "
            "on every rank."
        )


def set_grads_with_hooks(
    flat: FlatTensor, has_grad: Sequence[bool], hooks: ParamHooks, rows: RowGroup
) -> None:
    """``flat.set_sharded_grads`` with the users' hooks.  Collective if there are any."""
    params = list(zip(flat.slots, flat.sharded_params, strict=True))
    hooked = [i for i, (slot, param) in enumerate(params) if hooks.on_grad(slot.fqn, param)]
    kept = {i: flat.sharded_params[i].grad for i in hooked if has_grad[i]}
    for i in kept:
        flat.sharded_params[i].grad = None
    with _plainly():
        flat.set_sharded_grads(has_grad)
    for i, before in kept.items():
        slot, param = params[i]
        for hook in hooks.on_grad(slot.fqn, param):
            _call(hook, flat, i, rows)
        if before is not None:
            assert param.grad is not None
            before += param.grad
            param.grad = before
    for (slot, param), has, cut in zip(params, has_grad, flat.cuts, strict=True):
        with _plainly():
            if not has or (grad := param.grad) is None:
                continue
            if not rows.is_alone:
                param.grad = marked(grad, Rows(rows, slot.fqn, (cut,)))
        for hook in hooks.when_done(slot.fqn, param):
            hook(param)


@torch.no_grad()
def _call(hook: Callable[..., Any], flat: FlatTensor, index: int, group: RowGroup) -> None:
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
