"""The passes that make a schedule: bare turns first, then marks on each of them.

A pass maps the turns of a step to turns with more marks.  A new kind of launch is a pass of its
own: append it to ``PASSES``, and add the kind's price and what a rank does (``LaunchKind``).
Units that stay unsharded lose all marks in the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardhet.records.schedule.pipeline import RoundPhase, one_forward_one_backward
from shardhet.records.schedule.turns import (
    GATHER,
    REDUCE,
    Phase,
    Schedule,
    Segment,
    StepForm,
    Turn,
)

ONE_ROUND = StepForm()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What passes know of the plan and the model."""

    trainable_units: frozenset[int]
    form: StepForm
    staying_units: frozenset[int] = frozenset()  # gathered and reduced with the root


Turns = tuple[Turn, ...]
Pass = Callable[[Turns, Shape], Turns]


def bare_turns(segments: Sequence[Segment], order: Sequence[RoundPhase]) -> Turns:
    """The turns of each round's forward, and of its backward, which returns in reverse."""
    visits = list(enumerate(segments))
    turns: list[Turn] = []
    for number, phase in order:
        if phase is Phase.FORWARD:
            turns += [Turn(i, each.unit, phase, round=number) for i, each in visits]
        else:
            turns += [
                Turn(i, each.unit, phase, round=number)
                for i, each in reversed(visits)
                if each.needs_backward
            ]
    return tuple(turns)


def mark_gathers(turns: Turns, shape: Shape) -> Turns:
    """Gather a sharded unit ahead of its turn, and free it unless it stays.

    Only the units of the current turn and of the next ``AHEAD`` turns are unsharded, unless the
    form of the step keeps units until their last turn of the round, or of the step.
    """
    form = shape.form
    last = {turn.unit: i for i, turn in enumerate(turns)}
    last_of_round = {(turn.round, turn.unit): i for i, turn in enumerate(turns)}
    unsharded: set[int] = set()
    marked = []
    for i, turn in enumerate(turns):
        unit = turn.unit
        stays = i + 1 < len(turns) and turns[i + 1].unit == unit
        stays |= not form.reshard_after_forward and last_of_round[turn.round, unit] > i
        stays |= not form.reshard_after_backward and last[unit] > i
        ahead = turn.ahead if unit in unsharded else (*turn.ahead, GATHER)
        marked.append(replace(turn, ahead=ahead, reshards=not stays))
        unsharded = unsharded | {unit} if stays else unsharded - {unit}
    return tuple(marked)


def mark_reductions(turns: Turns, shape: Shape) -> Turns:
    """Reduce the gradients of a trainable unit after its last backward turn, of every round or
    of the step.
    """

    def gradients(turn: Turn) -> tuple[int, int]:
        return (turn.round if shape.form.reduce_each_round else 0), turn.unit

    last = {gradients(turn): i for i, turn in enumerate(turns) if turn.phase is Phase.BACKWARD}
    return tuple(
        replace(turn, after=(*turn.after, REDUCE))
        if last.get(gradients(turn)) == i and turn.unit in shape.trainable_units
        else turn
        for i, turn in enumerate(turns)
    )


def clear_staying(turns: Turns, shape: Shape) -> Turns:
    """Launch nothing for units that stay unsharded for the whole step, like the root."""
    return tuple(
        replace(turn, ahead=(), reshards=False, after=())
        if turn.unit in shape.staying_units
        else turn
        for turn in turns
    )


PASSES: list[Pass] = [mark_gathers, mark_reductions]


def make_schedule(
    segments: Sequence[Segment],
    *,
    trainable_units: frozenset[int],
    form: StepForm = ONE_ROUND,
    first_round: int = 0,
    owed: frozenset[int] = frozenset(),
    staying_units: frozenset[int] = frozenset(),
    in_flight: int = 1,
) -> Schedule:
    """The schedule of a step that visits ``segments`` in forward and returns in reverse.

    A stage of a pipeline may have several rounds ``in_flight``, begun and not finished.
    If ``first_round`` is not 0, it is that of the rest of a step whose earlier rounds visited
    other units and have left the gradients of the units in ``owed``.
    """
    shape = Shape(trainable_units=trainable_units, form=form, staying_units=staying_units)
    order = one_forward_one_backward(form.num_rounds, in_flight)
    turns = bare_turns(segments, [each for each in order if each.round >= first_round])
    for each in PASSES:
        turns = each(turns, shape)
    return Schedule(
        turns=clear_staying(turns, shape),
        segments=tuple(segments),
        trainable_units=trainable_units,
        form=form,
        owed=owed,
    )


def rest_of_step(
    schedule: Schedule,
    first_round: int,
    owed: frozenset[int],
    staying_units: frozenset[int] = frozenset(),
) -> Schedule:
    """The schedule of the same visits from ``first_round`` on, where all other units than
    those that stay are sharded.
    """
    return make_schedule(
        schedule.segments,
        trainable_units=schedule.trainable_units,
        form=schedule.form,
        first_round=first_round,
        owed=owed,
        staying_units=staying_units,
    )


def straight_schedule(
    num_units: int, form: StepForm = ONE_ROUND, in_flight: int = 1
) -> Schedule:
    """The schedule of a model that visits each of its units once, all of them trainable."""
    return make_schedule(
        [Segment(i, needs_backward=True) for i in range(num_units)],
        trainable_units=frozenset(range(num_units)),
        form=form,
        in_flight=in_flight,
    )
