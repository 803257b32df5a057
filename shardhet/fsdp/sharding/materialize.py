"""Gives models built on the meta device memory and values, unit by unit.

A unit's initial values depend on (seed, unit) alone, so they are the same under every plan,
and no rank ever holds more than one whole unit.  Parameters from a ``RowSource`` are never held
whole: each rank reads only the rows that it stores.

Values are drawn on the host.  On GPUs the numbers of a seed depend on the number of
multiprocessors, so unlike GPUs would start from unlike models.  On one core 7 billion normal
numbers take 53 s, uniform ones 34 s; ``trunc_normal_`` takes 690 s divided by the cores.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from shardhet.fsdp.microbatch.surroundings import (
    microbatch_seed,
    restored_random_state,
    seed_generators,
)
from shardhet.fsdp.sharding.flat import ParamSlot
from shardhet.records.layout import Span

HOST = torch.device("cpu")


class RowSource(Protocol):
    """Supplies the values of parameters on the meta device, some rows at a time."""

    def has(self, fqn: str) -> bool:
        """Whether the source has all rows of this parameter; equal on all ranks."""

    def read_rows(self, fqn: str, rows: Span) -> Tensor:
        """The rows of the parameter, [rows.numel, ...]; a scalar is one row."""


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialize(
    slots: Sequence[ParamSlot],
    modules: Sequence[nn.Module],
    unit_fqn: str,
    *,
    seed: int,
    init_fn: Callable[[nn.Module], None] | None,
    row_source: RowSource | None = None,
) -> None:
    """Allocate and initialise a unit's meta tensors, except parameters in ``row_source``.

    They are on the host; ``move_buffers`` and the copies of rows bring them to the device.
    ``modules`` are all modules of the unit, including nested ones.  Those that have meta
    parameters or buffers of their own are passed to ``init_fn``, or without ``init_fn`` their
    ``reset_parameters`` is called.  Raises ``ValueError`` naming tensors that stay unfilled.
    """
    owners = [module for module in modules if _has_meta_tensors(module)]
    for slot in slots:
        if slot.current.is_meta and not (row_source and row_source.has(slot.fqn)):
            whole = _unfilled(slot.current)
            slot.put(nn.Parameter(whole, requires_grad=slot.is_trainable))
    for module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _unfilled(buffer)
    with restored_random_state(HOST), torch.no_grad():
        seed_generators(HOST, microbatch_seed(seed, 0, unit_fqn, 0, 0))
        for module in owners:
            if init_fn is not None:
                init_fn(module)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]  # has it: see above
    for module in owners:
        _check_filled(module, unit_fqn)


def _has_meta_tensors(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move the modules' own buffers to ``device``; one that several share stays one."""
    moved: dict[Tensor, Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                moved[buffer] = moved.get(buffer, buffer.to(device))
                module._buffers[name] = moved[buffer]


def _unfilled(tensor: torch.Tensor) -> torch.Tensor:
    mark = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full(tensor.shape, mark, dtype=tensor.dtype, device=HOST)


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _check_filled(module: nn.Module, unit_fqn: str) -> None:
    tensors = {**module._parameters, **module._buffers}
    unfilled = [
        name
        for name, tensor in tensors.items()
        # A tensor still on meta is a parameter shared with the root, which is filled after all
        # units, or one whose rows are read from the row source.
        if tensor is not None and not tensor.is_meta and _has_nan(tensor)
    ]
    if unfilled:
        raise ValueError(
            f"unit {unit_fqn!r}: {unfilled} of {type(module).__name__} came from the meta "
            "device and were not initialised. Give the class a reset_parameters(), or pass "
            "init_fn."
        )
