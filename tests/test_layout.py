"""How flat tensors are cut: geometry over random small shapes, empty and 0-d ones included."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shardhet.records.layout import ALIGNMENT_NUMEL, WIDE_NUMEL, FlatLayout, Span, cut_by_shares

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
LAYOUTS = st.lists(SHAPES, max_size=6).map(FlatLayout.of_shapes)
SEVERAL_LAYOUTS = st.lists(LAYOUTS, min_size=1, max_size=6)
WANTED = st.lists(
    st.one_of(st.just(0.0), st.floats(0.001, 1.0)), min_size=1, max_size=6
).filter(any)


def normalized(wanted: list[float]) -> list[float]:
    return [each / sum(wanted) for each in wanted]


@given(LAYOUTS)
def test_parameters_and_gaps_fill_the_flat_tensor_without_overlap(layout: FlatLayout) -> None:
    spans = [span for span in (*layout.param_spans, *layout.gap_spans) if span.numel]
    positions = [i for span in spans for i in range(span.start, span.stop)]
    assert sorted(positions) == list(range(layout.numel))
    numels = [span.numel for span in layout.param_spans]
    assert numels == [prod(shape) for shape in layout.param_shapes]


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
