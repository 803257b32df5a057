"""How flat tensors are cut: geometry over random small shapes, empty and 0-d ones included."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardhet.records.layout import ALIGNMENT_NUMEL, WIDE_NUMEL, FlatLayout, Span, cut_by_shares

Shape = tuple[int, ...]

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
LAYOUTS = st.lists(SHAPES, max_size=6).map(FlatLayout.of_shapes)
SEVERAL_LAYOUTS = st.lists(LAYOUTS, min_size=1, max_size=6)
WANTED = st.lists(
    st.one_of(st.just(0.0), st.floats(0.001, 1.0)), min_size=1, max_size=6
).filter(any)


def normalized(wanted: list[float]) -> list[float]:
    return [each / sum(wanted) for each in wanted]


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_the_overlap_of_two_spans_is_the_positions_in_both(
    a: int, b: int, c: int, d: int
) -> None:
    one, other = Span(min(a, b), max(a, b)), Span(min(c, d), max(c, d))
    shared = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    overlap = one.intersect(other)
    assert set(range(overlap.start, overlap.stop)) == shared
    assert overlap.numel == len(shared)


@given(LAYOUTS)
def test_parameters_and_gaps_fill_the_flat_tensor_without_overlap(layout: FlatLayout) -> None:
    spans = [span for span in (*layout.param_spans, *layout.gap_spans) if span.numel]
    positions = [i for span in spans for i in range(span.start, span.stop)]
    assert sorted(positions) == list(range(layout.numel))
    numels = [span.numel for span in layout.param_spans]
    assert numels == [prod(shape) for shape in layout.param_shapes]


@given(LAYOUTS)
def test_every_parameter_starts_aligned(layout: FlatLayout) -> None:
    assert all(span.start % ALIGNMENT_NUMEL == 0 for span in layout.param_spans)


@given(LAYOUTS)
def test_gaps_are_only_between_parameters_of_odd_length_and_never_at_the_end(
    layout: FlatLayout,
) -> None:
    odd = [span for span in layout.param_spans if span.numel % ALIGNMENT_NUMEL]
    assert len(layout.gap_spans) <= max(0, len(odd) - 1)
    assert all(0 < gap.numel < ALIGNMENT_NUMEL for gap in layout.gap_spans)
    assert all(gap.stop < layout.numel for gap in layout.gap_spans)


def test_lengths_that_are_multiples_come_first_so_that_they_need_no_gap() -> None:
    layout = FlatLayout.of_shapes([(3,), (4, 8), (5,), (16,)])
    assert layout.param_spans == (Span(48, 51), Span(0, 32), Span(56, 61), Span(32, 48))
    assert layout.gap_spans == (Span(51, 56),)
    assert layout.numel == 61


@given(LAYOUTS, WANTED)
def test_every_element_is_stored_by_exactly_one_device(
    layout: FlatLayout, wanted: list[float]
) -> None:
    spans = layout.cut(wanted).shard_spans
    assert len(spans) == len(wanted)
    assert all(span.start <= span.stop for span in spans)
    borders = [0, *(span.stop for span in spans)]
    assert [span.start for span in spans] == borders[:-1]
    assert borders[-1] == layout.numel


@given(LAYOUTS, WANTED)
def test_every_row_is_stored_whole_by_exactly_one_device(
    layout: FlatLayout, wanted: list[float]
) -> None:
    cut = layout.cut(wanted)
    for param, (shape, span) in enumerate(zip(cut.param_shapes, cut.param_spans, strict=True)):
        num_rows = (shape[0] if shape else 1) if prod(shape) else 0
        rows = [cut.rows(param, position) for position in range(len(wanted))]
        stored = [row for r in rows for row in range(r.start, r.stop)]
        assert stored == list(range(num_rows))
        for r, shard in zip(rows, cut.shard_spans, strict=True):
            assert r.numel * cut.row_numel(param) == span.intersect(shard).numel


@given(LAYOUTS, WANTED)
def test_a_device_that_wants_nothing_gets_nothing(
    layout: FlatLayout, wanted: list[float]
) -> None:
    numels = layout.cut(wanted).shard_numels
    assert all(n == 0 for n, w in zip(numels, wanted, strict=True) if w == 0)


@given(LAYOUTS, WANTED)
def test_each_border_is_within_a_step_or_a_gap_of_where_the_shares_put_it(
    layout: FlatLayout, wanted: list[float]
) -> None:
    cut = layout.cut(wanted)
    steps = [layout.step_numel(i) for i, s in enumerate(layout.param_spans) if s.numel]
    allowed = max(steps, default=0) / 2 + ALIGNMENT_NUMEL
    target = 0.0
    for share, span in zip(normalized(wanted), cut.shard_spans, strict=True):
        target += share * layout.numel
        assert abs(span.stop - target) <= allowed + 1e-6


@given(SEVERAL_LAYOUTS, WANTED)
def test_shards_begin_at_multiples_of_16_bytes(
    layouts: list[FlatLayout], wanted: list[float]
) -> None:
    for cut in cut_by_shares(layouts, normalized(wanted)):
        for span in cut.shard_spans:
            assert not span.numel or span.start % ALIGNMENT_NUMEL == 0


def test_large_matrices_are_cut_at_multiples_of_512_bytes_vectors_at_16() -> None:
    layout = FlatLayout.of_shapes([(1000,), (3000, 136), (24,)])
    assert layout.param_spans[1].start == 0  # its length has the largest power of two
    for share in (0.1, 0.3, 0.51, 0.9):
        first, _ = layout.cut([share, 1 - share]).shard_numels
        assert first % WIDE_NUMEL == 0 == first % 136
    assert layout.cut([408_100, 924]).shard_numels == (408_104, 920)  # in the vector


@given(LAYOUTS)
def test_a_layout_that_is_not_cut_lies_on_one_device(layout: FlatLayout) -> None:
    assert layout.shard_spans == (Span(0, layout.numel),)
    assert layout.cut([1.0]) == layout
    assert layout.cut([0.0, 5.0]).shard_numels == (0, layout.numel)


def test_a_scalar_is_one_row_on_one_device() -> None:
    cut = FlatLayout.of_shapes([(), ()]).cut([0.5, 0.5])
    assert [[cut.rows(p, i) for i in (0, 1)] for p in (0, 1)] == [
        [Span(0, 1), Span(0, 0)],
        [Span(0, 0), Span(0, 1)],
    ]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 2)])
def test_a_parameter_without_elements_has_no_rows_anywhere(shape: Shape) -> None:
    cut = FlatLayout.of_shapes([(2, 8), shape, (16,)]).cut([0.5, 0.25, 0.25])
    assert [cut.rows(1, i) for i in range(3)] == [Span(0, 0)] * 3
    assert cut.numel == 32


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 3), (3, 0)]])
def test_a_unit_without_elements_can_be_cut(shapes: list[Shape]) -> None:
    assert FlatLayout.of_shapes(shapes).cut([0.3, 0.0, 0.7]).shard_numels == (0, 0, 0)


def test_a_matrix_is_cut_at_the_nearest_row() -> None:
    layout = FlatLayout.of_shapes([(10, 8)])
    assert layout.cut([0.5, 0.5]).shard_numels == (40, 40)
    assert layout.cut([0.34, 0.66]).shard_numels == (24, 56)  # 27.2 elements are 3.4 rows
    assert layout.cut([0.36, 0.64]).shard_numels == (32, 48)  # 28.8 are 3.6
    assert layout.cut([0.01, 0.99]).shard_numels == (0, 80)


@given(SEVERAL_LAYOUTS, WANTED)
def test_shares_are_met_over_the_whole_model_to_within_a_step_and_a_gap(
    layouts: list[FlatLayout], wanted: list[float]
) -> None:
    shares = normalized(wanted)
    cuts = cut_by_shares(layouts, shares)
    assert len(cuts) == len(layouts)
    steps = [each.step_numel(i) for each in layouts for i in range(len(each.param_shapes))]
    total = sum(layout.numel for layout in layouts)
    for position, share in enumerate(shares):
        stored = sum(cut.shard_numels[position] for cut in cuts)
        assert abs(stored - share * total) <= max(steps, default=0) + ALIGNMENT_NUMEL
        assert share or not stored


def test_what_rounding_gives_too_much_is_given_less_of_in_the_next_layout() -> None:
    blocks = [FlatLayout.of_shapes([(3, 8)])] * 4  # no half of three rows
    assert [cut.shard_numels for cut in cut_by_shares(blocks, [0.5, 0.5])] == [
        (16, 8),
        (8, 16),
        (16, 8),
        (8, 16),
    ]


@given(LAYOUTS, WANTED)
def test_a_gap_is_stored_with_the_parameter_before_it(
    layout: FlatLayout, wanted: list[float]
) -> None:
    borders = {span.stop for span in layout.cut(wanted).shard_spans}
    assert not any(
        gap.start <= border < gap.stop for gap in layout.gap_spans for border in borders
    )
