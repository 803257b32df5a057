"""Tensors without values, for what another stage has computed and does not hand over.

A stage runs the model's own forward, also the code outside of units that belongs to other
stages.  There the results of units are absent: operations on them give absent tensors of the
right shapes, which cost nothing.  Code that needs a value raises, and a stage raises where an
absent tensor reaches one of its units: a wrong value cannot come out.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardhet.fsdp.probing.watch import FACTORIES

MEND = (
    "Let one stage have all units that use it, or use the same code and the same kinds of "
    "arguments at every step."
)


class Absent(Tensor):
    """A shape, dtype and device."""

    _shape: Tensor  # on the meta device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def like(example: Tensor, device: torch.device) -> "Absent":
        """An absent tensor of the example's shape; the example is on the meta device."""
        made: Absent = torch.Tensor._make_wrapper_subclass(
            Absent,
            example.shape,
            strides=example.stride(),
            dtype=example.dtype,
            device=device,
        )
        made._shape = example
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # which has no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on shapes alone."""
        kwargs = kwargs or {}
        absent = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Absent))
        if func.__name__.split(".")[0] in FACTORIES:  # they use nothing but the shape
            return func(*tree_map(_filled, args), **tree_map(_filled, kwargs))
        _check_writes(func, args, kwargs)
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("meta")}
        try:
            result = func(*tree_map(_shape_of, args), **tree_map(_shape_of, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error).lower():
                _refuse(f"{func.__name__} asks for its values")
            raise
        if func._schema.is_mutable and isinstance(args[0], Absent):
            return args[0]
        device = absent.device

        def wrapped(leaf: Any) -> Any:
            return Absent.like(leaf, device) if isinstance(leaf, Tensor) else leaf

        return tree_map(wrapped, result)

    def __repr__(self) -> str:  # type: ignore[override]  # whose argument nobody passes
        """Its shape."""
        return f"Absent({tuple(self.shape)}, {self.dtype})"


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, Absent):
        return leaf._shape
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _filled(leaf: Any) -> Any:
    if not isinstance(leaf, Absent):
        return leaf
    return torch.zeros(1, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _check_writes(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise if the operation would write what is absent into a tensor that is not."""
    schema = func._schema  # type: ignore[attr-defined]
    for i, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[i] if i < len(args) else kwargs.get(argument.name)
        for each in tree_leaves(written):
            if isinstance(each, Tensor) and not isinstance(each, Absent):
                _refuse(f"{func.__name__} writes it into another tensor")


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"stages: {what} outside of units, but it is what a unit of another stage has "
        f"returned, which is not handed over. {MEND}"
    )
