"""The methods of HetFSDP besides forward and backward.

Those of ``nn.Module``, for a module whose parameters are rows, are either correct or refused:
names are those of the plain module, calls that would move, copy or rewrite parameters are
refused by name, and everything else goes to the wrapped module (see module_proxy.py).  State
dicts and exchanges are collective.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from shardhet.comm import devices
from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.comm.groups import side_channel
from shardhet.comm.peers import Peers
from shardhet.fsdp.module_proxy import (
    keep_out_arguments,
    loads_by_itself,
    stand_ins,
    through,
    watch_inside,
    with_stand_ins,
)
from shardhet.fsdp.params.row_group import ShardGroup
from shardhet.fsdp.params.state import (
    LocalShard,
    gather_params,
    load_state_dict,
    sharded_state_dict,
)
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.flat import FlatTensor, check_intact
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitState
from shardhet.fsdp.step.calls import CALL_THE_MODEL
from shardhet.fsdp.step.runtime import Runtime
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
        return through(module, name, self._flats, self._peers.fail_together)

    def register_buffer(self, name: str, *_: Any, **__: Any) -> NoReturn:
        """Raises ``RuntimeError``, as its kin: the model and its states would not have it."""
        self._refuse(
            f"{name!r} cannot be added to it, where nothing would train or save it. Add it to "
            "the model before wrapping"
        )

    add_module = register_parameter = register_buffer

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
        with self._peers.fail_together("model.apply"):
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
        with self._peers.fail_together("the program around HetFSDP"):
            raise RuntimeError(f"HetFSDP: {what}.")
        raise AssertionError("not reached")

    def _check_intact(self) -> None:
        """Raise if parameters or rows were replaced by others, or were frozen or unfrozen."""
        with torch._C.DisableTorchFunctionSubclass():  # each look is a call in Python otherwise
            for flat in self._flats:
                check_intact(flat)


def _refuse_copies(module: nn.Module, peers: Peers) -> None:
    """Make deep copies and pickles of the wrapped modules raise, as those of HetFSDP do.

    A copy would have only this rank's rows, and compute with the parameters of the model.
    """

    def refuse(_: Any) -> NoReturn:
        with peers.fail_together("the program around HetFSDP"):
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
            with peers.fail_together():
                raise RuntimeError(
                    f"module {fqn!r} was called outside of HetFSDP's forward, where this rank "
                    f"has only some rows of its parameters. {CALL_THE_MODEL}"
                )
        return forward(*args, **kwargs)

    return forward_inside


_BY_THEMSELVES = (
    "load_state_dict: modules {} run code of their own when a state dict is loaded, but this "
    "rank passes none. Pass it on every rank."
)


class ModuleWithState(ModuleOfRows):
    """A base of HetFSDP: its state dicts, whole and in rows, and how far training is."""

    _comm: CommContext
    _control: Channel
    _runtime: Runtime
    position: int

    def own_tokens(self, tensor: Tensor, *, are_labels: bool = False) -> Tensor:
        """This rank's part of a tensor [samples, tokens, ...]: its tokens in a context group,
        else all.  Of ``labels`` that the model shifts these are the next tokens'.
        """
        tokens = self._runtime.tokens
        return tensor if tokens is None else tokens.cutter.own_tokens(tensor, are_labels)

    @property
    def rank(self) -> int:
        """This process's rank in the group; state dicts are whole on rank zero."""
        return self._control.rank_by_position[self.position]

    def fail_together(self, doing: str) -> AbstractContextManager[None]:
        """A context for work that other ranks wait for: if it raises, all ranks raise."""
        return self._peers.fail_together(doing)

    @property
    def grad_norm(self) -> Tensor | None:
        """What ``clip_grad_norm_`` has returned after this step, if it was called."""
        return self._runtime.rounds.grad_norm

    def skip_bad_loss(self, *, skips: bool) -> None:
        """Whether to return NaN, and set no gradients, where a loss is not finite; or raise."""
        self._runtime.raises_bad_loss = not skips

    @property
    def step(self) -> int:
        """The number of finished steps; set it to resume a run (dropout depends on it)."""
        return self._runtime.rounds.step

    @step.setter
    def step(self, step: int) -> None:
        self._runtime.rounds.end_step(step)

    def state_dict(  # type: ignore[override]  # whose overloads have nothing to choose
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Whole tensors under the model's own names on rank zero; {} elsewhere.  Collective."""
        with self._peers.fail_together("state_dict"):
            keep_out_arguments({"keep_vars": keep_vars})
            self._control.enter("state_dict", within_s=SECONDS_FOR_ALL_TO_COME)
            devices.give_back_cached(self._comm.device)  # NCCL connects the receiver with all
            receiver = self._control.rank_by_position.index(0)
            whole = gather_params(self._flats, self._comm, receivers=[receiver])
            if self.position != receiver:
                return {} if destination is None else destination
            # A method of the model's own may take no arguments.
            given: dict[str, Any] = {}
            if prefix or destination is not None:
                given = {"destination": destination, "prefix": prefix}
            with stand_ins(self._flats, whole):
                found: dict[str, Any] = self.module.state_dict(**given)
            live = {each.untyped_storage()._cdata for each in self.module.buffers()}
            for fqn, value in found.items():
                if isinstance(value, Tensor):
                    is_live = value.untyped_storage()._cdata in live
                    found[fqn] = value.detach().to("cpu", copy=is_live)
        return found

    @property
    def host_input_bytes(self) -> int:
        """Bytes set aside in the memory of the host for inputs of this rank's units."""
        return self._runtime.staging.nbytes

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of this rank's rows as they are gathered, on the device."""
        sent = [flat.sent for flat in self._flats]
        return sum(each.numel() * each.element_size() for each in sent)

    def gather_units(
        self, wanted: Callable[[str], bool] = lambda fqn: True
    ) -> Iterator[dict[str, Tensor]]:
        """Yield whole parameters by fqn, one unit at a time, in host memory of rank zero.

        Yields {} on other ranks, and for units without a ``wanted`` parameter.  A tied
        parameter has all its names, with one tensor.  Buffers are left out.  Collective.
        """
        for unit in (*self._runtime.units, self._runtime.root):
            flats = [f for f in unit.flats if any(wanted(n) for s in f.slots for n in s.fqns)]
            with self._peers.fail_together(f"gathering unit {unit.fqn!r}"):
                self._control.enter("gather_units")
                receiver = self._control.rank_by_position.index(0)
                yield gather_params(flats, self._comm, receivers=[receiver])

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | None, strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's rows of whole tensors.  Collective.

        All ranks pass the tensors, or one rank does and the others pass None.  Returns missing
        and unexpected names as torch does; raises ``ValueError`` for them if ``strict``.
        """
        with self._peers.fail_together("load_state_dict"):
            keep_out_arguments({"assign": assign})
            if by_themselves := loads_by_itself(self.module):
                if not state_dict:
                    raise ValueError(_BY_THEMSELVES.format(by_themselves))
                return self.module.load_state_dict(state_dict, strict)
            misfits = load_state_dict(
                self._flats,
                self.module,
                state_dict,
                comm=self._comm,
                control=self._control,
                strict=strict,
            )
        return _IncompatibleKeys(*misfits)

    def _watch_states(self, rows: ShardGroup) -> None:
        """Let hooks on the state dicts of this be those on the module's, and run with them, and
        state dicts inside be whole.
        """
        inside = vars(self.module)
        shared = [k for k in inside if "state_dict" in k and k.endswith("_hooks")]
        vars(self).update({name: inside[name] for name in shared})
        watch_inside(self.module, self._flats, rows)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *found: Any
    ) -> None:
        # Called by torch's walk through a module of which this is a part.
        part = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        assign = metadata.get("assign_to_params_buffers", False)
        misfits = self.load_state_dict(part, strict=False, assign=assign)
        for names, more in zip(found[1:3], misfits, strict=True):  # missing and unexpected
            names.extend(prefix + fqn for fqn in more)
        # The walk would go on to the parts of this and then call hooks, all of which is done.
        held = {name: vars(self)[name] for name in ("_modules", "_load_state_dict_post_hooks")}
        end = {0: lambda *_: vars(self).update(held)}
        vars(self).update(_modules={}, _load_state_dict_post_hooks=end)

    def sharded_state_dict(self) -> dict[str, LocalShard]:
        """This rank's rows of every parameter, sharing memory with the model."""
        return sharded_state_dict(self._flats)

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """All ranks' ``numbers``, by position.  Collective; no accelerator waits for it."""
        with self._peers.fail_together("exchange"):
            lengths = [int(n) for (n,) in self._control.enter("exchange", [len(numbers)])]
            if len(set(lengths)) > 1:
                raise ValueError(
                    f"exchange: ranks pass {lengths} numbers in plan order. Pass equally many."
                )
            return self._control.exchange(numbers)

    def exchange_objects(
        self, value: Any, *, call: str = "exchange", within_s: float | None = None
    ) -> list[Any]:
        """Every rank's ``value`` (anything picklable), by position.  Collective.

        Ranks that are in a different ``call`` all raise.  Raises ``TimeoutError`` if not all
        ranks come ``within_s``.
        """
        with self._peers.fail_together(call):
            self._control.enter(call, within_s=within_s)
            return self._control.exchange_objects(value)

    def side_channel(self) -> Channel:
        """A channel over gloo among the ranks of this model, for a thread.  Collective."""
        with self._peers.fail_together("side_channel"):
            return side_channel(self._control)
