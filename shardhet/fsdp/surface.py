"""The methods of ``nn.Module`` besides forward, for a module whose parameters are rows.

Each is either correct or refused: names are those of the plain module, calls that would move,
copy or rewrite parameters are refused by name, and everything else goes to the wrapped module
(see door.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from shardhet.comm.peers import Peers
from shardhet.fsdp.door import through, with_stand_ins
from shardhet.fsdp.sharding.flat import WAS_FROZEN, FlatTensor
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitState
from shardhet.fsdp.step.calls import CALL_THE_MODEL
from shardhet.records.plan import Plan

EMA_BY_HAND = (
    "For an average of the parameters: ema = [p.detach().clone() for p in model.parameters()], "
    "and after each step torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], "
    "1 - decay)"
)


COMPILE_UNITS = (
    "it cannot be compiled as a whole. Compile its units before wrapping: "
    "shardhet.training.compiling.compile_units(module, device)"
)
# What torch asks a module for that it is to wrap, and why that is refused.
WRAPPERS = {
    "_initialize_hook": COMPILE_UNITS,  # torch.compile(model)
    "_ddp_params_and_buffers_to_ignore": (
        "it cannot be wrapped in DistributedDataParallel, which would give all ranks the rows "
        "of one. It adds up the gradients of all ranks itself: use it as it is"
    ),
}


class ModuleOfRows(nn.Module):
    """A base of HetFSDP: the methods that torch and users call on any module."""

    module: nn.Module
    plan: Plan
    position: int
    _flats: Sequence[FlatTensor]
    _param_by_fqn: Mapping[str, nn.Parameter]
    _peers: Peers
    _is_built: bool  # from then on, attributes that are set are those of the wrapped module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's rows of every parameter under the model's own names."""
        for fqn, param in self._param_by_fqn.items():
            yield (f"{prefix}.{fqn}" if prefix else fqn), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers under its own names; every rank has them whole."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module, the wrapped one as "module", and its submodules by their own names."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        memo.add(self)
        yield prefix, self
        for name, inner in self.module.named_modules(memo, prefix, remove_duplicate):
            is_root = inner is self.module
            yield (f"{prefix}.module" if prefix else "module") if is_root else name, inner

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that HetFSDP does not have in the wrapped module."""
        module = self.__dict__.get("_modules", {}).get("module")
        if name in WRAPPERS:
            self._refuse(WRAPPERS[name])
        try:
            return super().__getattr__(name)
        except AttributeError:
            if module is None or name.startswith("__") or not hasattr(module, name):
                raise
        return through(module, name, self._flats, self._peers.guard)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped module, which reads it in forward, unless HetFSDP has
        it itself.
        """
        module = self.__dict__.get("_modules", {}).get("module")
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if module is None or not self.__dict__.get("_is_built") or is_own:
            super().__setattr__(name, value)
            return
        if isinstance(value, nn.Module | nn.Parameter) or any(
            name in held for held in (module._parameters, module._modules, module._buffers)
        ):
            self._refuse(
                f"{name!r} is a parameter, buffer or module of the wrapped model, which is "
                f"sharded as it was. Set it before wrapping; model.module.{name} has the one "
                "that is used"
            )
        setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        """The inverse of setting an attribute."""
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and name not in self.__dict__ and name in module.__dict__:
            delattr(module, name)
            return
        super().__delattr__(name)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on every module; it may change anything but parameters."""
        with self._peers.guard("model.apply"):
            with_stand_ins("apply", lambda: self.module.apply(fn), self._flats)
            fn(self)
        return self

    def extra_repr(self) -> str:
        """The position of this rank, and what the plan assigns to each rank."""
        ranks = [
            f"{rank.rank_batch_size} samples, {rank.state_share:.0%} of the state"
            for rank in self.plan.ranks
        ]
        return f"position={self.position} of [{'; '.join(ranks)}], units={len(self.plan.units)}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Tried on tensors without elements: if fn returns them as they are, it changes nothing.
        for tensor in (*self.parameters(), *self.buffers()):
            empty = tensor.detach().new_empty((0,) * tensor.dim())
            if fn(empty) is not empty:
                self._refuse(
                    "its parameters cannot be moved or cast. Move or cast the module before "
                    "wrapping it, or use param_dtype"
                )
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that changes nothing: every backward adds the sum over all ranks to
        ``.grad``, which is what accumulating without synchronization and then with it gives.
        """
        return nullcontext()

    def share_memory(self) -> NoReturn:
        """Raises ``RuntimeError``: every rank has its own rows."""
        self._refuse(
            "its parameters cannot be shared with other processes. Start ranks instead"
        )

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Raises ``RuntimeError``: units are built for fixed trainable parameters."""
        self._refuse("requires_grad is fixed. Freeze and unfreeze parameters before wrapping")

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ``RuntimeError``: what units wait for cannot be compiled."""
        self._refuse(COMPILE_UNITS)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse(f"it cannot be copied, and so not by AveragedModel. {EMA_BY_HAND}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("it cannot be pickled. Save model.state_dict() instead, on every rank")

    def _refuse(self, what: str) -> NoReturn:
        with self._peers.guard("the program around HetFSDP"):
            raise RuntimeError(f"HetFSDP: {what}.")
        raise AssertionError("not reached")

    def _check_intact(self) -> None:
        """Raise if parameters or rows were replaced by others, or were frozen or unfrozen."""
        with torch._C.DisableTorchFunctionSubclass():  # each look is a call in Python otherwise
            for flat in self._flats:
                _check_flat(flat)


def _check_flat(flat: FlatTensor) -> None:
    storage = flat.flat_shard.untyped_storage().data_ptr()
    pairs = zip(flat.slots, flat.sharded_params, flat.unsharded_params, strict=True)
    for slot, param, unsharded in pairs:
        for module, attribute in slot.owners:
            held = module._parameters.get(attribute)
            if held is not param and held is not unsharded:
                raise RuntimeError(
                    f"{slot.fqn}: a module holds another parameter in its place, or none, "
                    "since HetFSDP was built, which would not be used. Write into the one "
                    "that is there (with torch.no_grad(): param.copy_(...)), or change the "
                    "model before wrapping it."
                )
        is_there = not param.numel() or (param.untyped_storage().data_ptr() == storage)
        if not is_there:
            raise RuntimeError(
                f"{slot.fqn}: its data were replaced (param.data = ..., "
                "vector_to_parameters), which HetFSDP does not see. Write into it: "
                "with torch.no_grad(): param.copy_(...)."
            )
        # Without gradients it does not matter: peft's disable_adapter() freezes.
        if torch.is_grad_enabled() and param.requires_grad != flat.is_trainable:
            raise RuntimeError(slot.fqn + WAS_FROZEN)


def _refuse_copies(module: nn.Module, peers: Peers) -> None:
    """Make deep copies and pickles of the wrapped modules raise, as those of HetFSDP do.

    A copy would have only this rank's rows, and compute with the parameters of the model.
    """

    def refuse(_: Any) -> NoReturn:
        with peers.guard("the program around HetFSDP"):
            raise RuntimeError(
                "HetFSDP: a module inside it cannot be copied or pickled, and so not by "
                "AveragedModel or torch.save(model): the copy would have this rank's rows, "
                "and compute with the parameters of the model. Copy it before wrapping, or "
                f"save or load model.state_dict(). {EMA_BY_HAND}."
            )
        raise AssertionError("not reached")

    for inner in module.modules():
        inner.__dict__.update(__deepcopy__=refuse, __reduce_ex__=refuse)


def guard_root(
    module: nn.Module, root: FSDPUnit, units: Sequence[FSDPUnit], peers: Peers
) -> None:
    """Make modules with parameters of the root raise outside of HetFSDP's forward, and copies
    of any module at all.
    """
    _refuse_copies(module, peers)
    in_units = {
        inner for unit in units for each in unit.modules for inner in each.module.modules()
    }
    owners = {owner for slot in root.slots for owner, _ in slot.owners}
    for fqn, inner in module.named_modules():
        if inner in owners and inner not in in_units:
            inner.forward = _guarded(fqn, inner.forward, root, peers)


def _guarded(
    fqn: str, forward: Callable[..., Any], root: FSDPUnit, peers: Peers
) -> Callable[..., Any]:
    @wraps(forward)
    def forward_inside(*args: Any, **kwargs: Any) -> Any:
        if root.state is not UnitState.UNSHARDED:
            with peers.guard():
                raise RuntimeError(
                    f"module {fqn!r} was called outside of HetFSDP's forward, where this rank "
                    f"has only some rows of its parameters. {CALL_THE_MODEL}"
                )
        return forward(*args, **kwargs)

    return forward_inside
