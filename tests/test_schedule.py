"""The order of turns and collectives: literal lists for small models, rules for random ones."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardhet.records.ops import Op, ops_of
from shardhet.records.schedule import (
    REDUCE,
    LaunchKind,
    Schedule,
    Segment,
    StepForm,
    make_schedule,
    rest_of_step,
)

ONE_ROUND = StepForm()


def schedule(
    visits: str,
    *,
    frozen: str = "",
    without_backward: str = "",
    form: StepForm = ONE_ROUND,
) -> Schedule:
    """The schedule of a step whose forward visits the units of these letters."""
    return make_schedule(
        [Segment(ord(c) - ord("a"), c not in without_backward) for c in visits],
        trainable_units=frozenset(ord(c) - ord("a") for c in visits if c not in frozen),
        form=form,
    )


def kept(reshards: bool, **others: Any) -> StepForm:
    return StepForm(reshard_after_forward=reshards, **others)


def launched_in(order: Schedule) -> list[Op]:
    return [op for op in ops_of(order) if isinstance(op.kind, LaunchKind)]


def launches(order: Schedule) -> list[str]:
    return [
        f"{op.kind.value[0].upper()}({chr(ord('a') + op.unit)})" for op in launched_in(order)
    ]


# The launches as they follow each other; a line break parts forward from backward.
PLAIN = """G(a) G(b) G(c)
           G(b) R(c) G(a) R(b) R(a)"""
TIED = """G(a) G(b) G(a)
          G(b) G(a) R(b) R(a)"""
SHARED_BLOCK = """G(a) G(b) G(c)
                  G(b) R(c) G(a) R(b) R(a)"""
ALTERNATING = """G(a) G(b) G(a) G(b)
                 G(a) G(b) G(a) R(b) R(a)"""
FROZEN_BOTTOM = """G(a) G(b) G(c)
                   G(b) R(c) R(b)"""
FROZEN_MIDDLE = """G(a) G(b) G(c)
                   G(b) R(c) G(a) R(a)"""
FROZEN_TOP = """G(a) G(b) G(c)
                G(b) G(a) R(b) R(a)"""
KEPT = """G(a) G(b) G(c)
          R(c) R(b) R(a)"""
KEPT_AND_TIED = """G(a) G(b)
                   R(b) R(a)"""
NO_GRAD = "G(a) G(b) G(c)"
LAST_WITHOUT_BACKWARD = """G(a) G(b) G(c)
                           G(b) G(a) R(b) R(a)"""


@pytest.mark.parametrize(
    "order, expected",
    [
        (schedule("a"), "G(a) R(a)"),
        (schedule("abc"), PLAIN),
        (schedule("aba"), TIED),
        (schedule("abbbc"), SHARED_BLOCK),
        (schedule("abab"), ALTERNATING),
        (schedule("abc", frozen="a", without_backward="a"), FROZEN_BOTTOM),
        (schedule("abc", frozen="b"), FROZEN_MIDDLE),
        (schedule("abc", frozen="c"), FROZEN_TOP),
        (schedule("abc", form=kept(False)), KEPT),
        (schedule("aba", form=kept(False)), KEPT_AND_TIED),
        (schedule("abc", without_backward="abc"), NO_GRAD),
        (schedule("abc", without_backward="c", frozen="c"), LAST_WITHOUT_BACKWARD),
        (schedule(""), ""),
    ],
)
def test_collectives_are_launched_in_this_very_order(order: Schedule, expected: str) -> None:
    assert launches(order) == expected.split()


SEGMENTS = st.lists(st.builds(Segment, st.integers(0, 4), st.booleans()), max_size=12)
TRAINABLE = st.frozensets(st.integers(0, 4))


def backward_units(segments: Sequence[Segment]) -> list[int]:
    return [segment.unit for segment in reversed(segments) if segment.needs_backward]


FORMS = st.builds(
    lambda rounds, gathers, reduces: StepForm(
        num_rounds=rounds,
        reshard_after_forward=gathers == 0,
        reshard_after_backward=gathers < 2,
        reduce_each_round=reduces,
    ),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
)


@given(SEGMENTS, SEGMENTS, TRAINABLE, FORMS, st.data())
def test_a_round_that_visits_other_units_lays_out_the_rest_and_leaves_no_gradient_behind(
    segments: list[Segment],
    others: list[Segment],
    trainable: frozenset[int],
    form: StepForm,
    data: st.DataObject,
) -> None:
    order = make_schedule(segments, trainable_units=trainable, form=form)
    changed = data.draw(st.integers(0, form.num_rounds - 1))
    cursor = sum(turn.round < changed for turn in order.turns)
    unreduced = order.unreduced_at(cursor)
    rest = rest_of_step(
        make_schedule(others, trainable_units=trainable, form=form), changed, unreduced
    )
    assert {turn.round for turn in rest.turns} <= set(range(changed, form.num_rounds))
    assert not unreduced or not form.reduce_each_round
    reduced = {op.unit for op in launched_in(rest) if op.kind is REDUCE}
    assert reduced == unreduced | (trainable & set(backward_units(others)))
    last = len(rest.turns)
    assert not rest.unreduced_at(last) - {x.unit for x in rest.launched_last()}


def test_a_form_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="reshard_after_forward is True but"):
        StepForm(reshard_after_backward=False)
    with pytest.raises(ValueError, match="num_rounds is 0 but must be at least 1"):
        StepForm(num_rounds=0)
