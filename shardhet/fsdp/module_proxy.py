"""Access through a HetFSDP to attributes and methods of its module, such as ``model.config``.

Attributes are passed through.  While a method runs, the module's parameters are replaced by
stand-ins: of the whole shapes, on the meta device, without values.  So ``num_parameters()``
counts the whole model.  ``configure_optimizers()`` gets this rank's rows, because stand-ins in
what a method returns are replaced by rows.  A method that reads or writes values is refused,
because it would have seen only some rows of each parameter.

Of the modules inside, ``state_dict`` and ``load_state_dict`` run with stand-ins that have the
whole values, gathered from all ranks.  Methods that save or merge parameters are refused.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME
from shardhet.fsdp.params.row_group import ShardGroup
from shardhet.fsdp.params.state import gather_params
from shardhet.fsdp.sharding.flat import FlatTensor

_RECOMPUTE = (
    "The plan decides what is recomputed in backward: Plan.by_hand(recompute=[...]), or let "
    "the planner choose"
)
_BEFORE = "It changes parameters. Call it on the module before wrapping it"
_MERGES = (
    "It adds whole adapters to weights, of which this rank has only some rows. Save the model "
    "with shardhet.hf.save_pretrained and merge what one process loads from there "
    "(peft.AutoPeftModel.from_pretrained(path).merge_and_unload())"
)
REFUSED = {
    "merge_adapter": _MERGES,
    "merge_and_unload": _MERGES,
    "gradient_checkpointing_enable": _RECOMPUTE,
    "gradient_checkpointing_disable": _RECOMPUTE,
    "enable_input_require_grads": _BEFORE,
    "resize_token_embeddings": _BEFORE,
    "tie_weights": _BEFORE,
    "init_weights": _BEFORE,
    "add_adapter": _BEFORE,
    "save_pretrained": (
        "This rank has only some rows of each parameter. Instead call on every rank: "
        "from shardhet.hf import save_pretrained; save_pretrained(model, path)"
    ),
    "push_to_hub": "Save the model with shardhet.hf.save_pretrained first, and push the folder",
}
# What torch.distributed.checkpoint.state_dict asks every module for, to read or write states.
_ASKED_FOR_STATES = "_fqn_modifiers"
_OF_ROWS = (
    "This rank has only some rows of parameters and of optimizers' states, which "
    "torch.distributed.checkpoint.state_dict takes for all. Instead call on every rank "
    "model.state_dict() and model.load_state_dict(state), or, with the optimizer, "
    "shardhet.checkpoint.save(model, optimizer, folder) and load"
)
# Of PEFT and transformers: they count elements of parameters.
COUNTS_INSIDE = ("get_nb_trainable_parameters", "num_parameters")
# They call the model as often as they like, with gradients disabled.
UNIT_BY_UNIT = ("generate",)
REFUSED_INSIDE = ("merge_adapter", "merge_and_unload", "save_pretrained", "push_to_hub")


_rows_by_module: "WeakKeyDictionary[nn.Module, ShardGroup]" = WeakKeyDictionary()


def around(module: nn.Module, call: str) -> Any:
    """The HetFSDP around a module that was given to ``call``, as Trainers give theirs to their
    callbacks.  Raises ``TypeError`` if there is none.
    """
    if (rows := _rows_by_module.get(module)) is None:
        raise TypeError(
            f"{call}: it was given a {type(module).__name__}, which no HetFSDP is around. "
            "Wrap the model first, or call the model's own method."
        )
    return rows.model()


class UnsupportedMethodError(RuntimeError):
    """Raised for a method of the wrapped module that cannot work under HetFSDP."""


def refuse(name: str, why: str, *_: Any, **__: Any) -> NoReturn:
    """Raise ``UnsupportedMethodError`` for the method ``name``, whatever it is given."""
    raise UnsupportedMethodError(f"model.{name}: cannot be called on a HetFSDP. {why}.")


def through(
    module: nn.Module, name: str, flats: Sequence[FlatTensor], guard: Callable[..., Any]
) -> Any:
    """The attribute ``name`` of ``module``; a method is wrapped to run with stand-ins."""
    value = getattr(module, name)
    # A PeftModel passes on those of the model inside.
    is_own = inspect.ismethod(value) and (value.__self__ is module or name in REFUSED)
    if not is_own:
        return value

    @wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        with guard(f"model.{name}"):
            if name in REFUSED:
                refuse(name, REFUSED[name])
            return with_stand_ins(name, lambda: value(*args, **kwargs), flats)

    return call


def with_stand_ins(name: str, call: Callable[[], Any], flats: Sequence[FlatTensor]) -> Any:
    """The result of ``call``, made while modules hold stand-ins without values.

    Raises ``UnsupportedMethodError`` if ``call`` needs the values.
    """
    with stand_ins(flats) as row_by_stand_in:
        versions = [each._version for each in row_by_stand_in]
        flags = [each.requires_grad for each in row_by_stand_in]
        try:
            result = call()
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error).lower():
                raise UnsupportedMethodError(_wants_values(name)) from error
            raise
        changed = [
            slot.fqn
            for flat in flats
            for slot in flat.slots
            if not any(slot.current is each for each in row_by_stand_in)
        ]
        if changed or [each._version for each in row_by_stand_in] != versions:
            raise UnsupportedMethodError(_wants_values(name))
        if [each.requires_grad for each in row_by_stand_in] != flags:
            refuse(name, "Freeze and unfreeze parameters before wrapping the model")
    return _with_rows(name, result, {id(s): rows for s, rows in row_by_stand_in.items()})


def watch_inside(root: nn.Module, flats: Sequence[FlatTensor], rows: ShardGroup) -> None:
    """Let no method of the modules inside take rows for the parameters when it saves them."""

    def refuse_on_all(name: str, why: str) -> None:
        with rows.peers.fail_together("the program around HetFSDP"):
            refuse(name, why)

    _rows_by_module[root] = rows
    for fqn, module in root.named_modules():
        module.__dict__[_ASKED_FOR_STATES] = partial(refuse_on_all, _ASKED_FOR_STATES, _OF_ROWS)
        for name in REFUSED_INSIDE:
            if callable(getattr(module, name, None)):
                module.__dict__[name] = partial(refuse, name, REFUSED[name])
        for name in COUNTS_INSIDE:
            method = getattr(module, name, None)
            if callable(method):
                module.__dict__[name] = partial(_counted, method, name, flats)
        for name in UNIT_BY_UNIT:
            if callable(method := getattr(module, name, None)):
                module.__dict__[name] = partial(_unit_by_unit, method, rows)
        for name in ("state_dict", "load_state_dict"):
            method = getattr(module, name)
            module.__dict__[name] = partial(_with_whole, method, name, fqn, flats, rows)


def _counted(
    count: Callable[..., Any], name: str, flats: Sequence[FlatTensor], *args: Any, **kwargs: Any
) -> Any:
    """The result of ``count`` for whole parameters, whose values it does not need."""
    return with_stand_ins(name, lambda: count(*args, **kwargs), flats)


def _unit_by_unit(
    method: Callable[..., Any], rows: ShardGroup, *args: Any, **kwargs: Any
) -> Any:
    """The result of ``method``, which calls units outside of model(...).  Collective, unless it
    is called by the model itself, or by another such method.
    """
    with rows.model().unit_by_unit(if_outside=True):  # type: ignore[union-attr]
        return method(*args, **kwargs)


def _with_whole(
    method: Callable[..., Any],
    name: str,
    fqn: str,
    flats: Sequence[FlatTensor],
    rows: ShardGroup,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The result of ``method`` of the module ``fqn``, with whole parameters.  Collective."""
    inside = {*method.__self__.modules()}  # type: ignore[attr-defined]
    there = [
        flat
        for flat in flats
        for slot, *held in zip(
            flat.slots, flat.sharded_params, flat.unsharded_params, strict=True
        )
        if any(slot.current is each for each in held)
        and any(owner in inside for owner, _ in slot.owners)
    ]
    if not there:  # the method of a module around it has gathered them
        return method(*args, **kwargs)
    there, comm = list(dict.fromkeys(there)), rows.comm
    with rows.peers.fail_together(name):
        keep_out_arguments(kwargs)
        mine = [1 + crc32(fqn.encode())]  # 0 is that of HetFSDP itself
        if any(
            row != mine
            for row in rows.control.enter(name, mine, within_s=SECONDS_FOR_ALL_TO_COME)
        ):
            raise ValueError(
                f"{name}: this rank called it for the module {fqn!r}, another rank for another "
                "module. Call it for the same modules in the same order on every rank."
            )
        everyone = range(rows.control.world_size)
        with stand_ins(there, gather_params(there, comm, receivers=everyone)):
            result = method(*args, **kwargs)
            for flat in there if name == "load_state_dict" else ():
                for i, slot in enumerate(flat.slots):
                    flat.store_rows(i, slot.current)
    return result


def keep_out_arguments(given: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for arguments of torch's state dicts that are not supported."""
    for name, why in (
        ("keep_vars", "The tensors are gathered copies, not parameters"),
        ("assign", "Rows are written in place"),
    ):
        if given.get(name):
            raise TypeError(f"HetFSDP: {name}=True is not possible. {why}. Leave it out.")


def loads_by_itself(module: nn.Module) -> list[str]:
    """Modules whose own code, not torch's, takes part when a state dict is loaded."""

    def is_own(each: nn.Module) -> bool:
        methods = (type(each).load_state_dict, each._load_from_state_dict, each.set_extra_state)
        return any(not method.__module__.startswith("torch.nn.modules.") for method in methods)

    return [
        fqn
        for fqn, each in module.named_modules()
        if each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks or is_own(each)
    ]


@contextmanager
def stand_ins(
    flats: Sequence[FlatTensor], whole: Mapping[str, Tensor] = MappingProxyType({})
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """A context in which modules hold stand-ins; yields the rows by stand-in.

    Those with a name in ``whole`` have its values; others have none.
    """
    seen = [(slot, slot.current) for flat in flats for slot in flat.slots]
    rows_by_stand_in: dict[nn.Parameter, nn.Parameter] = {}
    for flat in flats:
        for slot, rows in zip(flat.slots, flat.sharded_params, strict=True):
            empty = torch.empty(slot.shape, dtype=flat.orig_dtype, device="meta")
            values = whole.get(slot.fqn, empty)
            stand_in = nn.Parameter(values, requires_grad=rows.requires_grad)
            stand_in.__dict__.update(rows.__dict__)
            rows_by_stand_in[stand_in] = rows
            slot.put(stand_in)
    try:
        yield rows_by_stand_in
    finally:
        for slot, param in seen:
            slot.put(param)


def _with_rows(name: str, result: Any, row_by_id: dict[int, nn.Parameter]) -> Any:
    """``result`` with stand-ins replaced by rows."""
    if isinstance(result, torch.optim.Optimizer):
        for group in result.param_groups:
            group["params"] = [row_by_id.get(id(param), param) for param in group["params"]]
        return result
    if inspect.isgenerator(result):
        result = list(result)
    result = tree_map_only(Tensor, lambda tensor: row_by_id.get(id(tensor), tensor), result)
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(result)):
        raise UnsupportedMethodError(_wants_values(name))
    return result


def _wants_values(name: str) -> str:
    return (
        f"model.{name}: reads or writes parameters, of which this rank has only some rows. "
        "Call it inside the model's forward, or on the plain module: before wrapping it, or "
        "after loading model.state_dict() into it."
    )
