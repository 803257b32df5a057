"""The order in which a step visits the units, and when it launches each transfer.

The execution order is a list of segments: the visits of forward, one after the other.  A
unit may be visited several times (tied embedding and head, shared blocks).  The segments
determine one list of turns for the whole step, the same on every rank, and passes mark on each
turn what is launched for it and after it.  What is launched ahead of a turn or of the next one
is launched by the time the turn begins, so that the next turn's overlaps the turn's compute.
What is launched after a turn is launched when it ends.
For units a, b, c that are resharded after forward:

           forward                       backward
           a      b      c               c      b      a         the units' turns
    G(a) G(b)     G(c)            G(b)          G(a)             launches of gathers
                                            R(c)   R(b)   R(a)   launches of reductions

G(a) and G(b) are launched before the first turn, G(c) when b begins, G(b) when forward ends
(the loss is computed meanwhile), G(a) when b begins in backward; each reduction when its
unit's turn ends.  c stays unsharded from forward to backward, so it is gathered once.
``records.ops`` makes of turns and marks the list that ranks follow.

A step of several rounds is one list too.  Nothing is launched ahead of a later round, which
ranks begin together.  What was launched after the last turn of a round goes on beside the next.

A pass maps the turns of a step to turns with more marks.  A new kind of launch is a pass of its
own: append it to ``PASSES``, and add the kind's price and what a rank does (``LaunchKind``).
Units that stay unsharded lose all marks in the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, Self

AHEAD = 1  # how many later turns' launches are made when a turn begins


class Phase(Enum):
    """Which half of the step a turn belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """A kind of transfer that a step launches.

    Its price is in ``pricing.launches.PRICES``, what a rank does in
    ``fsdp.step.schedule_executor.RUNS``.
    """

    value: str  # its name in traces and figures
    resource: str  # one transfer at a time occupies it
    max_in_flight: int | None = None  # of those launched after turns; None: no bound


GATHER = LaunchKind("gather", "links")
# One, not counting the unit whose gradients accumulate: two units' gradients are alive.
REDUCE = LaunchKind("reduce", "links", max_in_flight=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """The rounds of a step, and how often it gathers and reduces each unit.

        reshard_after_forward  reshard_after_backward   a unit is gathered
        True                   True                     for every use
        False                  True                     once a round
        False                  False                    once a step

    Raises ``ValueError`` for other combinations.
    """

    num_rounds: int = 1
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    reduce_each_round: bool = True  # False: gradients are kept whole and reduced once a step

    def __post_init__(self) -> None:
        if self.num_rounds < 1:
            raise ValueError(
                f"plan: num_rounds is {self.num_rounds} but must be at least 1. Give 1 for a "
                "step without accumulation."
            )
        if self.reshard_after_forward and not self.reshard_after_backward:
            raise ValueError(
                "plan: reshard_after_forward is True but reshard_after_backward is False, so "
                "units would be kept for the next round but not for their backward. Set "
                "reshard_after_forward=False too."
            )

    @classmethod
    def of(cls, stated: Any) -> Self:
        """The form of what has the same fields, such as a plan."""
        return cls(
            num_rounds=stated.num_rounds,
            reshard_after_forward=stated.reshard_after_forward,
            reshard_after_backward=stated.reshard_after_backward,
            reduce_each_round=stated.reduce_each_round,
        )

    def is_like(self, other: "StepForm") -> bool:
        """Whether only the number of rounds differs."""
        return replace(self, num_rounds=other.num_rounds) == other


@dataclass(frozen=True, slots=True)
class Segment:
    """One visit of a unit in forward."""

    unit: int  # index into the model's units
    needs_backward: bool  # false if neither inputs nor parameters need a gradient


@dataclass(frozen=True, slots=True)
class Turn:
    """One visit of a unit in one phase, and what is launched around it."""

    segment: int  # index into the segments
    unit: int
    phase: Phase
    ahead: tuple[LaunchKind, ...] = ()  # launched earlier, complete when it computes
    reshards: bool = True  # the unit's parameters are freed after it
    after: tuple[LaunchKind, ...] = ()  # launched when it ends
    round: int = 0


class Launch(NamedTuple):
    """One transfer of a step."""

    kind: LaunchKind
    unit: int
    turn: int  # the turn that it is for, or after which it is launched


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """All turns of a step, round after round, and the launches around each.

    Collectives come in this order on all ranks; ``records.ops`` decides when each is launched,
    and ``ScheduleExecutor.reduce_rest`` ends with the root's.  A schedule equals itself alone,
    so that lists of it are laid out once.
    """

    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]  # of the forward of each round
    trainable_units: frozenset[int]
    form: StepForm
    # Units whose gradients earlier rounds, which visited other units, have left unreduced.
    unreduced: frozenset[int] = frozenset()

    def launched_by(self, cursor: int) -> tuple[Launch, ...]:
        """What is launched ahead by the time the turn at ``cursor`` computes: for it and for
        the next turn of its round.  Launches for earlier turns are not listed.
        """
        turns = self.turns[cursor : cursor + 1 + AHEAD]
        return tuple(
            Launch(kind, turn.unit, i)
            for i, turn in enumerate(turns, cursor)
            if turn.round == turns[0].round
            for kind in turn.ahead
        )

    def launched_last(self) -> tuple[Launch, ...]:
        """What is launched when all turns have ended: reductions that no turn is left for."""
        units = self.unreduced - {t.unit for t in self.turns if t.phase is Phase.BACKWARD}
        return tuple(Launch(REDUCE, unit, len(self.turns)) for unit in sorted(units))

    def unreduced_at(self, cursor: int) -> frozenset[int]:
        """Units that hold gradients and are not reduced before the turn at ``cursor``."""
        unreduced = set(self.unreduced)
        for turn in self.turns[:cursor]:
            if REDUCE in turn.after:
                unreduced.discard(turn.unit)
            elif turn.phase is Phase.BACKWARD and turn.unit in self.trainable_units:
                unreduced.add(turn.unit)
        return frozenset(unreduced)


class RoundPhase(NamedTuple):
    """The forward or the backward of one round."""

    round: int
    phase: Phase


def one_forward_one_backward(num_rounds: int, in_flight: int) -> tuple[RoundPhase, ...]:
    """What a stage takes one after the other in a step."""
    order: list[RoundPhase] = []
    for number in range(num_rounds + in_flight):
        if number >= in_flight:
            order.append(RoundPhase(number - in_flight, Phase.BACKWARD))
        if number < num_rounds:
            order.append(RoundPhase(number, Phase.FORWARD))
    return tuple(each for each in order if each.round < num_rounds)


ONE_ROUND = StepForm()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What passes know of the plan and the model."""

    trainable_units: frozenset[int]
    form: StepForm
    always_unsharded_units: frozenset[int] = frozenset()  # gathered and reduced with the root


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


def clear_always_unsharded(turns: Turns, shape: Shape) -> Turns:
    """Launch nothing for units that stay unsharded for the whole step, like the root."""
    return tuple(
        replace(turn, ahead=(), reshards=False, after=())
        if turn.unit in shape.always_unsharded_units
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
    unreduced: frozenset[int] = frozenset(),
    always_unsharded_units: frozenset[int] = frozenset(),
    in_flight: int = 1,
) -> Schedule:
    """The schedule of a step that visits ``segments`` in forward and returns in reverse.

    A stage of a pipeline may have several rounds ``in_flight``, begun and not finished.
    If ``first_round`` is not 0, it is that of the rest of a step whose earlier rounds visited
    other units and have left the gradients of the units in ``unreduced``.
    """
    shape = Shape(
        trainable_units=trainable_units,
        form=form,
        always_unsharded_units=always_unsharded_units,
    )
    order = one_forward_one_backward(form.num_rounds, in_flight)
    turns = bare_turns(segments, [each for each in order if each.round >= first_round])
    for each in PASSES:
        turns = each(turns, shape)
    return Schedule(
        turns=clear_always_unsharded(turns, shape),
        segments=tuple(segments),
        trainable_units=trainable_units,
        form=form,
        unreduced=unreduced,
    )


def rest_of_step(
    schedule: Schedule,
    first_round: int,
    unreduced: frozenset[int],
    always_unsharded_units: frozenset[int] = frozenset(),
) -> Schedule:
    """The schedule of the same visits from ``first_round`` on, where all other units than
    those that stay are sharded.
    """
    return make_schedule(
        schedule.segments,
        trainable_units=schedule.trainable_units,
        form=schedule.form,
        first_round=first_round,
        unreduced=unreduced,
        always_unsharded_units=always_unsharded_units,
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
