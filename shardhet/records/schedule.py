"""The order in which a step visits the units, and when it launches each collective.

The execution order is a list of segments: the visits of forward, one after the other.  A
unit may be visited several times (tied embedding and head, shared blocks).  The segments
determine one list of turns for the whole step, the same on every rank, and the turns
determine the launch order of all collectives.  The gathers of a turn and of the next one are
launched by the time the turn begins, so that the next one overlaps the turn's compute.  A
reduction is launched when the unit's last backward turn ends.  For units a, b, c that are
resharded after forward:

           forward                       backward
           a      b      c               c      b      a         the units' turns
    G(a) G(b)     G(c)            G(b)          G(a)             launches of gathers
                                            R(c)   R(b)   R(a)   launches of reductions

G(a) and G(b) are launched before the first turn, G(c) when b begins, G(b) when forward ends
(the loss is computed meanwhile), G(a) when b begins in backward; each reduction when its
unit's turn ends.  c stays unsharded from forward to backward, so it is gathered once.  The
moments are those of ``fsdp.turn_walk``, and of the end of forward in ``fsdp.runtime``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

AHEAD = 1  # how many later turns' gathers are launched when a turn begins
MAX_REDUCTIONS_IN_FLIGHT = 1  # not counting the unit whose gradients accumulate


class Phase(Enum):
    """Which half of the step a turn belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Segment:
    """One visit of a unit in forward."""

    unit: int  # index into the model's units
    needs_backward: bool  # false if neither inputs nor parameters need a gradient


@dataclass(frozen=True, slots=True)
class Turn:
    """One visit of a unit in one phase, and what happens to its parameters around it."""

    segment: int  # index into the segments
    unit: int
    phase: Phase
    gathers: bool  # the unit is sharded before it and is gathered for this turn
    reshards: bool  # the unit is sharded again after it
    reduces: bool  # its gradients are complete after it and are reduced


class Launch(NamedTuple):
    """One collective of a step."""

    kind: Literal["gather", "reduce"]
    unit: int
    turn: int  # the turn that a gather is for, or after which the gradients are complete


@dataclass(frozen=True, slots=True)
class Schedule:
    """All turns of a step, forward and then backward, and the launches around each.

    This is the only place that decides the order of collectives.
    """

    turns: tuple[Turn, ...]
    num_forward: int  # number of forward turns; equals len(turns) if no gradients are needed

    def gathers_by(self, cursor: int) -> tuple[Launch, ...]:
        """The gathers launched by the time the turn at ``cursor`` computes: its own and the
        next turn's.  Gathers of earlier turns are not listed.
        """
        return tuple(
            Launch("gather", turn.unit, i)
            for i, turn in enumerate(self.turns[cursor : cursor + 1 + AHEAD], cursor)
            if turn.gathers
        )

    def reduction_after(self, cursor: int) -> tuple[Launch, ...]:
        """The reduction that is launched when the turn at ``cursor`` ends, if any."""
        reduces = cursor >= 0 and self.turns[cursor].reduces
        return (Launch("reduce", self.turns[cursor].unit, cursor),) if reduces else ()

    def beside(self, cursor: int) -> tuple[Launch, ...]:
        """The collectives that overlap the compute of the turn at ``cursor``: the gathers of
        later turns, and the reduction of the previous turn.
        """
        ahead = tuple(each for each in self.gathers_by(cursor) if each.turn > cursor)
        return (*ahead, *self.reduction_after(cursor - 1))

    def launches(self) -> tuple[Launch, ...]:
        """All collectives of units in launch order; the root's come before and after them."""
        order: dict[Launch, None] = {}
        for i in range(len(self.turns)):
            order |= dict.fromkeys((*self.gathers_by(i), *self.reduction_after(i)))
        return tuple(order)


def make_schedule(
    segments: Sequence[Segment],
    *,
    trainable_units: frozenset[int],
    reshard_after_forward: bool,
) -> Schedule:
    """The turns of a step that visits ``segments`` in forward and returns in reverse.

    Only the units of the current turn and of the next ``AHEAD`` turns are unsharded.  If
    ``reshard_after_forward`` is false, each unit stays unsharded until its last backward turn.
    """
    visits = [(i, segment.unit, Phase.FORWARD) for i, segment in enumerate(segments)]
    visits += [
        (i, segment.unit, Phase.BACKWARD)
        for i, segment in reversed(list(enumerate(segments)))
        if segment.needs_backward
    ]
    unsharded: set[int] = set()
    turns = []
    for i, (segment, unit, phase) in enumerate(visits):
        later = visits[i + 1 :]
        keeps = bool(later) and later[0][1] == unit
        keeps |= not reshard_after_forward and any(visit[1] == unit for visit in later)
        turns.append(
            Turn(
                segment=segment,
                unit=unit,
                phase=phase,
                gathers=unit not in unsharded,
                reshards=not keeps,
                reduces=phase is Phase.BACKWARD
                and unit in trainable_units
                and all(visit[1] != unit for visit in later),
            )
        )
        unsharded = unsharded | {unit} if keeps else unsharded - {unit}
    return Schedule(tuple(turns), num_forward=len(segments))


def straight_schedule(num_units: int, *, reshard_after_forward: bool) -> Schedule:
    """The schedule of a model that visits each of its units once, all of them trainable."""
    return make_schedule(
        [Segment(i, needs_backward=True) for i in range(num_units)],
        trainable_units=frozenset(range(num_units)),
        reshard_after_forward=reshard_after_forward,
    )
