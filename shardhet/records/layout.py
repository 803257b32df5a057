"""How one flat tensor is laid out and cut across devices: integer geometry, no tensors.

The parameters of a unit that share a dtype and are all trainable (or all frozen) lie
end to end in one flat tensor.  Each starts at a multiple of ``ALIGNMENT_NUMEL``, so that
kernels find it aligned; those with the largest power of two in their length come first, so
that there are few gaps and large matrices start at multiples of ``WIDE_NUMEL``.  Device ``i``
(in plan order) stores the half-open span ``[start_i, stop_i)`` of the flat tensor.  Spans are
contiguous, may be empty, and cover the flat tensor exactly.  Their borders lie between rows
(dim 0) of a parameter, so a device stores whole rows, and at multiples of ``ALIGNMENT_NUMEL``
(of ``WIDE_NUMEL`` in large parameters): NCCL is several times slower on pieces that begin off
16 bytes (under 2 against over 7 ms for 6.3 MB in Horovod's pull request 3727).

Where parameters are stored whole, each by one device, those of a device lie together
(``owned``), so that borders lie between parameters and all else is as it is with rows.

    flat       |------- weight -------|-- other --|- bias -|gap|
    device 0   |-------|
    device 1           |------------------|
    device 2 (stores nothing)             |
    device 3                              |--------------------|
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm, prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# 16 and 512 bytes of the narrowest dtype that is communicated (bf16).
ALIGNMENT_NUMEL, WIDE_NUMEL = 8, 256
STEPS_FOR_WIDE = 64  # a parameter with so many wide steps is cut at them


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range ``[start, stop)`` of positions."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of positions in the range."""
        return self.stop - self.start

    def intersect(self, other: "Span") -> "Span":
        """The overlap with ``other``; empty (``numel == 0``) if they do not overlap."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """How many parameters of one shape a device stores whole."""

    shape: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter sits in the flat tensor and which device stores what."""

    param_shapes: tuple[tuple[int, ...], ...]  # in module order
    param_spans: tuple[Span, ...]  # in module order; gaps belong to no parameter
    shard_spans: tuple[Span, ...]  # in plan order; cover [0, numel)
    numel: int  # gaps included

    @classmethod
    def of_shapes(cls, param_shapes: Sequence[Sequence[int]]) -> Self:
        """The layout of parameters with these shapes, stored on a single device."""
        shapes = tuple(tuple(shape) for shape in param_shapes)
        return cls._of_owners(shapes, [0] * len(shapes))

    @classmethod
    def _of_owners(
        cls, shapes: tuple[tuple[int, ...], ...], owners: Sequence[int], num_devices: int = 1
    ) -> Self:
        numels = [prod(shape) for shape in shapes]
        spans = [Span(0, 0)] * len(shapes)
        starts: dict[int, int] = {}  # of what each owner has
        stop = 0
        # The powers of two that divide the lengths.
        powers = [min(WIDE_NUMEL, n & -n or WIDE_NUMEL) for n in numels]
        order = sorted(range(len(shapes)), key=lambda i: (numels[i] and owners[i], -powers[i]))
        for i in order:
            is_large = numels[i] >= STEPS_FOR_WIDE * WIDE_NUMEL
            step = max(ALIGNMENT_NUMEL, powers[i] if is_large else 1)
            start = -(-stop // step) * step
            stop = start + numels[i]
            spans[i] = Span(start, stop)
            if numels[i]:
                starts.setdefault(owners[i], start)
        borders = [0, *(stop for _ in range(num_devices))]
        for owner in sorted(starts, reverse=True):
            borders[1 : owner + 1] = [starts[owner]] * owner
        shards = tuple(Span(a, b) for a, b in pairwise(borders))
        return cls(shapes, tuple(spans), shards, stop)

    def owned(self, owners: Sequence[int], num_devices: int) -> "FlatLayout":
        """The same parameters, the ``i``th stored whole by the device at ``owners[i]``."""
        return self._of_owners(self.param_shapes, owners, num_devices)

    @cached_property
    def shard_numels(self) -> tuple[int, ...]:
        """How many elements each device stores, in plan order."""
        return tuple(span.numel for span in self.shard_spans)

    @cached_property
    def gap_spans(self) -> tuple[Span, ...]:
        """The spans that hold no parameter."""
        stored = sorted(span for span in self.param_spans if span.numel)
        starts = [0, *(span.stop for span in stored)]
        stops = [*(span.start for span in stored), self.numel]
        return tuple(Span(a, b) for a, b in zip(starts, stops, strict=True) if b > a)

    def rows(self, param: int, position: int) -> Span:
        """The rows of parameter ``param`` that the device at ``position`` stores."""
        span = self.param_spans[param]
        part = span.intersect(self.shard_spans[position])
        row_numel = self.row_numel(param)
        if part.numel == 0:
            return Span(0, 0)
        return Span(
            (part.start - span.start) // row_numel, (part.stop - span.start) // row_numel
        )

    def cuts(self) -> list[tuple[Span, ...]]:
        """The rows of every parameter, by position."""
        params, positions = range(len(self.param_shapes)), range(len(self.shard_spans))
        return [tuple(self.rows(param, at) for at in positions) for param in params]

    def row_numel(self, param: int) -> int:
        """Elements in one row of parameter ``param`` (1 for vectors and scalars)."""
        return max(1, prod(self.param_shapes[param][1:]))

    def step_numel(self, param: int) -> int:
        """Elements between two borders at which parameter ``param`` may be cut: whole rows."""
        span, row_numel = self.param_spans[param], self.row_numel(param)
        wide = lcm(row_numel, WIDE_NUMEL)
        is_wide = span.start % WIDE_NUMEL == 0 and wide * STEPS_FOR_WIDE <= span.numel
        return wide if is_wide else lcm(row_numel, ALIGNMENT_NUMEL)

    def cut(self, wanted_numels: Sequence[float]) -> "FlatLayout":
        """The same parameters cut so that each device stores about ``wanted_numels[i]``.

        Every border is rounded to the nearest aligned border between rows; a device that
        wants nothing gets nothing.
        """
        return self._cut_at(self._borders(np.asarray(wanted_numels, dtype=np.float64)))

    def _cut_at(self, borders: Ints) -> "FlatLayout":
        spans = tuple(Span(a, b) for a, b in pairwise(borders.tolist()))
        return FlatLayout(self.param_shapes, self.param_spans, spans, self.numel)

    def _borders(self, wanted_numels: Floats) -> Ints:
        """Where each device's shard begins, and where the last one ends."""
        borders = np.full(len(wanted_numels) + 1, self.numel, dtype=np.int64)
        wanting = np.flatnonzero(wanted_numels > 0)
        if not len(wanting):
            return borders
        borders[0] = 0
        inner = slice(0, int(wanting[-1]))  # the last wanting device ends at numel
        scale = self.numel / np.cumsum(wanted_numels)[-1]
        targets = np.cumsum(wanted_numels * scale)[inner]
        starts, ends, stops, steps = self._slots()
        slot = np.searchsorted(stops, targets, side="right")
        is_inside = slot < len(stops)
        targets, slot = targets[is_inside], slot[is_inside]
        whole_steps = ((targets - starts[slot]) // steps[slot]).astype(np.int64)
        below = starts[slot] + whole_steps * steps[slot]
        above = below + steps[slot]
        above = np.where(above < ends[slot], above, stops[slot])
        below = np.where(below < ends[slot], below, stops[slot])
        nearest = np.where(targets - below < above - targets, below, above)
        borders[1:][inner][is_inside] = nearest
        return borders

    def _slots(self) -> tuple[Ints, Ints, Ints, Ints]:
        """For each non-empty parameter, in storage order: where it starts and ends, where the
        gap behind it ends, and the number of elements between possible borders.
        """
        order = sorted(
            (i for i, span in enumerate(self.param_spans) if span.numel),
            key=lambda i: self.param_spans[i].start,
        )
        starts = [self.param_spans[i].start for i in order]
        ends = [self.param_spans[i].stop for i in order]
        stops = [*starts[1:], self.numel][: len(order)]
        steps = [self.step_numel(i) for i in order]
        return _ints(starts), _ints(ends), _ints(stops), _ints(steps)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def cut_by_shares(
    layouts: Sequence[FlatLayout],
    state_shares: Sequence[float],
    are_whole: Sequence[bool] = (),
    owned: Sequence[Sequence[Owned]] = (),
) -> tuple[FlatLayout, ...]:
    """Every layout cut so that device ``i`` stores ``state_shares[i]`` of all of them together.

    The parameters of layouts that ``are_whole`` are each stored by one device, which ``owned``
    may say device by device.  If rounding to rows, or to parameters, gives a device too much of
    one layout, it gets less of the next, so over the whole model shares are met to within the
    largest step between borders.
    """
    whole = _owned_by_shares(layouts, state_shares, are_whole, owned)
    borders = _borders_by_shares(layouts, state_shares, whole)
    return tuple(
        whole[i] if i in whole else layout._cut_at(next(borders))
        for i, layout in enumerate(layouts)
    )


def stored_numels(layouts: Sequence[FlatLayout], state_shares: Sequence[float]) -> list[int]:
    """How many elements each device stores after the layouts are cut by these shares."""
    stored = np.zeros(len(state_shares), dtype=np.int64)
    for borders in _borders_by_shares(layouts, state_shares, {}):
        stored += np.diff(borders)
    numels: list[int] = stored.tolist()
    return numels


def _borders_by_shares(
    layouts: Sequence[FlatLayout],
    state_shares: Sequence[float],
    whole: Mapping[int, FlatLayout],
) -> Iterator[Ints]:
    """Of every layout but those that are ``whole``, whose parameters have been dealt."""
    shares = np.asarray(state_shares, dtype=np.float64)
    stored = np.zeros(len(shares), dtype=np.int64)
    for layout in whole.values():
        stored += layout.shard_numels
    seen = int(stored.sum())
    for i, layout in enumerate(layouts):
        if i in whole:
            continue
        seen += layout.numel
        wanted = np.maximum(0.0, shares * seen - stored)
        borders = layout._borders(wanted if wanted.any() else shares)
        yield borders
        stored = stored + np.diff(borders)


def _owned_by_shares(
    layouts: Sequence[FlatLayout],
    state_shares: Sequence[float],
    are_whole: Sequence[bool],
    owned: Sequence[Sequence[Owned]],
) -> dict[int, FlatLayout]:
    """By index the layouts that ``are_whole``, each parameter on one device.

    The largest are dealt first, each to the device that lacks most of its shares of all these
    layouts and of this one, so that shares are met over the model and as far as may be in each.
    Of shapes that are ``owned``, to one that is to have more of them.

    Raises ``ValueError`` if devices are to own more or fewer of a shape than there are.
    """
    shares = np.asarray(state_shares, dtype=np.float64)
    whole = [i for i, is_whole in enumerate(are_whole) if is_whole]
    numels = {i: [prod(shape) for shape in layouts[i].param_shapes] for i in whole}
    left = {each.shape: np.zeros(len(shares)) for of in owned for each in of}
    for device, of in enumerate(owned):
        for each in of:
            left[each.shape][device] += each.number
    _check_owned(left, [shape for i in whole for shape in layouts[i].param_shapes])
    owners = {i: [0] * len(each) for i, each in numels.items()}
    lacking_of = {i: shares * sum(each) for i, each in numels.items()}
    lacking = shares * sum(map(sum, numels.values()))
    params = [(-n, i, param) for i, each in numels.items() for param, n in enumerate(each)]
    for less, i, param in sorted(params):
        may = left.get(layouts[i].param_shapes[param], shares)
        owner = int(np.where(may > 0, lacking + lacking_of[i], -np.inf).argmax())
        owners[i][param] = owner
        lacking[owner] += less
        lacking_of[i][owner] += less
        if may is not shares:
            may[owner] -= 1
    return {i: layouts[i].owned(each, len(shares)) for i, each in owners.items()}


def _check_owned(left: Mapping[tuple[int, ...], Floats], shapes: Sequence[object]) -> None:
    for shape, numbers in left.items():
        if numbers.sum() != shapes.count(shape):
            raise ValueError(
                f"plan: its devices own {numbers.sum():.0f} parameters of shape {shape}, but "
                f"the units of whole_matrices have {shapes.count(shape)}. Make the plan again "
                "for this model."
            )
