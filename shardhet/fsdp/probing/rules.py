"""Decides how a unit's inputs are split and its outputs joined, from its results for two and
for three samples; refuses what they do not determine.
"""

import pickle
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    Join,
    Rule,
    are_alike,
    find_axis,
    flatten,
    unflatten,
)
from shardhet.fsdp.microbatch.signature import ModelCall, is_plain
from shardhet.fsdp.probing.comparing import Cut, Law, are_close
from shardhet.fsdp.probing.watch import Watcher
from shardhet.records.layout import Span

SMALL, LARGE = 2, 3
SIZES = (SMALL, LARGE)
# The first two may be mixed though the third is apart (``cu_seqlens``), hence two ways to cut.
PARTS = (Span(0, SMALL), Span(SMALL, LARGE))
OTHER_PARTS = (Span(0, 1), Span(1, LARGE))
MAX_ATTEMPTS = 8

Axes = tuple[BatchAxis | None, ...]
Leaves = Mapping[str, Any]  # of an output, by place


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


class Unmade:
    """In place of a result that a rank without samples cannot make: to look into it raises."""

    _kind = ""  # the name of its class

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"model(...): this rank has no samples, and the model returns a {self._kind}, "
            f"which cannot be made without (its {name!r} is asked for). Return tensors, in "
            "tuples, dicts or dataclasses of a module, and make the object after model(...)."
        )

    def _refuse(self, *_args: Any) -> Any:
        return self.entries

    __iter__ = __len__ = __getitem__ = __call__ = _refuse


class RuleFinder:
    """Decides the rules of one call of a unit at a time.

    If ``splits`` is False, no rank has several microbatches and no rule can be wrong.
    """

    def __init__(self, watcher: Watcher, *, splits: bool) -> None:
        self.undecided: list[int] = []  # indices of outputs of the call that are zero
        self._watcher = watcher
        self._splits = splits

    def of_input(self, fqn: str, name: str, small: Tensor, large: Tensor) -> Rule:
        """The rule of an argument, given its values for the small and for the large batch."""
        what = f"unit {fqn!r}: its argument {name}"
        try:
            axes = find_axis(small, large, SIZES)
        except ValueError as error:
            return self._undecidable(
                f"{what} has shape {tuple(small.shape)} for {SMALL} samples and "
                f"{tuple(large.shape)} for {LARGE}: {error}"
            )
        if not axes:
            if self._are_equal(small, large):
                return Join.SHARED
            return self._undecidable(
                f"{what} has no dimension for the samples, and its values depend on which are "
                "in the batch"
            )
        fitting = [
            axis for axis in axes if self._are_equal(axis.narrow(large, PARTS[0], LARGE), small)
        ]
        if len(fitting) == 1 or (fitting and len(axes) == 1):
            return fitting[0]
        if fitting and are_alike(large, axes[0].dim):
            return replace(fitting[0], is_alike=True)
        if fitting:
            return self._undecidable(
                f"{what} of shape {tuple(large.shape)} holds {axes[-1].outer} rows per sample, "
                "and their values do not tell in which order"
            )
        return self._undecidable(
            f"{mixed(what, large)} of the batch: code outside of units mixes samples"
        )

    def of_output(
        self, fqn: str, index: int, small: Tensor, whole: Tensor, cuts: Sequence[Cut]
    ) -> Rule:
        """The rule of a result, given it for the small batch, the large one and its parts."""
        what = f"unit {fqn!r}: output {index}"
        try:
            axes: Sequence[Rule] = find_axis(small, whole, SIZES)
        except ValueError as error:
            return self._undecidable(
                f"{what} has shape {tuple(small.shape)} for {SMALL} samples and "
                f"{tuple(whole.shape)} for {LARGE}: {error}"
            )
        if not cuts:
            return axes[0] if axes and self._splits else Join.SHARED
        # A constant output fits both SHARED and MEAN.  A scalar is taken for a MEAN, because it
        # may be a mean over samples that happen to have equal values.
        joins = (Join.MEAN, Join.SHARED) if whole.dim() == 0 else (Join.SHARED, Join.MEAN)
        rules = axes or (*joins, Join.SUM)
        fitting = [rule for rule in rules if self._fits(rule, cuts)]
        if Join.SUM in fitting and len(fitting) > 1:
            self.undecided.append(index)  # it is zero
            return Join.SUM
        if len(fitting) > 1 and axes:
            return self._undecidable(
                f"{what} of shape {tuple(whole.shape)} holds {len(fitting)} or more rows per "
                "sample, and their values do not tell in which order"
            )
        if fitting:
            return fitting[0]
        if axes:
            return self._undecidable(f"{mixed(what, whole)} of the microbatch")
        return self._undecidable(
            f"{what} of shape {tuple(whole.shape)} has no dimension for the samples, and for "
            "several microbatches it is neither the same, nor the sum, nor the mean",
            Law.ADDS_UP,
        )

    def _fits(self, rule: Rule, cuts: Sequence[Cut]) -> bool:
        if self._watcher.is_unpredictable:
            return isinstance(rule, BatchAxis) and rule.outer == 1
        return all(each.follows(rule, self._watcher.eps) for each in cuts)

    def _are_equal(self, one: Tensor, other: Tensor) -> bool:
        return self._watcher.is_unpredictable or are_close(one, other, self._watcher.eps)

    def _undecidable(self, found: str, law: Law = Law.INDEPENDENT) -> Rule:
        if self._splits:
            raise law.refusal(found)
        return Join.SHARED  # never used: there is only one microbatch


def mixed(what: str, whole: Tensor) -> str:
    """What is said of samples that are not apart."""
    return f"{what} of shape {tuple(whole.shape)} depends for one sample on the other samples"


OF_SOME = (
    " is a mean, perhaps only over positions that a mask, targets or other values choose, "
    "whose number may differ between microbatches"
)


def looks_like_mask(tensor: Tensor) -> bool:
    """Whether a tensor may choose what counts: it has integers, or only two distinct values."""
    if not tensor.is_floating_point():
        return True
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())


def readings(
    tensor: Tensor, known: Rule | None, num_samples: int, others: Iterable[Rule]
) -> list[Rule]:
    """The rules that the tensor may have for ``num_samples``; only ``known`` if that fits.  It
    may have several rows a sample as ``others`` have, those of other arguments.
    """
    if known is not None and known.fits(tensor, num_samples):
        return [known]
    rows = {
        (1, 1),
        *((each.outer, each.inner) for each in others if isinstance(each, BatchAxis)),
    }
    axes: list[Rule] = [
        axis
        for dim in range(tensor.dim())
        for axis in (BatchAxis(dim, *each) for each in sorted(rows))
        if axis.fits(tensor, num_samples)
    ]
    return [*axes, Join.SHARED]


def empty_output_of(for_small: Any, for_large: Any, for_some: Any) -> bytes:
    """The output of a model for no samples, on the meta device, pickled; as long as that
    ``for_some``.
    """
    small, spec = flatten(for_small)
    large, some = flatten(for_large)[0], flatten(for_some)[0]
    leaves: list[Any] = []
    for one, other, like in zip(small, large, some, strict=False):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            leaves.append(_for_no_samples(one))
            continue
        try:
            axes = find_axis(one, other, SIZES)
        except ValueError:  # several dimensions depend on the number of samples
            axes = [BatchAxis(0)]
        shape = axes[0].shape(like.shape, 0) if axes else tuple(like.shape)
        flag = one.requires_grad
        leaves.append(torch.empty(shape, dtype=one.dtype, device="meta", requires_grad=flag))
    try:
        return pickle.dumps(unflatten(leaves, spec))
    except (pickle.PicklingError, AttributeError, TypeError):  # a class of a function
        return pickle.dumps(Unmade(type(for_small).__name__))


def _for_no_samples(plain: Any) -> Any:
    """A plain output of a model for no samples; a number is taken for a count, so it is zero.

    This includes a number that is equal in two runs: their samples may happen to have equally
    many tokens.
    """
    if type(plain) in (int, float):
        return type(plain)(0)
    return plain if is_plain(plain) else Unmade(type(plain).__name__)


# Outputs of a model


def rows_of(small: Leaves, large: Leaves, *, is_alone: bool) -> dict[str, list[BatchAxis]]:
    """Outputs that have a gradient, and where they may have rows for each sample.

    Raises if one has two dimensions for samples, unless no other rank computes.
    """
    found = {}
    for i, (at, one) in enumerate(small.items()):
        other = large.get(at)
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        growing = _growing(one, other)
        if len(growing) > 1 and not is_alone:
            raise Law.INDEPENDENT.refusal(
                f"model(...): output {i} of shape {tuple(one.shape)} for {SMALL} samples and "
                f"{tuple(other.shape)} for {LARGE} compares the samples of a rank's batch with "
                "each other, as contrastive losses do, which take features of all ranks "
                "(shardhet.gather_features)"
            )
        if one.requires_grad and len(growing) == 1:
            with suppress(ValueError):  # its length depends on which samples there are
                found[at] = find_axis(one, other, SIZES)
    return found


def _growing(small: Tensor, large: Tensor) -> list[tuple[int, int]]:
    return [
        sizes
        for sizes in zip(small.shape, large.shape, strict=False)
        if sizes[0] * LARGE == sizes[1] * SMALL and all(sizes)
    ]


def without_samples(outputs: Sequence[Leaves]) -> list[str]:
    """Where outputs have numbers, or what has a gradient and no row for each sample."""
    first, *others = outputs
    columns = {
        place: [leaf, *(each.get(place) for each in others)] for place, leaf in first.items()
    }
    return [place for place, c in columns.items() if all(map(_is_number, c)) or _are_alike(c)]


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (int, float) or (isinstance(leaf, Tensor) and not leaf.dim())


def _are_alike(column: Sequence[Any]) -> bool:
    """Whether all are tensors of one shape that have a gradient."""
    return all(
        isinstance(each, Tensor)
        and each.requires_grad
        and each.is_floating_point()
        and each.numel()
        and each.shape == column[0].shape
        for each in column
    )
