"""Which inputs of a unit are split into microbatches.

Those whose dim 0 is the rank's batch; but a ``[T, T]`` mask whose T happens to equal the
batch must not be split, and shapes cannot tell.  So while the visit order is found, every
operation outside of units is watched: what it makes of a batched tensor is batched.  An
input of the batch's length that was not made so is refused until the user names it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# They take only dtype and device from their tensor, neither values nor batch.
_FACTORIES = ("aten::new_empty", "aten::new_full", "aten::new_ones", "aten::new_zeros")


class BatchProvenance(TorchDispatchMode):
    """While active, follows the batch through everything that is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._from_batch = WeakIdKeyDictionary()
        self._is_paused = False

    def mark(self, tree: Any) -> None:
        """These tensors hold the batch in dim 0."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._from_batch[leaf] = True

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor was computed from a marked one."""
        return tensor in self._from_batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside a unit nothing is followed.

        The mode is off there and does not only look away: torch.compile passes code by, for
        good, that it first meets under any mode.
        """
        self._is_paused = True
        is_innermost = _get_current_dispatch_mode() is self
        try:
            with _pop_mode_temporarily() if is_innermost else nullcontext():
                yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; its results are batched if one of its inputs is."""
        result = func(*args, **(kwargs or {}))
        if not self._is_paused and not str(func).replace(".", "::").startswith(_FACTORIES):
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(map(self.knows, inputs)):
                self.mark(result)
        return result


class BatchRule:
    """What of a unit's arguments is split: by shape, by origin, or as the user says."""

    def __init__(
        self, *, batched: Sequence[str], unbatched: Sequence[str], buffers: Sequence[Tensor]
    ) -> None:
        self._batched = frozenset(batched)  # names of parameters of units' forwards
        self._unbatched = frozenset(unbatched)
        self._buffers = tuple(buffers)
        self._provenance: BatchProvenance | None = None  # while the order is found

    def follow(self, inputs: Any, num_samples: int) -> AbstractContextManager[Any]:
        """Around a module's forward: learn what is computed from its batched ``inputs``."""
        self._provenance = BatchProvenance()
        for leaf in _tensors(inputs):
            if leaf.dim() and leaf.shape[0] == num_samples:
                self._provenance.mark(leaf)
        return self._provenance

    def visit(self) -> AbstractContextManager[None]:
        """Around a unit's visit, inside of which nothing needs to be followed."""
        return self._provenance.paused() if self._provenance is not None else nullcontext()

    def end_visit(self, outputs: Any) -> None:
        """What a unit returns is batched."""
        if self._provenance is not None:
            self._provenance.mark(outputs)

    def end(self) -> None:
        """The module's forward is over."""
        self._provenance = None

    def passed_whole(
        self, unit_fqn: str, function: Callable[..., Any], num_samples: int, arguments: Any
    ) -> frozenset[int]:
        """Addresses of storages that are not to be split, whatever their shape.

        ``arguments`` are the positional and keyword arguments of ``function``.  Raises
        ``ValueError`` for one that has the batch's length but did not come from the batch.
        """
        whole = [*self._buffers, *_tensors(self._named(self._unbatched, function, arguments))]
        addresses = frozenset(t.untyped_storage().data_ptr() for t in whole)
        if self._provenance is None:
            return addresses
        trusted = {id(t) for t in _tensors(self._named(self._batched, function, arguments))}
        for tensor in _tensors(arguments):
            has_length = tensor.dim() > 0 and tensor.shape[0] == num_samples
            is_known = (
                self._provenance.knows(tensor)
                or id(tensor) in trusted
                or tensor.untyped_storage().data_ptr() in addresses
            )
            if has_length and not is_known and tensor.stride(0):
                raise ValueError(
                    f"unit {unit_fqn!r}: an input of shape {tuple(tensor.shape)} is as long "
                    f"as the rank's batch of {num_samples} but was not computed from it. Name "
                    "its parameter in HetFSDP(unbatched=[...]) if every microbatch needs all "
                    "of it, or in batched=[...] if it has one row per sample."
                )
        return addresses

    def _named(
        self, names: frozenset[str], function: Callable[..., Any], arguments: Any
    ) -> list[Any]:
        if not names:
            return []
        args, kwargs = arguments
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        return [value for name, value in bound.items() if name in names]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def first_length(tree: Any) -> int:
    """Dim 0 of the first tensor that has one; 0 where there is none."""
    return next((tensor.shape[0] for tensor in _tensors(tree) if tensor.dim()), 0)
