"""Which results of units reach which later calls of units, through code outside of them.

A stage of a pipeline computes a part of the calls of a forward.  What earlier calls returned is
handed over to it, if it reaches one of its own calls or a later one:

    call 0     embedding  ->  x0
    outside    mask = x0 != 0            depends on x0
    call 1     block(x0)  ->  x1         reached by x0
    call 2     block(x1, mask)  ->  x2   reached by x1 and x0

Cut between calls 1 and 2, x1 and x0 are handed over, and the mask is computed once more.  A
unit is a border: what it returns depends on nothing but itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from shardhet.fsdp.microbatch.batching import BatchAxis, Rule, VisitRules, flatten
from shardhet.fsdp.microbatch.modes import tensors_among

# What they return, or its shape, lets the program decide by values of their tensors.
_READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Returned(NamedTuple):
    """A tensor among the results of a unit's call."""

    place: int  # of the call in forward
    number: int  # among the tensors of the result


@dataclass(frozen=True, slots=True)
class Result:
    """What a call returned for a few samples, without the values of tensors."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # tensors are on the meta device
    rules: tuple[Rule, ...]  # per tensor
    is_differentiable: tuple[bool, ...]  # per tensor

    @property
    def examples(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def shape(self, index: int, num_samples: int) -> tuple[int, ...]:
        """The shape of a tensor for so many samples."""
        rule, example = self.rules[index], self.examples[index]
        if isinstance(rule, BatchAxis):
            return rule.shape(example.shape, num_samples)
        return tuple(example.shape)


class Flow:
    """Follows the results of units through one forward, while it runs."""

    def __init__(self) -> None:
        self.results: list[Result] = []  # by place
        self.reached: list[frozenset[Returned]] = []  # by place; the model's output is the last
        self._by_storage: dict[int, frozenset[Returned]] = {}
        self._kept: list[Tensor] = []  # an address may not be used again
        self._read: frozenset[Returned] = frozenset()  # by the program, to decide

    def reach(self, tensors: Sequence[Tensor]) -> None:
        """Note what reaches the next call, with these arguments, or the model's output."""
        self.reached.append(self._read.union(*map(self._of, tensors)))

    def give(self, output: Any, rules: VisitRules) -> None:
        """Note the result of the call."""
        leaves, spec = flatten(output)
        place = len(self.results)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for i, tensor in enumerate(tensors):
            self._add(tensor, frozenset({Returned(place, i)}))
        shapes = [_on_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.results.append(Result(spec, tuple(shapes), rules.outputs, rules.is_differentiable))

    def note(self, func: Callable[..., Any], given: Any, result: Any) -> None:
        """Note an operation outside of units."""
        found = frozenset[Returned]().union(*map(self._of, tensors_among(given)))
        if not found:
            return
        if any(tag in func.tags for tag in _READING):  # type: ignore[attr-defined]
            self._read |= found
        written = given if func._schema.is_mutable else ()  # type: ignore[attr-defined]
        for tensor in (*tensors_among(result), *tensors_among(written)):
            self._add(tensor, found)

    def _of(self, tensor: Tensor) -> frozenset[Returned]:
        return self._by_storage.get(_storage(tensor), frozenset())

    def _add(self, tensor: Tensor, values: frozenset[Returned]) -> None:
        self._kept.append(tensor)
        self._by_storage[_storage(tensor)] = self._of(tensor) | values


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse and other layouts have none
        return id(tensor)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
