"""How one flat tensor is laid out and cut across devices: integer geometry, no tensors.

The parameters of a unit that share a dtype and are all trainable (or all frozen) lie
end to end in one flat tensor.  Each starts at a multiple of ``ALIGNMENT_NUMEL``, so that
kernels find it aligned; those whose length is no such multiple come last, so that gaps
are few.  Device ``i`` (in plan order) stores the half-open span ``[start_i, stop_i)`` of
the flat tensor.  Spans are contiguous, may be empty, cover the flat tensor exactly, and
their borders lie between rows (dim 0) of a parameter: what a device stores of a
parameter is a box of whole rows.

    flat       |------- weight -------|-- other --|- bias -|gap|
    device 0   |-------|
    device 1           |------------------|
    device 2 (stores nothing)             |
    device 3                              |--------------------|
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, Self

ALIGNMENT_NUMEL = 8  # 16 bytes of the narrowest dtype that travels (bf16)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range ``[start, stop)`` of positions."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many positions it holds."""
        return self.stop - self.start

    def intersect(self, other: "Span") -> "Span":
        """The overlap with ``other``; empty (``numel == 0``) where they are apart."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where each parameter sits in the flat tensor and which device stores what."""

    param_shapes: tuple[tuple[int, ...], ...]  # in module order
    param_spans: tuple[Span, ...]  # in module order; gaps belong to none
    shard_spans: tuple[Span, ...]  # in plan order; cover [0, numel)
    numel: int  # gaps included

    @classmethod
    def of_shapes(cls, param_shapes: Sequence[Sequence[int]]) -> Self:
        """The layout of parameters of these shapes, all of it on one device."""
        shapes = tuple(tuple(shape) for shape in param_shapes)
        numels = [prod(shape) for shape in shapes]
        spans = [Span(0, 0)] * len(shapes)
        stop = 0
        for i in sorted(range(len(shapes)), key=lambda i: numels[i] % ALIGNMENT_NUMEL != 0):
            start = -(-stop // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL
            stop = start + numels[i]
            spans[i] = Span(start, stop)
        return cls(shapes, tuple(spans), (Span(0, stop),), stop)

    @property
    def shard_numels(self) -> tuple[int, ...]:
        """How many elements each device stores, in plan order."""
        return tuple(span.numel for span in self.shard_spans)

    @property
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

    def row_numel(self, param: int) -> int:
        """Elements in one row of parameter ``param`` (1 for vectors and scalars)."""
        return max(1, prod(self.param_shapes[param][1:]))

    def cut(self, wanted_numels: Sequence[float]) -> "FlatLayout":
        """The same parameters cut so that each device stores about ``wanted_numels[i]``.

        Every border is the row border nearest to where the wanted numels put it; a device
        that wants nothing gets nothing.
        """
        total = sum(wanted_numels)
        scale = self.numel / total if total else 0.0
        targets = accumulate(numel * scale for numel in wanted_numels)
        slots = self._slots()
        stops = [slot.stop for slot in slots]
        borders = [0]
        for target in targets:
            i = bisect_right(stops, target)
            is_inside = i < len(slots)
            borders.append(slots[i].nearest_row_border(target) if is_inside else self.numel)
        borders[-1] = self.numel
        for i in range(len(wanted_numels) - 1, -1, -1):  # the end goes to who wants something
            if wanted_numels[i] > 0:
                break
            borders[i] = self.numel
        spans = tuple(Span(a, b) for a, b in pairwise(borders))
        return FlatLayout(self.param_shapes, self.param_spans, spans, self.numel)

    def _slots(self) -> list["_Slot"]:
        """The parameters that hold elements, in the order in which they lie."""
        order = sorted(
            (i for i, span in enumerate(self.param_spans) if span.numel),
            key=lambda i: self.param_spans[i].start,
        )
        stops = [*(self.param_spans[i].start for i in order[1:]), self.numel][: len(order)]
        return [
            _Slot(self.param_spans[i], stop, self.row_numel(i))
            for i, stop in zip(order, stops, strict=True)
        ]


class _Slot(NamedTuple):
    """One parameter in the flat tensor, with the gap behind it."""

    span: Span
    stop: int
    row_numel: int

    def nearest_row_border(self, target: float) -> int:
        """The border between rows that is nearest to ``target``."""
        row = round((target - self.span.start) / self.row_numel)
        border = self.span.start + row * self.row_numel
        return border if border < self.span.stop else self.stop


def cut_by_shares(
    layouts: Sequence[FlatLayout], state_shares: Sequence[float]
) -> tuple[FlatLayout, ...]:
    """Every layout cut so that device ``i`` stores ``state_shares[i]`` of all of them together.

    What rounding to rows gives a device too much in one layout it is given less of in the
    next, so shares are met over the whole model to within a row of its largest parameter.
    """
    stored = [0] * len(state_shares)
    seen = 0
    result = []
    for layout in layouts:
        seen += layout.numel
        wanted = [max(0.0, s * seen - n) for s, n in zip(state_shares, stored, strict=True)]
        cut = layout.cut(wanted if any(wanted) else state_shares)
        result.append(cut)
        stored = [n + m for n, m in zip(stored, cut.shard_numels, strict=True)]
    return tuple(result)
