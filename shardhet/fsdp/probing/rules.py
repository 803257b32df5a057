"""Decides how a unit's inputs are split and its outputs joined, from its results for two and
for three samples; refuses what they do not determine.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from shardhet.fsdp.microbatch.batching import BatchAxis, Join, Rule, find_axis
from shardhet.fsdp.microbatch.layered import leaves_of
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.comparing import are_close, joined_like
from shardhet.fsdp.probing.watch import Refusal
from shardhet.records.layout import Span

SMALL, LARGE = 2, 3
SIZES = (SMALL, LARGE)
PARTS = (Span(0, SMALL), Span(SMALL, LARGE))
OTHER_PARTS = (Span(0, 1), Span(1, LARGE))
MAX_ATTEMPTS = 8

Axes = tuple[BatchAxis | None, ...]


class ArgumentsSeen(NamedTuple):
    """What one rank sees in the arguments of the model, one entry per argument."""

    factors: Sequence[int | None]  # by which an argument is longer than the batch
    batch_dims: Sequence[int | None]
    are_named: Sequence[bool]  # whether the user has said which dimension it is
    digests: Sequence[Hashable]
    are_ragged: tuple[bool, ...]

    @classmethod
    def of(cls, call: ModelCall) -> Self:
        """What is seen in those of ``call``."""
        are_ragged = tuple(each is not None for each in call.rows)
        factors = call.candidates()
        return cls(factors, call.batch_dims, call.are_named, call.digests(), are_ragged)


def possible_axes(seen: Sequence[ArgumentsSeen]) -> list[Axes]:
    """Which arguments may hold samples: first as their lengths suggest, then with one or two of
    them changed.

    ``seen`` is of the ranks that have samples.
    """
    dims, named = seen[0].batch_dims, seen[0].are_named
    if len({len(each.factors) for each in seen}) > 1:
        raise ValueError(
            f"model(...): ranks pass {[len(each.factors) for each in seen]} arguments. Call "
            "the model in the same way on every rank. Each entry of a list counts as one: pass "
            "tensors with a row for each sample instead."
        )
    if len({each.are_ragged for each in seen}) > 1:
        raise ValueError(
            "model(...): some ranks pass a ragged argument (HetFSDP(ragged=...)) and others do "
            "not. Pass one without rows where no sample has any: pixel_values[:0]."
        )
    # Without samples an argument is the same everywhere.
    differs = [
        len(set(column)) > 1 for column in zip(*(each.digests for each in seen), strict=True)
    ]
    factors = [set(column) for column in zip(*(each.factors for each in seen), strict=True)]
    likely = [
        BatchAxis(dim) if factor == {1} and dim is not None else None
        for factor, dim in zip(factors, dims, strict=True)
    ]
    first = next((i for i, axis in enumerate(likely) if axis is not None), 0)
    others: list[tuple[int, BatchAxis | None]] = []
    for i, (axis, dim, factor) in enumerate(zip(likely, dims, factors, strict=True)):
        if i == first or named[i] or dim is None:
            continue
        if axis is not None and not differs[i]:
            others.append((i, None))
        elif axis is None and len(factor) == 1 and min(factor) > 1:
            others.append((i, BatchAxis(dim, 1, min(factor))))
    changes = [*combinations(others, 1), *combinations(others, 2)][: MAX_ATTEMPTS - 1]
    return [
        tuple(dict(change).get(i, axis) for i, axis in enumerate(likely))
        for change in ((), *changes)
    ]


class RuleFinder:
    """Decides the rules of one call of a unit at a time.

    If ``splits`` is False, no rank has several microbatches and no rule can be wrong.
    """

    def __init__(self, *, splits: bool) -> None:
        self.is_unpredictable = False  # the call draws random numbers that cannot be fixed
        self.eps = 0.0  # of the narrowest dtype that the compared tensors were computed in
        self.has_mask = False  # an input of the call may choose which positions count
        self.undecided: list[int] = []  # indices of outputs of the call that are zero
        self._splits = splits

    def of_input(self, fqn: str, name: str, small: Tensor, large: Tensor) -> Rule:
        """The rule of an argument, given its values for the small and for the large batch."""
        what = f"unit {fqn!r}: its argument {name}"
        try:
            axes = find_axis(small, large, SIZES)
        except ValueError as error:
            return self._undecidable(
                f"{what} has shape {tuple(small.shape)} for {SMALL} samples and "
                f"{tuple(large.shape)} for {LARGE}: {error}. Compute it inside the unit, or "
                "let one rank compute all samples at once."
            )
        if not axes:
            if self._are_equal(small, large):
                return Join.SHARED
            return self._undecidable(
                f"{what} has no dimension for the samples, but its values depend on which "
                "samples are in the batch, so it differs between microbatches. Compute it "
                "inside the unit, or let one rank compute all samples at once."
            )
        fitting = [
            axis for axis in axes if self._are_equal(axis.narrow(large, PARTS[0], LARGE), small)
        ]
        if len(fitting) == 1 or (fitting and len(axes) == 1):
            return fitting[0]
        if fitting:
            return self._undecidable(
                f"{what} of shape {tuple(large.shape)} holds {axes[-1].outer} rows per sample, "
                "and their values do not tell in which order. Pass one row per sample and "
                "repeat it inside the unit, or let one rank compute all samples at once."
            )
        return self._undecidable(
            f"{what} of shape {tuple(large.shape)} depends for one sample on the other samples "
            "of the batch: code outside of units mixes samples, or the batch is in another "
            "dimension (HetFSDP(batch_dim=...)). Mix samples inside a unit, or let one rank "
            "compute all samples at once."
        )

    def of_output(
        self, fqn: str, index: int, small: Tensor, whole: Tensor, parts: Sequence[Tensor]
    ) -> Rule:
        """The rule of a result, given it for the small batch, the large one and its parts."""
        what = f"unit {fqn!r}: output {index}"
        try:
            axes: Sequence[Rule] = find_axis(small, whole, SIZES)
        except ValueError as error:
            return self._undecidable(
                f"{what} has shape {tuple(small.shape)} for {SMALL} samples and "
                f"{tuple(whole.shape)} for {LARGE}: {error}, so microbatches cannot be "
                "joined. Return one row per sample, or let one rank compute all samples at "
                "once."
            )
        if not parts:
            return axes[0] if axes and self._splits else Join.SHARED
        # A constant output fits both SHARED and MEAN.  A scalar is taken for a MEAN, because it
        # may be a mean over samples that happen to have equal values.
        joins = (Join.MEAN, Join.SHARED) if whole.dim() == 0 else (Join.SHARED, Join.MEAN)
        rules = axes or (*joins, Join.SUM)
        fitting = [rule for rule in rules if self._fits(whole, parts, rule)]
        if Join.SUM in fitting and len(fitting) > 1:
            self.undecided.append(index)  # it is zero
            return Join.SUM
        if len(fitting) > 1 and axes:
            return self._undecidable(
                f"{what} of shape {tuple(whole.shape)} holds {len(fitting)} or more rows per "
                "sample, and their values do not tell in which order. Return one row per "
                "sample, or let one rank compute all samples at once."
            )
        if fitting and fitting[0] is Join.MEAN and self.has_mask and not is_same(parts):
            return self._undecidable(of_some(what))
        if fitting:
            return fitting[0]
        if axes:
            return self._undecidable(mixed(what, whole))
        return self._undecidable(
            f"{what} of shape {tuple(whole.shape)} has no dimension for the samples, and for "
            "several microbatches it is neither the same, nor the sum, nor the mean (a "
            "load-balancing loss, perhaps). Return what belongs to each sample, or let one "
            "rank compute all samples at once."
        )

    def check_outputs(
        self,
        fqn: str,
        whole: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        rules: Sequence[Rule],
    ) -> None:
        """Raise unless the rules of all results hold for the other parts, too.

        The first two samples may be mixed though the third is apart (``cu_seqlens``).
        """
        for i, (each, rule) in enumerate(zip(whole, rules, strict=True)):
            joined = joined_like(each, [part[i] for part in parts], OTHER_PARTS, rule)
            if not self.is_unpredictable and not are_close(joined, each, self.eps):
                self._undecidable(mixed(f"unit {fqn!r}: output {i}", each))

    def _fits(self, whole: Tensor, parts: Sequence[Tensor], rule: Rule) -> bool:
        if self.is_unpredictable:
            return isinstance(rule, BatchAxis) and rule.outer == 1
        return are_close(joined_like(whole, parts, PARTS, rule), whole, self.eps)

    def _are_equal(self, one: Tensor, other: Tensor) -> bool:
        return self.is_unpredictable or are_close(one, other, self.eps)

    def _undecidable(self, message: str) -> Rule:
        if self._splits:
            raise Refusal(ValueError(message))
        return Join.SHARED  # never used: there is only one microbatch


def mixed(what: str, whole: Tensor) -> str:
    return (
        f"{what} of shape {tuple(whole.shape)} depends for one sample on the other samples of "
        "the microbatch, or the batch is in another dimension (HetFSDP(batch_dim=...)), so the "
        "result would depend on the plan. Let one rank compute all samples at once if that is "
        "intended."
    )


def looks_like_mask(tensor: Tensor) -> bool:
    """Whether a tensor may choose what counts: it has integers, or only two distinct values."""
    if not tensor.is_floating_point():
        return True
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())


def of_some(what: str) -> str:
    """The message of a refusal."""
    return (
        f"{what} is a mean, perhaps only over positions that a mask, targets or other values "
        "choose, whose number may differ between microbatches. Return the sum, and divide "
        "outside of the unit, or let one rank compute all samples at once."
    )


def is_same(parts: Sequence[Tensor]) -> bool:
    """Whether all parts are equal up to rounding."""
    return all(are_close(part, parts[0]) for part in parts)


def join_by_gradients(whole: Tensor, parts: Sequence[Tensor]) -> Join | None:
    """The only join under which the parameters' gradients agree; None if it is not unique."""
    expected, *others = [_gradients(tensor) for tensor in (whole, *parts)]
    fitting = [
        join
        for join in (Join.SHARED, Join.MEAN, Join.SUM)
        if all(
            are_close(joined_like(grad, [each[param] for each in others], PARTS, join), grad)
            for param, grad in expected.items()
            if all(param in each for each in others)
        )
    ]
    return fitting[0] if len(fitting) == 1 else None


def _gradients(output: Tensor) -> dict[Tensor, Tensor]:
    """Gradients of the output's sum for all parameters that it depends on."""
    params = [each for each in leaves_of(output) if isinstance(each, nn.Parameter)]
    if not params:
        return {}
    with torch.enable_grad():
        grads = torch.autograd.grad(output.sum(), params, allow_unused=True)
    return {p: g for p, g in zip(params, grads, strict=True) if g is not None}


def readings(tensor: Tensor, known: Rule | None, num_samples: int) -> list[Rule]:
    """The rules that the tensor may have for ``num_samples``; only ``known`` if that fits."""
    if known is Join.SHARED or (
        isinstance(known, BatchAxis) and known.fits(tensor, num_samples)
    ):
        return [known]
    axes: list[Rule] = [
        BatchAxis(dim) for dim, length in enumerate(tensor.shape) if length == num_samples
    ]
    return [*axes, Join.SHARED]
