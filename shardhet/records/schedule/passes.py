"""The passes that make a schedule: bare turns first, then marks on each of them.

A pass maps the turns of a step to turns with more marks.  A new kind of launch is a pass of its
own: append it to the list that ``make_schedule`` applies, and add the kind's price and what a
rank does (``LaunchKind``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardhet.records.schedule.turns import GATHER, REDUCE, Phase, Schedule, Segment, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What passes know of the plan and the model."""

    trainable_units: frozenset[int]
    reshard_after_forward: bool


Turns = tuple[Turn, ...]
Pass = Callable[[Turns, Shape], Turns]


def bare_turns(segments: Sequence[Segment]) -> Turns:
    """The turns of one forward and its backward, which returns in reverse."""
    visits = list(enumerate(segments))
    forward = [Turn(i, segment.unit, Phase.FORWARD) for i, segment in visits]
    backward = [
        Turn(i, segment.unit, Phase.BACKWARD)
        for i, segment in reversed(visits)
        if segment.needs_backward
    ]
    return (*forward, *backward)


def mark_gathers(turns: Turns, shape: Shape) -> Turns:
    """Gather a sharded unit ahead of its turn, and free it unless it stays.

    Only the units of the current turn and of the next ``AHEAD`` turns are unsharded.  If
    ``reshard_after_forward`` is false, each unit stays unsharded until its last turn.
    """
    last = {turn.unit: i for i, turn in enumerate(turns)}
    unsharded: set[int] = set()
    marked = []
    for i, turn in enumerate(turns):
        stays = i + 1 < len(turns) and turns[i + 1].unit == turn.unit
        stays |= not shape.reshard_after_forward and last[turn.unit] > i
        ahead = turn.ahead if turn.unit in unsharded else (*turn.ahead, GATHER)
        marked.append(replace(turn, ahead=ahead, reshards=not stays))
        unsharded = unsharded | {turn.unit} if stays else unsharded - {turn.unit}
    return tuple(marked)


def mark_reductions(turns: Turns, shape: Shape) -> Turns:
    """Reduce the gradients of a trainable unit after its last backward turn."""
    last = {turn.unit: i for i, turn in enumerate(turns) if turn.phase is Phase.BACKWARD}
    return tuple(
        replace(turn, after=(*turn.after, REDUCE))
        if last.get(turn.unit) == i and turn.unit in shape.trainable_units
        else turn
        for i, turn in enumerate(turns)
    )


PASSES: list[Pass] = [mark_gathers, mark_reductions]


def make_schedule(
    segments: Sequence[Segment],
    *,
    trainable_units: frozenset[int],
    reshard_after_forward: bool,
) -> Schedule:
    """The schedule of a step that visits ``segments`` in forward and returns in reverse."""
    shape = Shape(trainable_units=trainable_units, reshard_after_forward=reshard_after_forward)
    turns = bare_turns(segments)
    for each in PASSES:
        turns = each(turns, shape)
    return Schedule(turns, num_forward=len(segments))


def straight_schedule(num_units: int, *, reshard_after_forward: bool) -> Schedule:
    """The schedule of a model that visits each of its units once, all of them trainable."""
    return make_schedule(
        [Segment(i, needs_backward=True) for i in range(num_units)],
        trainable_units=frozenset(range(num_units)),
        reshard_after_forward=reshard_after_forward,
    )
