"""Which dimension of a tensor holds the batch, and how it splits calls into microbatches.

A *rule* says how one input of a unit is split, or one output joined, when the unit runs in
microbatches.  Rules are found by running the model on batches of two sizes (probe.py), not
from lengths that happen to be equal.

*Ragged* inputs have no row for each sample, though each of their rows belongs to one of them:
the patches of all images of a batch are one tensor, for instance.
"""

import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    MappingKey,
    TreeSpec,
    keystr,
    register_dataclass,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from shardhet.records.layout import Span

_BUILT_IN_CONTAINERS = (tuple, list, dict, UserDict)
_LEAF = tree_flatten(None, is_leaf=lambda _: True)[1]


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Dimension ``dim`` of a tensor is ``outer`` x samples x ``inner`` long, in this order."""

    dim: int
    outer: int = 1
    inner: int = 1
    # Its rows were all alike when it was found, so nobody knows which are whose.
    is_alike: bool = field(default=False, compare=False)

    def length(self, num_samples: int) -> int:
        """The length of the dimension for ``num_samples`` samples."""
        return self.outer * num_samples * self.inner

    def narrow(self, tensor: Tensor, span: Span, num_samples: int) -> Tensor:
        """The samples ``span`` of ``num_samples``; a view if they are adjacent in memory.

        Otherwise a copy with the strides of a batch of that size: dropout draws its mask in
        memory order.
        """
        piece = self.view(tensor, span, num_samples)
        if self.outer > 1:
            return piece.flatten(self.dim, self.dim + 1)
        is_outermost = tensor.stride(self.dim) in (0, max(tensor.stride()))
        return piece if is_outermost else _as_dense(piece, tensor.stride())

    def view(self, tensor: Tensor, span: Span, num_samples: int) -> Tensor:
        """The samples ``span`` of ``num_samples`` in place, in a shape of its own."""
        start, numel = span.start * self.inner, span.numel * self.inner
        if self.outer == 1:
            return tensor.narrow(self.dim, start, numel)
        parts = tensor.unflatten(self.dim, (self.outer, num_samples * self.inner))
        return parts.narrow(self.dim + 1, start, numel)

    def select(self, tensor: Tensor, samples: Iterable[int], num_samples: int) -> Tensor:
        """A copy with the given ``samples``, taken modulo ``num_samples``."""
        index = torch.tensor([i % num_samples for i in samples], device=tensor.device)
        parts = tensor.unflatten(self.dim, (self.outer, num_samples, self.inner))
        return parts.index_select(self.dim + 1, index).flatten(self.dim, self.dim + 2)

    def put(self, whole: Tensor, piece: Tensor, span: Span, num_samples: int) -> None:
        """Write ``piece`` to the samples ``span`` of ``whole``."""
        if self.outer > 1:
            piece = piece.unflatten(self.dim, (self.outer, span.numel * self.inner))
        self.view(whole, span, num_samples).copy_(piece)

    def new_whole(
        self, piece: Tensor, num_samples: int, device: torch.device | None = None
    ) -> Tensor:
        """An empty tensor for all samples, with the memory order of ``piece``."""
        return torch.empty_permuted(
            self.shape(piece.shape, num_samples),
            memory_order(piece.stride()),
            dtype=piece.dtype,
            device=piece.device if device is None else device,
        )

    def shape(self, shape: Sequence[int], num_samples: int) -> tuple[int, ...]:
        """``shape`` with ``num_samples`` samples."""
        return (*shape[: self.dim], self.length(num_samples), *shape[self.dim + 1 :])

    def fits(self, tensor: Tensor, num_samples: int) -> bool:
        """Whether the tensor has ``num_samples`` samples, and rows as it has to."""
        if tensor.dim() <= self.dim or tensor.shape[self.dim] != self.length(num_samples):
            return False
        return not self.is_alike or are_alike(tensor, self.dim)


def storage_of(tensor: Tensor) -> int:
    """What tells its memory apart from that of others, while it lives."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse and other layouts have none
        return id(tensor)


def are_alike(tensor: Tensor, dim: int) -> bool:
    """Whether rows of the dimension are all the same, and get no gradients that may differ."""
    same = tensor.narrow(dim, 0, 1).expand_as(tensor)
    return not tensor.requires_grad and torch.equal(tensor, same)


def memory_order(strides: Sequence[int]) -> list[int]:
    """Dimensions from the outermost to the innermost in memory."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _as_dense(piece: Tensor, strides: Sequence[int]) -> Tensor:
    dense = torch.empty_permuted(
        piece.shape, memory_order(strides), dtype=piece.dtype, device=piece.device
    )
    return dense.copy_(piece)


class Join(Enum):
    """How an output that has no batch dimension is joined over microbatches."""

    SHARED = "shared"  # equal for every microbatch; the first is kept
    SUM = "sum"
    MEAN = "mean"  # weighted by samples

    @property
    def dim(self) -> None:
        """None; what has none is whole for any samples."""

    def narrow(self, tensor: Tensor, span: Span, num_samples: int) -> Tensor:
        """The whole."""
        return tensor

    def select(self, tensor: Tensor, samples: Iterable[int], num_samples: int) -> Tensor:
        """The whole."""
        return tensor

    def put(self, whole: Tensor, piece: Tensor, span: Span, num_samples: int) -> None:
        """Write all of it."""
        whole.copy_(piece)

    def new_whole(self, piece: Tensor, num_samples: int, device: torch.device) -> Tensor:
        """An empty tensor like it."""
        return torch.empty(piece.shape, dtype=piece.dtype, device=device)

    def shape(self, shape: Sequence[int], num_samples: int) -> Sequence[int]:
        """As it is."""
        return shape

    def fits(self, tensor: Tensor, num_samples: int) -> bool:
        """So any tensor does."""
        return True


Rule = BatchAxis | Join


@dataclass(frozen=True)
class Layout:
    """The structure of a tree of arguments or results, without the shapes of its tensors."""

    spec: TreeSpec
    kinds: tuple[Any, ...]  # per leaf: the number of dimensions of a tensor, else its type

    @cached_property
    def is_positional(self) -> bool:
        """Whether the tree is (args, {}) with nothing nested in ``args``."""
        if self.spec.num_nodes != self.spec.num_leaves + 3:  # both, args, kwargs
            return False
        args, kwargs = self.spec.children()
        return kwargs.num_leaves == 0 and all(each.is_leaf() for each in args.children())

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: TreeSpec) -> "Layout":
        """The layout of a flattened tree."""
        return cls(spec, tuple([x.dim() if isinstance(x, Tensor) else type(x) for x in leaves]))


@dataclass(frozen=True, kw_only=True)
class BatchingRules:
    """How the arguments of one call of a module are split and its results joined."""

    arguments: Layout
    inputs: tuple[Rule, ...]  # per tensor among the arguments; SHARED is passed whole
    results: Layout
    outputs: tuple[Rule, ...]  # per tensor among the results
    is_differentiable: tuple[bool, ...]  # per tensor among the results
    counts: bool = False  # whether every call changes numbers among the module's attributes
    returns_numbers_of_samples: bool = False  # plain ones, which differ between microbatches
    is_for_one_sample: bool = False  # whether other rules might be right for several samples

    @cached_property
    def is_batched(self) -> bool:
        """Whether any argument is split; a call without one runs once."""
        return any(isinstance(rule, BatchAxis) for rule in self.inputs)

    def runs(self, microbatches: Sequence[Span]) -> Sequence[Span]:
        """The samples of each run, given those of each microbatch."""
        return microbatches if self.is_batched else [Span(0, microbatches[-1].stop)]


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves of nested tuples, lists, dicts and dataclasses.  A container with state of its
    own, such as a KV cache, is a leaf, because unflattening would make a copy of it.
    """
    if isinstance(tree, Tensor):  # the fast path: most units return one tensor
        return [tree], _LEAF
    leaves, spec = tree_flatten(tree, is_leaf=_is_opaque)
    for leaf in leaves:
        if isinstance(leaf, UserDict):
            _register_mapping(type(leaf))
        elif hasattr(leaf, "__dataclass_fields__") and _is_plain(leaf):
            register_dataclass(type(leaf))
        else:
            continue
        return flatten(tree)
    return leaves, spec


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by their place, such as ".'logits'"; others may be missing or not."""
    leaves, spec = flatten(tree)
    return dict(zip(_places(spec), leaves, strict=True))


def _places(spec: TreeSpec, place: str = "") -> Iterator[str]:
    if spec.is_leaf():
        yield place
        return
    children, keys = spec.children(), spec.context
    if not isinstance(keys, list) or len(keys) != len(children):  # of names, in dicts and like
        keys = range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _places(child, f"{place}.{key!r}")


def _register_mapping(kind: type[UserDict[str, Any]]) -> None:
    """Let tokenizers' and processors' outputs be containers, as dicts are."""
    register_pytree_node(
        kind,
        lambda each: (list(each.data.values()), list(each.data)),
        lambda values, names: kind(dict(zip(names, values, strict=True))),
        flatten_with_keys_fn=lambda each: (
            [(MappingKey(name), value) for name, value in each.data.items()],
            list(each.data),
        ),
    )


def _is_plain(leaf: Any) -> bool:
    """Whether a dataclass is nothing but its fields, so that it can be made from them."""
    is_made = all(field.init for field in fields(leaf)) and not hasattr(leaf, "__post_init__")
    return is_made and not isinstance(leaf, type) and not _is_opaque(leaf)


def named(leaves: Sequence[Any], arguments: Layout) -> list[tuple[str, Any]]:
    """Every leaf of (args, kwargs) with the name of its argument."""
    tree = unflatten(leaves, arguments.spec)
    pairs = [
        (keystr(path), leaf)
        for path, leaf in tree_flatten_with_path(tree, is_leaf=_is_opaque)[0]
    ]
    return [
        (re.sub(r"^\[1\]\['(\w+)'\]", r"\1", re.sub(r"^\[0\]", "args", name)), leaf)
        for name, leaf in pairs
    ]


def known_rules(rules: BatchingRules) -> dict[str, Rule]:
    """The rules of a call's arguments, by name."""
    kinds = named(rules.arguments.kinds, rules.arguments)
    names = [name for name, kind in kinds if isinstance(kind, int)]
    return dict(zip(names, rules.inputs, strict=True))


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of ``flatten``."""
    return tree_unflatten(list(leaves), spec)


def _is_opaque(node: Any) -> bool:
    if isinstance(node, torch.Size):  # unflattening would make it a tuple
        return True
    if isinstance(node, _BUILT_IN_CONTAINERS):
        return False
    # A container with methods that change it may be registered with pytree all the same.
    return callable(getattr(node, "update", None)) and not isinstance(node, Tensor)


def find_axis(small: Tensor, large: Tensor, sizes: tuple[int, int]) -> list[BatchAxis]:
    """The batch axes that explain the shapes of a tensor for ``sizes`` samples.

    Returns none if the shapes are equal, and several if the shapes do not determine the order
    within the dimension.  Raises ``ValueError`` if the shapes differ in another way.
    """
    if small.shape == large.shape:
        return []
    differing = [d for d in range(small.dim()) if small.shape[d] != large.shape[d]]
    if small.dim() != large.dim() or len(differing) != 1:
        raise ValueError("more than one dimension depends on the number of samples")
    (dim,) = differing
    factor, rest = divmod(small.shape[dim], sizes[0])
    if rest or factor * sizes[1] != large.shape[dim]:
        raise ValueError(f"dimension {dim} is not a multiple of the number of samples")
    return [
        BatchAxis(dim, outer, factor // outer)
        for outer in range(1, factor + 1)
        if factor % outer == 0
    ]


# Given a call's arguments by name: how many rows each sample has, in order.
CountRows = Callable[[Mapping[str, Any]], Sequence[int] | Tensor]

Rows = tuple[int, ...]  # by sample

_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Of the token that stands for a patch: inputs with rows for patches, and for what they form.
_INPUTS = {
    "image_token_id": (("pixel_values",), ("image_grid_thw",)),
    "video_token_id": (
        ("pixel_values_videos",),
        ("video_grid_thw", "second_per_grid_ts"),
    ),
}


def known_ragged(
    module: nn.Module, given: Mapping[str, CountRows] | None
) -> Mapping[str, CountRows]:
    """Those ``given``, or else those of a model of transformers, of families that have them."""
    if given is not None:
        return given
    config: Any = getattr(module, "config", None)
    found: dict[str, CountRows] = {}
    if getattr(config, "model_type", None) in _FAMILIES:
        area = config.vision_config.spatial_merge_size**2
        for token, (of_patches, of_grids) in _INPUTS.items():
            of = partial(_tokens, token_id=getattr(config, token))
            grids = partial(_grids, of=of, grid=of_grids[0], area=area)
            found |= {name: partial(_patches, of=of, area=area) for name in of_patches}
            found |= dict.fromkeys(of_grids, grids)
    return found


def _tokens(batch: Mapping[str, Any], token_id: int) -> Tensor:
    """By sample: how many of its tokens stand for patches."""
    if not isinstance(batch.get("input_ids"), Tensor):
        raise ValueError(
            "model(...): there is no input_ids, which says whose images pixel_values are. "
            "Pass it, or HetFSDP(ragged={'pixel_values': ..., 'image_grid_thw': ...})."
        )
    counts: Tensor = (batch["input_ids"] == token_id).sum(1)
    return counts


def _patches(batch: Mapping[str, Any], of: Callable[..., Tensor], area: int) -> Tensor:
    return of(batch) * area


def _grids(batch: Mapping[str, Any], of: Callable[..., Tensor], grid: str, area: int) -> Tensor:
    stops = (batch[grid].prod(1) // area).cumsum(0)  # in tokens, as they follow each other
    before = torch.searchsorted(stops, of(batch).cumsum(0).to(stops.device), right=True)
    return before.diff(prepend=before.new_zeros(1))


def rows_by_leaf(
    ragged: Mapping[str, CountRows],
    names: Sequence[str],
    leaves: Sequence[Any],
    num_samples: int,
) -> list[Rows | None]:
    """How many rows of each leaf belong to each sample; None for one that is not ragged.

    Raises ``ValueError`` if they are not as many as there are.
    """
    batch = dict(zip(names, leaves, strict=True))
    found: list[Rows | None] = []
    for name, leaf in zip(names, leaves, strict=True):
        if name not in ragged or not isinstance(leaf, Tensor) or not num_samples:
            found.append(None)
            continue
        rows = tuple(int(each) for each in ragged[name](batch))
        if len(rows) != num_samples or sum(rows) != len(leaf):
            raise ValueError(
                f"model(...): argument {name!r} has {len(leaf)} rows for {num_samples} samples "
                f"but these have {list(rows)} of them, as HetFSDP(ragged={{{name!r}: ...}}) or "
                "the tokens that stand for them say. Pass a sample's rows with the sample."
            )
        found.append(rows)
    return found
