"""The order of turns and collectives: literal lists for small models, rules for random ones."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardhet.records.ops import Op, ops_of
from shardhet.records.schedule import (
    GATHER,
    REDUCE,
    LaunchKind,
    Phase,
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


def test_a_step_visits_its_units_and_returns_in_reverse() -> None:
    order = schedule("aba")
    turns = [
        (t.segment, t.unit, t.phase, GATHER in t.ahead, t.reshards, REDUCE in t.after)
        for t in order.turns
    ]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert turns == [
        (0, 0, forward, True, True, False),
        (1, 1, forward, True, True, False),
        (2, 0, forward, True, False, False),  # stays unsharded: its backward is next
        (2, 0, backward, False, True, False),  # another backward turn of it is to come
        (1, 1, backward, True, True, True),
        (0, 0, backward, True, True, True),
    ]


SEGMENTS = st.lists(st.builds(Segment, st.integers(0, 4), st.booleans()), max_size=12)
TRAINABLE = st.frozensets(st.integers(0, 4))


def backward_units(segments: Sequence[Segment]) -> list[int]:
    return [segment.unit for segment in reversed(segments) if segment.needs_backward]


@given(SEGMENTS, TRAINABLE)
def test_at_most_the_current_and_the_next_unit_are_unsharded(
    segments: list[Segment], trainable: frozenset[int]
) -> None:
    order = make_schedule(segments, trainable_units=trainable, form=kept(True))
    unsharded: set[int] = set()
    for i, turn in enumerate(order.turns):
        unsharded.add(turn.unit)
        unsharded |= {following.unit for following in order.turns[i + 1 : i + 2]}
        assert len(unsharded) <= 2
        assert unsharded <= {each.unit for each in order.turns[i : i + 2]}
        if turn.reshards:
            unsharded.discard(turn.unit)


# Several rounds.  Of the turns that keep c unsharded: its backward follows its forward; and the
# forward of a follows its backward of the round before.
PER_USE = """G(a) G(b) G(c)
             G(b) R(c) G(a) R(b) R(a)
             G(b) G(c)
             G(b) R(c) G(a) R(b) R(a)"""
PER_ROUND = """G(a) G(b) G(c)
               R(c) R(b) R(a)
               G(b) G(c)
               R(c) R(b) R(a)"""
PER_STEP = """G(a) G(b) G(c)
              R(c) R(b) R(a)
              R(c) R(b) R(a)"""
REDUCED_LAST = """G(a) G(b) G(c)
                  G(b) G(a)
                  G(b) G(c)
                  G(b) R(c) G(a) R(b) R(a)"""
ONCE = """G(a) G(b) G(c)
          R(c) R(b) R(a)"""
TIED_ROUNDS = """G(a) G(b) G(a)
                 G(b) G(a) R(b) R(a)
                 G(b) G(a)
                 G(b) G(a) R(b) R(a)"""
TWO = {"num_rounds": 2}


@pytest.mark.parametrize(
    "order, expected",
    [
        (schedule("abc", form=kept(True, **TWO)), PER_USE),
        (schedule("abc", form=kept(False, **TWO)), PER_ROUND),
        (schedule("abc", form=kept(False, reshard_after_backward=False, **TWO)), PER_STEP),
        (schedule("abc", form=kept(True, reduce_each_round=False, **TWO)), REDUCED_LAST),
        (
            schedule(
                "abc",
                form=kept(False, reshard_after_backward=False, reduce_each_round=False, **TWO),
            ),
            ONCE,
        ),
        (schedule("aba", form=kept(True, **TWO)), TIED_ROUNDS),
        (schedule("a", form=kept(True, num_rounds=3)), "G(a) R(a) R(a) R(a)"),
        (schedule("ab", without_backward="ab", form=kept(True, **TWO)), "G(a) G(b) G(a) G(b)"),
    ],
)
def test_rounds_follow_each_other_in_one_list(order: Schedule, expected: str) -> None:
    assert launches(order) == expected.split()


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


@given(SEGMENTS, TRAINABLE, FORMS)
def test_every_round_has_the_turns_of_one_and_nothing_is_launched_ahead_of_a_later_one(
    segments: list[Segment], trainable: frozenset[int], form: StepForm
) -> None:
    order = make_schedule(segments, trainable_units=trainable, form=form)
    one = make_schedule(segments, trainable_units=trainable).turns
    bare = [(turn.round, turn.segment, turn.unit, turn.phase) for turn in order.turns]
    rounds = range(form.num_rounds)
    assert bare == [(r, turn.segment, turn.unit, turn.phase) for r in rounds for turn in one]
    for i, turn in enumerate(order.turns):
        assert all(order.turns[x.turn].round == turn.round for x in order.launched_by(i))


@given(SEGMENTS, TRAINABLE, FORMS)
def test_units_are_gathered_and_reduced_as_often_as_the_form_says(
    segments: list[Segment], trainable: frozenset[int], form: StepForm
) -> None:
    order = make_schedule(segments, trainable_units=trainable, form=form)
    unsharded: set[int] = set()
    for turn in order.turns:
        assert (GATHER in turn.ahead) == (turn.unit not in unsharded)
        unsharded.add(turn.unit)
        if turn.reshards:
            unsharded.remove(turn.unit)
    assert not unsharded
    visited = {segment.unit for segment in segments}
    gathered = [op.unit for op in launched_in(order) if op.kind is GATHER]
    if not form.reshard_after_backward:
        assert sorted(gathered) == sorted(visited)
    elif not form.reshard_after_forward:
        assert all(gathered.count(unit) <= form.num_rounds for unit in visited)
    reduced = [op.unit for op in launched_in(order) if op.kind is REDUCE]
    times = form.num_rounds if form.reduce_each_round else 1
    assert sorted(reduced) == sorted([*(trainable & set(backward_units(segments)))] * times)


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
    owed = order.owed_at(cursor)
    rest = rest_of_step(
        make_schedule(others, trainable_units=trainable, form=form), changed, owed
    )
    assert {turn.round for turn in rest.turns} <= set(range(changed, form.num_rounds))
    assert not owed or not form.reduce_each_round
    reduced = {op.unit for op in launched_in(rest) if op.kind is REDUCE}
    assert reduced == owed | (trainable & set(backward_units(others)))
    last = len(rest.turns)
    assert not rest.owed_at(last) - {x.unit for x in rest.launched_last()}


def test_a_form_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="reshard_after_forward is True but"):
        StepForm(reshard_after_backward=False)
    with pytest.raises(ValueError, match="num_rounds is 0 but must be at least 1"):
        StepForm(num_rounds=0)
