"""Where tensors hold the batch, and how a unit's calls are cut into microbatches by it.

A *rule* says for one tensor among a unit's inputs or outputs what becomes of it when the unit
runs in microbatches.  Rules are found by running the model on batches of two sizes (probe.py);
nothing is decided by lengths that happen to be equal.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from shardhet.records.layout import Span

_BUILT_IN_CONTAINERS = (tuple, list, dict)
_LEAF = tree_flatten(None, is_leaf=lambda _: True)[1]


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Dimension ``dim`` of a tensor is ``outer`` x samples x ``inner`` long, in this order."""

    dim: int
    outer: int = 1
    inner: int = 1

    def length(self, num_samples: int) -> int:
        """Of the dimension."""
        return self.outer * num_samples * self.inner

    def narrow(self, tensor: Tensor, span: Span, num_samples: int) -> Tensor:
        """The samples ``span`` of ``num_samples``; a view if they lie together in memory.

        Else a copy with the strides that a batch of its own would have: dropout draws its mask
        in the order of memory.
        """
        start, numel = span.start * self.inner, span.numel * self.inner
        if self.outer == 1:
            piece = tensor.narrow(self.dim, start, numel)
            is_outermost = tensor.stride(self.dim) in (0, max(tensor.stride()))
            return piece if is_outermost else _as_dense(piece, tensor.stride())
        parts = tensor.unflatten(self.dim, (self.outer, num_samples * self.inner))
        return parts.narrow(self.dim + 1, start, numel).flatten(self.dim, self.dim + 1)

    def select(self, tensor: Tensor, samples: Iterable[int], num_samples: int) -> Tensor:
        """A copy with these of ``num_samples``, counted around."""
        index = torch.tensor([i % num_samples for i in samples], device=tensor.device)
        parts = tensor.unflatten(self.dim, (self.outer, num_samples, self.inner))
        return parts.index_select(self.dim + 1, index).flatten(self.dim, self.dim + 2)

    def put(self, whole: Tensor, piece: Tensor, span: Span, num_samples: int) -> None:
        """Write the samples ``span`` of ``whole``."""
        start, numel = span.start * self.inner, span.numel * self.inner
        if self.outer == 1:
            whole.narrow(self.dim, start, numel).copy_(piece)
            return
        parts = whole.unflatten(self.dim, (self.outer, num_samples * self.inner))
        sizes = (self.outer, span.numel * self.inner)
        parts.narrow(self.dim + 1, start, numel).copy_(piece.unflatten(self.dim, sizes))

    def new_whole(self, piece: Tensor, num_samples: int) -> Tensor:
        """Memory for all samples, in the order of dimensions that ``piece`` has."""
        return torch.empty_permuted(
            self.shape(piece.shape, num_samples),
            _order(piece.stride()),
            dtype=piece.dtype,
            device=piece.device,
        )

    def shape(self, shape: Sequence[int], num_samples: int) -> tuple[int, ...]:
        """``shape`` with so many samples."""
        return (*shape[: self.dim], self.length(num_samples), *shape[self.dim + 1 :])

    def fits(self, tensor: Tensor, num_samples: int) -> bool:
        """Whether the tensor has so many samples."""
        return tensor.dim() > self.dim and tensor.shape[self.dim] == self.length(num_samples)


def _order(strides: Sequence[int]) -> list[int]:
    """Dimensions from the outermost to the innermost in memory."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _as_dense(piece: Tensor, strides: Sequence[int]) -> Tensor:
    dense = torch.empty_permuted(
        piece.shape, _order(strides), dtype=piece.dtype, device=piece.device
    )
    return dense.copy_(piece)


class Join(Enum):
    """What becomes of an output that has no sample of its own."""

    SHARED = "shared"  # the same for every microbatch, so one is kept
    SUM = "sum"
    MEAN = "mean"  # weighted by samples


Rule = BatchAxis | Join


@dataclass(frozen=True, slots=True)
class Layout:
    """Which shape a tree of arguments or results has; its tensors are described by rules."""

    spec: TreeSpec
    kinds: tuple[Any, ...]  # per leaf: the number of dimensions of a tensor, else its type

    @property
    def is_positional(self) -> bool:
        """Whether it is that of (args, {}) with nothing nested in ``args``."""
        if self.spec.num_nodes != self.spec.num_leaves + 3:  # both, args, kwargs
            return False
        args, kwargs = self.spec.children()
        return kwargs.num_leaves == 0 and all(each.is_leaf() for each in args.children())

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: TreeSpec) -> "Layout":
        """What a flattened tree looks like."""
        return cls(spec, tuple(x.dim() if isinstance(x, Tensor) else type(x) for x in leaves))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitRules:
    """How one call of one module of a unit is cut up and put together again."""

    arguments: Layout
    inputs: tuple[Rule, ...]  # per tensor among the arguments; SHARED is passed whole
    results: Layout
    outputs: tuple[Rule, ...]  # per tensor among the results
    is_differentiable: tuple[bool, ...]  # per tensor among the results

    @property
    def is_batched(self) -> bool:
        """Whether there is anything to cut up; a call without is run once."""
        return any(isinstance(rule, BatchAxis) for rule in self.inputs)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves of nested tuples, lists, dicts and dataclasses; a container that keeps state of
    its own, such as a KV cache, is a leaf, for its copy would be another one.
    """
    if isinstance(tree, Tensor):  # what most units return, once for each microbatch
        return [tree], _LEAF
    return tree_flatten(tree, is_leaf=_is_opaque)


def named(leaves: Sequence[Any], arguments: Layout) -> list[tuple[str, Any]]:
    """Every leaf of (args, kwargs) with the name of the argument that it is."""
    tree = unflatten(leaves, arguments.spec)
    pairs = [
        (keystr(path), leaf)
        for path, leaf in tree_flatten_with_path(tree, is_leaf=_is_opaque)[0]
    ]
    return [
        (re.sub(r"^\[1\]\['(\w+)'\]", r"\1", re.sub(r"^\[0\]", "args", name)), leaf)
        for name, leaf in pairs
    ]


def known_rules(rules: VisitRules) -> dict[str, Rule]:
    """The rules of a call's arguments by name."""
    kinds = named(rules.arguments.kinds, rules.arguments)
    names = [name for name, kind in kinds if isinstance(kind, int)]
    return dict(zip(names, rules.inputs, strict=True))


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of ``flatten``."""
    return tree_unflatten(list(leaves), spec)


def _is_opaque(node: Any) -> bool:
    if isinstance(node, torch.Size):  # which would come back as a tuple
        return True
    if isinstance(node, _BUILT_IN_CONTAINERS):
        return False
    # Registered with pytree although it is no plain record: it has methods that change it.
    return callable(getattr(node, "update", None)) and not isinstance(node, Tensor)


def find_axis(small: Tensor, large: Tensor, sizes: tuple[int, int]) -> list[BatchAxis]:
    """Where two tensors of the same origin, for ``sizes`` samples, hold the batch.

    Empty if their shapes are equal; several where the shapes leave the order within the
    dimension open.  Raises ``ValueError`` where the shapes differ in another way.
    """
    if small.shape == large.shape:
        return []
    differing = [d for d in range(small.dim()) if small.shape[d] != large.shape[d]]
    if small.dim() != large.dim() or len(differing) != 1:
        raise ValueError("more than one dimension depends on the number of samples")
    (dim,) = differing
    factor, rest = divmod(small.shape[dim], sizes[0])
    if rest or factor * sizes[1] != large.shape[dim]:
        raise ValueError(f"dimension {dim} is no multiple of the number of samples")
    return [
        BatchAxis(dim, outer, factor // outer)
        for outer in range(1, factor + 1)
        if factor % outer == 0
    ]
