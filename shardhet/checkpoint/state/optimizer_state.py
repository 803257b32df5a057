"""State of optimizers by the names of parameters, whatever their classes.

A state is a tensor of the local parameter's shape (rows, as the parameter's), a 0-d tensor or
a number (a scalar, as ``step``), or anything of tensors and plain values where one rank has the
whole parameter.  None counts as absent.  Anything else is refused.

States of other shapes than their parameter's, which one rank has whole, are kept as tensors by
name.  The factors of Adafactor are tensors, the sides of Shampoo and SOAP lists of them.  A
list, tuple, dict or text is a text (its JSON) and its tensors, named ``<state>/<i>``.  Tensors
of a class of their own, such as torchao's 8-bit states, are refused: they would be plain again.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardhet.checkpoint.format.entries import STATE, HeldState
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.format.values import decode, encode
from shardhet.checkpoint.state.parts import ModelPart, as_rows
from shardhet.fsdp.params.optimizer_check import ROWS


def flattened(states: Mapping[Any, Any], what: str) -> dict[str, Any]:
    """``states`` with texts for lists, tuples and dicts, and their tensors.

    Raises ``CheckpointError`` for what is in them beside plain values and tensors.
    """
    flat: dict[str, Any] = {}
    for name, value in states.items():
        if type(value) not in (list, tuple, dict, str):
            flat[str(name)] = value
            continue
        number = len(flat)

        def keep(tensor: Tensor, name: str = str(name), number: int = number) -> str:
            key = f"{name}/{len(flat) - number}"
            flat[key] = tensor
            return key

        document = encode(value, f"{what}: state {name!r}", keep)
        flat[str(name)] = json.dumps(document)
    return flat


def is_inner(name: str, states: Mapping[str, Any]) -> bool:
    """Whether it is a tensor of a list, tuple or dict among these states."""
    return name.rpartition("/")[0] in states


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flattened``."""
    return {
        name: decode(json.loads(value), flat.__getitem__) if isinstance(value, str) else value
        for name, value in flat.items()
        if not isinstance(flat.get(name.rpartition("/")[0]), str)
    }


# Options that torch's schedulers add to groups: an optimizer may be made before they are.
OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
)


# How a rank computes the same step, which depends on where its rows are.
OF_RANKS = frozenset(("foreach", "fused"))

CLASSES = ", "  # between the classes of groups

Optimizers = optim.Optimizer | Sequence[optim.Optimizer] | None  # of one model


def listed(optimizers: Optimizers) -> list[optim.Optimizer]:
    """All of them, or none."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, optim.Optimizer) else list(optimizers)


def class_of_groups(optimizers: Sequence[optim.Optimizer]) -> str | None:
    """The class of all groups, or that of each, separated by commas; None without any."""
    names = [type(each).__name__ for each in optimizers for _ in each.param_groups]
    return (names[0] if len(set(names)) == 1 else CLASSES.join(names)) if names else None


def trained_params(optimizers: Sequence[optim.Optimizer]) -> list[nn.Parameter]:
    """The parameters of all groups, in their order."""
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


def part_by_param(parts: Sequence[ModelPart]) -> dict[nn.Parameter, ModelPart]:
    """The part of every parameter that an optimizer may hold."""
    return {part.param: part for part in parts if part.param is not None}


def groups_of(
    optimizers: Sequence[optim.Optimizer], parts: Sequence[ModelPart]
) -> tuple[dict[str, Any], ...]:
    """The options of every group, and the fqns of its parameters as "params".

    Raises ``CheckpointError`` for parameters of another model or of two optimizers, and for
    options that are no plain values.
    """
    known = part_by_param(parts)
    groups: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, group in enumerate(g for each in optimizers for g in each.param_groups):
        fqns = []
        for i, param in enumerate(group["params"]):
            if param not in known:
                raise CheckpointError(
                    f"optimizer: parameter {i} of group {number}, {tuple(param.shape)}, is not "
                    "one of the model's. Make the optimizer from model.parameters()."
                )
            fqns.append(known[param].fqn)
        if twice := seen.intersection(fqns):
            raise CheckpointError(
                f"optimizer: {some(sorted(twice))} are in two optimizers, whose states would "
                "have one name. Give each parameter to one optimizer, or save with "
                "optimizer=None."
            )
        seen.update(fqns)
        options = {
            name: _plain_option(value, f"optimizer: {name} of group {number}")
            for name, value in group.items()
            if name not in ("params", ROWS)
        }
        groups.append({**options, "params": fqns})
    return tuple(groups)


def _plain_option(value: Any, where: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()  # a learning rate that a captured graph reads
    if isinstance(value, tuple | list):
        return type(value)(_plain_option(each, where) for each in value)
    if type(value) in (bool, int, float, str, type(None)):
        return value
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which a checkpoint does not hold. Keep it "
        "outside of the optimizer's groups."
    )


def states_of(
    optimizers: Sequence[optim.Optimizer], parts: Sequence[ModelPart]
) -> tuple[dict[str, dict[str, HeldState]], dict[str, Tensor]]:
    """What is known of every state by fqn and name, and the rows by the name of the entry.

    Raises ``CheckpointError`` naming optimizer, parameter and state for one of another shape.
    """
    held: dict[str, dict[str, HeldState]] = {}
    rows: dict[str, Tensor] = {}
    each_part = part_by_param(parts).items()
    for optimizer, (param, part) in product(optimizers, each_part):
        states = optimizer.state.get(param, {})
        if part.is_whole:
            states = flattened(states, type(optimizer).__name__)
        for name, value in states.items():
            if value is None:
                continue
            what = f"{type(optimizer).__name__}: state {name!r}"
            state = _held(value, part, what)
            if "." in str(name):
                raise CheckpointError(
                    f"{what} has a dot in its name, which names of a checkpoint are joined "
                    "with. Rename it."
                )
            held.setdefault(part.fqn, {})[str(name)] = state
            if state.scalar is None:
                rows[f"{STATE}{part.fqn}.{name}"] = as_rows(value)
    return held, rows


def _held(value: Any, part: ModelPart, what: str) -> HeldState:
    is_plain = isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
    if is_plain and value.layout == torch.strided:
        if value.dim() == 0:
            return HeldState(str(value.dtype), value.item())
        if value.shape == part.tensor.shape:
            return HeldState(str(value.dtype))
        if part.is_whole:
            return HeldState(str(value.dtype), shape=tuple(value.shape))
        shape = f"{tuple(value.shape)} of a parameter of {tuple(part.tensor.shape)}"
    elif type(value) in (bool, int, float, complex) or (part.is_whole and type(value) is str):
        return HeldState(None, value)
    else:
        shape = f"of type {type(value).__name__}"
    raise CheckpointError(
        f"{what} of {part.fqn} is {shape}. A checkpoint holds states that have the shape of "
        "their parameter, and single numbers; others only of parameters that one rank stores "
        "whole (whole_matrices=True). Use an optimizer with such states, or save with "
        "optimizer=None."
    )


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state of one parameter as read: rows like the local parameter's, a scalar, or a
    piece.
    """

    value: Any
    follows_param: bool  # its dtype was the parameter's, and is again


def restore(
    optimizers: Sequence[optim.Optimizer],
    parts: Sequence[ModelPart],
    states: Mapping[str, Mapping[str, StoredState]],
    options: Iterable[Mapping[str, Any]],
) -> None:
    """Give ``optimizers`` these states by fqn, and their groups these options, in order.

    Goes through the optimizer's own ``load_state_dict``, which puts everything on the device of
    the parameter.  That would also change every dtype to the parameter's; states that were
    kept in another one get it back.
    """
    known, of_groups = part_by_param(parts), iter(options)
    for optimizer in optimizers:
        _restore(optimizer, known, states, list(islice(of_groups, len(optimizer.param_groups))))


def _restore(
    optimizer: optim.Optimizer,
    known: Mapping[nn.Parameter, ModelPart],
    states: Mapping[str, Mapping[str, StoredState]],
    options: Sequence[Mapping[str, Any]],
) -> None:
    params = trained_params([optimizer])
    fqns = [known[param].fqn for param in params]
    numbers = iter(range(len(params)))
    groups = []
    for group, found in zip(optimizer.param_groups, options, strict=True):
        kept = {name: value for name, value in group.items() if name != "params"}
        given = {
            name: _like(value, kept.get(name))
            for name, value in found.items()
            if name not in OF_RANKS or name not in kept
        }
        groups.append({**kept, **given, "params": [next(numbers) for _ in group["params"]]})
    state = {
        i: nested({name: each.value for name, each in states[fqn].items()})
        for i, fqn in enumerate(fqns)
        if states.get(fqn)
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for param, fqn in zip(params, fqns, strict=True):
        flat = flattened(optimizer.state.get(param, {}), "") if fqn in states else {}
        for name, each in states.get(fqn, {}).items():
            if isinstance(each.value, Tensor) and not each.follows_param:
                flat[name] = each.value.to(device=flat[name].device)
        optimizer.state[param].update(nested(flat))


def _like(value: Any, current: Any) -> Any:
    """``value`` as a tensor where the option is one, as with captured graphs."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return value


def options_for(
    optimizers: Sequence[optim.Optimizer],
    parts: Sequence[ModelPart],
    saved: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The options of every group of ``optimizers``, by the names of its parameters.

    Groups may be others than those that were saved, if the options of all parameters in a
    group are the same.  Raises ``CheckpointError`` listing what does not fit.
    """
    known = part_by_param(parts)
    options_of = {
        fqn: {name: value for name, value in group.items() if name != "params"}
        for group in saved
        for fqn in group["params"]
    }
    found = []
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    for number, (optimizer, group) in enumerate(groups):
        each = _options_of_group([known[p] for p in group["params"]], options_of, number)
        _check_options(optimizer, each, number)
        found.append(each)
    mine = {fqn for param in trained_params(optimizers) for fqn in known[param].fqns}
    unexpected = sorted(options_of.keys() - mine)
    if unexpected:
        raise CheckpointError(
            f"optimizer: {some(unexpected)} were trained but are not in any group. Train "
            "the parameters that were trained."
        )
    return found


def check_classes(
    optimizers: Sequence[optim.Optimizer],
    parts: Sequence[ModelPart],
    saved: Sequence[Mapping[str, Any]],
    classes: str | None,
    folder: Path,
) -> None:
    """Raise unless the groups that were ``saved``, of these classes, have them again."""
    names = (classes or "").split(CLASSES)
    by_group = names * len(saved) if len(names) == 1 else names
    known = part_by_param(parts)
    mine = {
        fqn: type(each).__name__
        for each in optimizers
        for param in trained_params([each])
        if param in known
        for fqn in known[param].fqns
    }
    for group, name in zip(saved, by_group, strict=True):
        for fqn in group["params"]:
            if mine.get(fqn, name) != name:
                raise CheckpointError(
                    f"{folder}: it holds the state of {name}, not of {mine[fqn]}, for {fqn}. "
                    f"Make the optimizer {name}, or load with optimizer=None."
                )


def _options_of_group(
    parts: Sequence[ModelPart], options_of: Mapping[str, dict[str, Any]], number: int
) -> dict[str, Any]:
    """The options that all parameters of a group were saved with."""
    fqns = [next((fqn for fqn in part.fqns if fqn in options_of), part.fqn) for part in parts]
    missing = [fqn for fqn in fqns if fqn not in options_of]
    if missing:
        raise CheckpointError(
            f"optimizer: the checkpoint has no options for {some(missing)} of group "
            f"{number}. Train the parameters that were trained."
        )
    for fqn in fqns:
        if repr(options_of[fqn]) != repr(options_of[fqns[0]]):
            raise CheckpointError(
                f"optimizer: group {number} has {fqns[0]} and {fqn}, which were saved "
                "with different options. Make groups as they were."
            )
    return options_of[fqns[0]] if fqns else {}


def _check_options(optimizer: optim.Optimizer, found: Mapping[str, Any], number: int) -> None:
    """Raise if options are missing and others unknown: then it is another class.

    If options are only missing, or only unknown, the torch version differs, which is allowed.
    """
    defaults = optimizer.defaults.keys()
    missing = sorted(defaults - found.keys())
    unknown = sorted(found.keys() - defaults - OF_SCHEDULERS - optimizer.param_groups[0].keys())
    if found and missing and unknown:
        raise CheckpointError(
            f"optimizer: group {number} was saved with {some(unknown)} but "
            f"{type(optimizer).__name__} has {some(missing)}. Use the optimizer it was "
            "trained with."
        )


def some(names: Iterable[str], most: int = 12) -> str:
    """The names, not too many of them."""
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
