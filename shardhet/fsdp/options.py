"""Checks what HetFSDP is given, before ranks meet; errors name the argument."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import chain, combinations
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardhet.comm import devices
from shardhet.fsdp.microbatch.signature import BatchDims
from shardhet.fsdp.params.optimizer_check import are_rows
from shardhet.fsdp.sharding.build import MixedPrecision
from shardhet.fsdp.surface import ModuleWithState
from shardhet.records.codec import meant
from shardhet.records.plan import Plan, plan_of

_DISPATCH = torch.Tensor.__torch_dispatch__  # of parameters that are plain memory


def _check_wrapped(module: Any) -> None:
    """Raise for what is no module, or is wrapped already."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"HetFSDP: {module!r} is no module. Give it an nn.Module, then the plan."
        )
    sharded = [fqn for fqn, p in module.named_parameters() if hasattr(p, "device_mesh")]
    if sharded:
        raise ValueError(
            f"HetFSDP: {sharded[0]} is a DTensor: the module is sharded already, perhaps by "
            "fully_shard. Give the plain module."
        )
    for fqn, param in module.named_parameters():
        kind = type(param)
        if nn.Parameter not in kind.__mro__ or kind.__torch_dispatch__ != _DISPATCH:
            raise ValueError(
                f"HetFSDP: {fqn} is a {kind.__name__}, a class of tensors whose meaning rows "
                "would not have (as torchao's quantized weights are). Make it a plain "
                "parameter, or one of a subclass of nn.Parameter, before wrapping."
            )
    if any(isinstance(m, ModuleWithState) for m in module.modules()) or any(
        map(are_rows, module.parameters())
    ):
        raise ValueError(
            "HetFSDP: the module, or a part of it, is wrapped already. Wrap the whole model "
            "once, with units= for its parts; redistribute(model, optimizer, plan) gives it "
            "another plan."
        )


def _check_no_aliasing(module: nn.Module) -> None:
    """Raise ``ValueError`` if a trainable parameter has elements that another tensor has, too.

    In one process a step of the one is a step of the other, but rows are copies.
    """
    tensors_by_storage = defaultdict[int, list[tuple[str, Tensor]]](list)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.layout is torch.strided and not is_lazy(tensor) and tensor.numel():
            tensors_by_storage[tensor.untyped_storage()._cdata].append((name, tensor))
    for tensors in tensors_by_storage.values():
        tensors.sort(key=lambda each: each[1].storage_offset())
        for (name, tensor), (other, after) in combinations(tensors, 2):
            if after.storage_offset() >= _elements(tensor).stop:
                continue
            if (tensor.requires_grad or after.requires_grad) and _overlap(tensor, after):
                raise ValueError(
                    f"HetFSDP: {name} and {other} have the same memory (.data = ....data, "
                    "perhaps) but are two tensors, of which a step would change one only. Let "
                    "them be one parameter (a.weight = b.weight), or compute the one from the "
                    "other in forward (F.linear(x, a.weight.T))."
                )


def _elements(tensor: Tensor) -> range:
    """From the first to the last place in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum(int(size - 1) * int(step) for size, step in steps)
    start = int(tensor.storage_offset())
    return range(start, start + reach + 1)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether any place in the storage of both, whose ranges overlap, is one of both."""
    if all(len(_elements(each)) <= each.numel() for each in (one, other)):
        return True
    return bool(torch.isin(_places(one), _places(other)).any())


def _places(tensor: Tensor) -> Tensor:
    """The place in its storage of every element."""
    reached = _elements(tensor)
    places = torch.arange(reached.start, reached.stop, device="cpu")
    return places.as_strided(tensor.shape, tensor.stride(), 0).flatten()


def checked(
    module: Any, given: Any, loss_fn: Any, seed: Any, param_dtype: Any, reduce_dtype: Any
) -> tuple[Plan, MixedPrecision]:
    """The plan that is ``given`` and the dtypes.

    Raises ``TypeError`` or ``ValueError`` for what cannot be wrapped, or in this way.
    """
    precision = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    _check_wrapped(module)
    plan = plan_of(given)
    _check_no_aliasing(module)
    for field in fields(precision):
        check_dtype(field.name, getattr(precision, field.name))
    computed = precision.param_dtype or next(
        (each.dtype for each in module.parameters() if each.is_floating_point()), None
    )
    held = plan.holds_for
    if held is not None and computed is not None:
        mismatch = held.mismatch(param_dtype=str(computed).removeprefix("torch."))
        there = f"torch.{held.param_dtype}"
        if mismatch is not None:
            raise ValueError(
                f"{mismatch}. Pass param_dtype={there} (to HetTrainer "
                f'options={{"param_dtype": {there}}}), or plan for {computed} (shardhet plan '
                "precision=FP32, BF16 or FP16)."
            )
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"HetFSDP: loss_fn is {loss_fn!r} but must be a function.")
    try:
        index(seed)
    except TypeError:
        raise ValueError(f"HetFSDP: seed is {seed!r} but must be a whole number.") from None
    return plan, precision


def check_dtype(name: str, dtype: Any) -> None:
    """Raise ``ValueError`` for a dtype that models are not computed in."""
    is_wide = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not None and not is_wide:
        raise ValueError(
            f"{name} is {dtype!r} but must be None, torch.float32, torch.bfloat16, "
            "torch.float16 or torch.float64."
        )


def device_for(device: Any, module: nn.Module) -> torch.device:
    """The device to train on, which may be given by its name.

    None is the accelerator that the module is on, or else this rank's, if there is one; a name
    without an index is this rank's.
    """
    try:
        given = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"HetFSDP: device is {device!r}, which is none: {error}") from None
    found = _device_of(module) if given is None else given
    if given is None and devices.is_on_host(found):
        return devices.of_this_rank()
    if found.index is None and not devices.is_on_host(found):
        own = devices.of_this_rank()
        return own if own.type == found.type else found
    return found


def _device_of(module: nn.Module) -> torch.device:
    devices = {t.device for t in (*module.parameters(), *module.buffers())} - {
        torch.device("meta")
    }
    if len(devices) > 1:
        raise ValueError(
            f"the module is on several devices: {sorted(map(str, devices))}. Move it to one "
            "device, or pass device."
        )
    return devices.pop() if devices else torch.device("cpu")


def batch_dims(given: Any, forward: Callable[..., Any]) -> BatchDims:
    """``batch_dim`` in plain numbers; raises ``ValueError`` naming what is none."""
    if not isinstance(given, Mapping):
        return _dim("batch_dim", given)
    params = inspect.signature(forward).parameters
    takes_any = any(
        each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in params.values()
    )
    for name in given:
        if not takes_any and name not in (*params, "loss_inputs"):
            raise ValueError(
                f"HetFSDP: batch_dim names {name!r}, which is no argument of the model's "
                f"forward{meant(str(name), params)}. It has {', '.join(params)}."
            )
    return {
        name: None if dim is None else _dim(f"batch_dim[{name!r}]", dim)
        for name, dim in given.items()
    }


def _dim(name: str, dim: Any) -> int:
    try:
        found = index(dim)
    except TypeError:
        found = -1
    if found < 0:
        raise ValueError(
            f"HetFSDP: {name} is {dim!r} but must be the dimension that holds the samples, "
            "counted from 0, or a dict with one for each argument (None: it has no samples)."
        )
    return found
