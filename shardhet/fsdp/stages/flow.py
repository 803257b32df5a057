"""Which results of units reach which later calls of units, through code outside of them.

A stage of a pipeline computes a part of the calls of a forward.  What earlier calls returned is
handed over to it, if it reaches one of its own calls or a later one:

    call 0     embedding  ->  x0
    outside    mask = x0 != 0            depends on x0
    call 1     block(x0)  ->  x1         reached by x0
    call 2     block(x1, mask)  ->  x2   reached by x1 and x0

Cut between calls 1 and 2, x1 and x0 are handed over, and the mask is computed once more.  A
unit is a border: what it returns depends on nothing but itself.

Two marks travel with the results: ``SAMPLES`` with what is computed from the model's arguments,
through units too, so that a result without it is known to be the same on all ranks; and one for
each dropout outside of units, whose masks would differ if two stages computed it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from shardhet.fsdp.microbatch.batching import BatchingRules, Rule, flatten, storage_of
from shardhet.fsdp.microbatch.modes import FunctionMode, tensors_among

# What they return, or its shape, lets the program decide by values of their tensors.
_READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Returned(NamedTuple):
    """A tensor among the results of a unit's call, or a mark."""

    place: int  # of the call in forward; that of a mark is below 0
    number: int  # among the tensors of the result


SAMPLES = Returned(-1, 0)
DROPPED = -2  # the place of marks of dropout


@dataclass(frozen=True, slots=True)
class Result:
    """What a call returned for a few samples, without the values of tensors."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # tensors are on the meta device
    rules: tuple[Rule, ...]  # per tensor
    is_differentiable: tuple[bool, ...]  # per tensor
    is_same_on_all: bool  # computed without samples and random numbers

    @property
    def examples(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def shape(self, index: int, num_samples: int) -> tuple[int, ...]:
        """The shape of a tensor for so many samples."""
        return tuple(self.rules[index].shape(self.examples[index].shape, num_samples))


class Flow:
    """Follows the results of units through one forward, while it runs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.results: list[Result] = []  # by place
        self.reached: list[frozenset[Returned]] = []  # by place; the model's output is the last
        self.altered: set[Returned] = set()  # written, or given a hook, outside of units
        self._by_storage: dict[int, frozenset[Returned]] = {}
        self._results_by_storage: dict[int, set[Returned]] = {}  # that are, or lie, there
        self._kept: list[Tensor] = []  # an address may not be used again
        self._read: frozenset[Returned] = frozenset()  # by the program, to decide
        self._of_samples = {SAMPLES}  # results of units that depend on samples, too
        self._num_dropouts = 0
        self._is_random = False  # the call in progress
        for tensor in inputs:
            self._add(tensor, frozenset({SAMPLES}))

    def reach(self, tensors: Sequence[Tensor]) -> None:
        """Note what reaches the next call, with these arguments, or the model's output."""
        self.reached.append(self._read.union(*map(self._of, tensors)))
        self._is_random = False

    def draw(self) -> None:
        """Note that the call in progress draws random numbers."""
        self._is_random = True

    def give(self, output: Any, rules: BatchingRules) -> None:
        """Note the result of the call."""
        leaves, spec = flatten(output)
        place = len(self.results)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = [Returned(place, i) for i in range(len(tensors))]
        for tensor, value in zip(tensors, values, strict=True):
            self._add(tensor, frozenset({value}))
            self._results_by_storage.setdefault(storage_of(tensor), set()).add(value)
        given = self.reached[place]
        is_random = self._is_random or any(each.place == DROPPED for each in given)
        is_same = not (is_random or given & self._of_samples)
        if not is_same:
            self._of_samples |= set(values)
        shapes = [_on_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.results.append(
            Result(spec, tuple(shapes), rules.outputs, rules.is_differentiable, is_same)
        )

    def drop(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note a call of dropout outside of units."""
        mark = Returned(DROPPED, self._num_dropouts)
        self._num_dropouts += 1
        for each in results:
            self._add(each, frozenset({mark}).union(*map(self._of, tensors)))

    def read(self, tensor: Tensor) -> None:
        """Note that the program reads the tensor's values, outside of units."""
        self._read |= self._of(tensor)

    def alter(self, tensor: Tensor) -> None:
        """Note that code outside of units writes to the tensor, or gives it a hook."""
        self.altered |= self._results_by_storage.get(storage_of(tensor), set())

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
        return self._by_storage.get(storage_of(tensor), frozenset())

    def _add(self, tensor: Tensor, values: frozenset[Returned]) -> None:
        self._kept.append(tensor)
        self._by_storage[storage_of(tensor)] = self._of(tensor) | values


class Reads(FunctionMode):
    """Tells of what a program reads, and gives hooks to, by methods that are no operations."""

    def __init__(
        self, note_hook: Callable[[Tensor], None], note: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__()
        self._note, self._note_hook = note, note_hook

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._note and func.__name__ in ("tolist", "numpy", "__array__", "__dlpack__"):
            self._note(args[0])
        elif func is Tensor.register_hook:
            self._note_hook(args[0])
        return func(*args, **kwargs)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
