"""Joins the outputs of a visit's microbatches, and the gradients of its inputs."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    BatchingRules,
    Join,
    Layout,
    Rule,
    flatten,
    storage_of,
    unflatten,
)
from shardhet.fsdp.probing.comparing import Law
from shardhet.records.layout import Span


def spans_of(microbatch_sizes: Sequence[int]) -> list[Span]:
    """The samples of each microbatch within the rank's batch."""
    stops = accumulate(microbatch_sizes)
    return [Span(b - n, b) for n, b in zip(microbatch_sizes, stops, strict=True)]


class Joined:
    """The joined outputs of a visit's microbatches.

    Outputs with a batch dimension are concatenated, ``SUM`` and ``MEAN`` outputs are added up,
    and of ``SHARED`` outputs that of the first microbatch is kept.
    """

    def __init__(self, unit_fqn: str, spans: Sequence[Span], rules: BatchingRules) -> None:
        self.tensors: list[Tensor] = []
        self._unit_fqn = unit_fqn
        self._spans = spans
        self._num_samples = spans[-1].stop
        self._rules = rules
        self._layout: Layout | None = None  # of the first microbatch's output
        self._leaves: list[Any] = []  # tensors replaced by None
        self._has_one = False  # the output is a single tensor
        self._where: list[int] = []  # indices of the tensors among the leaves

    @torch.no_grad()
    def add(self, microbatch: int, output: Any) -> list[Tensor]:
        """Add the output of one microbatch; return its tensors."""
        is_one = microbatch and self._has_one and isinstance(output, Tensor)
        if is_one and output.dim() == self.tensors[0].dim():
            self._put(microbatch, [output])
            return [output]
        leaves, spec = flatten(output)
        layout = Layout.of(leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if microbatch == 0:
            self._begin(leaves, layout, constants, tensors)
            return tensors
        if self._rules.returns_numbers_of_samples:
            raise Law.ADDS_UP.error(
                f"unit {self._unit_fqn!r} returns a plain number that depends on how many "
                "samples it is given, or on which (len(x), perhaps)"
            )
        if layout != self._layout or not _same(constants, self._leaves):
            raise Law.ALIKE.error(
                f"unit {self._unit_fqn!r}: microbatches 0 and {microbatch} return different "
                f"structures or non-tensor values: {self._leaves} and {constants}"
            )
        self._put(microbatch, tensors)
        return tensors

    def _put(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        span = self._spans[microbatch]
        for i, (tensor, rule) in enumerate(zip(tensors, self._rules.outputs, strict=True)):
            check_fits(tensor, rule, span.numel, self._unit_fqn, "an output")
            if isinstance(rule, BatchAxis):
                rule.put(self.tensors[i], tensor, span, self._num_samples)
            elif rule is not Join.SHARED:
                self.tensors[i] += self._weighted(tensor, rule, span)
            elif not self._rules.is_differentiable[i]:
                self._check_is_shared(self.tensors[i], tensor)

    def _check_is_shared(self, first: Tensor, other: Tensor) -> None:
        is_same = torch.allclose if first.is_floating_point() else torch.equal
        if first.data_ptr() != other.data_ptr() and not is_same(first, other):
            raise Law.ALIKE.error(
                f"unit {self._unit_fqn!r}: an output of shape {tuple(first.shape)} without a "
                "dimension for the samples differs between microbatches (a largest length, "
                "perhaps)"
            )

    def _begin(
        self, leaves: list[Any], layout: Layout, constants: list[Any], tensors: list[Tensor]
    ) -> None:
        if layout != self._rules.results:
            raise Law.ALIKE.error(f"unit {self._unit_fqn!r} returns {_shapes(leaves)}")
        self._layout, self._leaves = layout, constants
        self._where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._has_one = layout.spec.is_leaf() and len(tensors) == 1
        self.tensors = [
            self._first(t, rule) for t, rule in zip(tensors, self._rules.outputs, strict=True)
        ]

    def _first(self, tensor: Tensor, rule: Rule) -> Tensor:
        span = self._spans[0]
        if len(self._spans) == 1:
            return tensor.detach()
        check_fits(tensor, rule, span.numel, self._unit_fqn, "an output")
        if isinstance(rule, BatchAxis):
            joined = rule.new_whole(tensor, self._num_samples)
            rule.put(joined, tensor, span, self._num_samples)
            return joined
        return self._weighted(tensor.detach(), rule, span).clone()

    def _weighted(self, tensor: Tensor, rule: Rule, span: Span) -> Tensor:
        return tensor * (span.numel / self._num_samples) if rule is Join.MEAN else tensor

    def detached_from(self, inputs: Sequence[Tensor], storages: frozenset[int]) -> list[Tensor]:
        """The joined tensors; one that shares memory with inputs or ``storages`` is copied."""
        shared = set(map(storage_of, inputs)) | storages
        self.tensors = [t.clone() if storage_of(t) in shared else t for t in self.tensors]
        return self.tensors

    def pieces_of(self, microbatch: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the microbatch's tensors, given those of the joined ones."""
        return [
            None if grad is None else self._piece(microbatch, grad, rule)
            for grad, rule in zip(grads, self._rules.outputs, strict=True)
        ]

    def _piece(self, microbatch: int, grad: Tensor, rule: Rule) -> Tensor | None:
        span = self._spans[microbatch]
        if len(self._spans) == 1:
            return grad
        if isinstance(rule, BatchAxis):
            return rule.narrow(grad, span, self._num_samples)
        if rule is Join.SHARED:  # the first microbatch's output was kept, so it gets all
            return grad if microbatch == 0 else None
        return self._weighted(grad, rule, span)

    def as_returned(self, tensors: Sequence[Tensor]) -> Any:
        """The output that the unit's caller gets."""
        assert self._layout is not None
        leaves = list(self._leaves)
        for i, tensor in zip(self._where, tensors, strict=True):
            leaves[i] = tensor
        self.tensors = []
        return unflatten(leaves, self._layout.spec)


def check_fits(tensor: Tensor, rule: Rule, num_samples: int, unit_fqn: str, what: str) -> None:
    """Raise ``ValueError`` if the tensor does not have so many samples as the rule says."""
    if not rule.fits(tensor, num_samples):
        assert isinstance(rule, BatchAxis)
        raise Law.ALIKE.error(
            f"unit {unit_fqn!r}: {what} has shape {tuple(tensor.shape)} for {num_samples} "
            f"samples and not {rule.length(num_samples)} rows"
            f"{' that are alike' * rule.is_alike} in dimension {rule.dim}"
        )


class InputGrads:
    """Gradients of a visit's inputs, joined from those of its microbatches."""

    def __init__(
        self, spans: Sequence[Span], rules: Sequence[Rule], tensors: Sequence[Tensor]
    ) -> None:
        self._spans = spans
        self._num_samples = spans[-1].stop
        self._rules = rules
        self._tensors = tensors
        self._grads: list[Tensor | None] = [None] * len(tensors)

    @torch.no_grad()
    def add(self, microbatch: int, inputs: Sequence[Tensor]) -> None:
        """Add the gradients accumulated in ``inputs``, the leaves of the microbatch."""
        for i, leaf in enumerate(inputs):
            grad, rule = leaf.grad, self._rules[i]
            if grad is None:
                continue
            if len(self._spans) == 1:
                self._grads[i] = grad
            elif isinstance(rule, BatchAxis):
                rule.put(self._whole(i), grad, self._spans[microbatch], self._num_samples)
            else:
                sum_before = self._grads[i]
                self._grads[i] = grad if sum_before is None else sum_before + grad

    def _whole(self, i: int) -> Tensor:
        whole = self._grads[i]
        if whole is None:
            # Zeros, because some microbatches may have no gradient.
            whole = self._grads[i] = torch.zeros_like(self._tensors[i])
        return whole

    def result(self) -> list[Tensor | None]:
        """One gradient per input; None if no microbatch had one."""
        return self._grads


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # comparing arrays gives no single truth value
        return False


def _shapes(leaves: Sequence[Any]) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
