"""The order in which a step visits the units, and when it launches each transfer.

The execution order is a list of segments: the visits of forward, one after the other.  A
unit may be visited several times (tied embedding and head, shared blocks).  The segments
determine one list of turns for the whole step, the same on every rank, and passes
(``schedule.passes``) mark on each turn what is launched for it and after it.  What is launched
ahead of a turn or of the next one is launched by the time the turn begins, so that the next
turn's overlaps the turn's compute.  What is launched after a turn is launched when it ends.
For units a, b, c that are resharded after forward:

           forward                       backward
           a      b      c               c      b      a         the units' turns
    G(a) G(b)     G(c)            G(b)          G(a)             launches of gathers
                                            R(c)   R(b)   R(a)   launches of reductions

G(a) and G(b) are launched before the first turn, G(c) when b begins, G(b) when forward ends
(the loss is computed meanwhile), G(a) when b begins in backward; each reduction when its
unit's turn ends.  c stays unsharded from forward to backward, so it is gathered once.  The
moments are those of ``fsdp.turn_walk``, and of the end of forward in ``fsdp.runtime``.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

AHEAD = 1  # how many later turns' launches are made when a turn begins


class Phase(Enum):
    """Which half of the step a turn belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """A kind of transfer that a step launches.

    Its price is in ``pricing.launches.PRICES``, what a rank does in ``fsdp.launches.RUNS``.
    """

    value: str  # its name in traces and figures
    resource: str  # one transfer at a time occupies it
    max_in_flight: int | None = None  # of those launched after turns; None: no bound


GATHER = LaunchKind("gather", "links")
# One, not counting the unit whose gradients accumulate: two units' gradients are alive.
REDUCE = LaunchKind("reduce", "links", max_in_flight=1)


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


class Launch(NamedTuple):
    """One transfer of a step."""

    kind: LaunchKind
    unit: int
    turn: int  # the turn that it is for, or after which it is launched


@dataclass(frozen=True, slots=True)
class Schedule:
    """All turns of a step, forward and then backward, and the launches around each.

    This is the only place that decides the order of collectives.
    """

    turns: tuple[Turn, ...]
    num_forward: int  # number of forward turns; equals len(turns) if no gradients are needed

    def launched_by(self, cursor: int) -> tuple[Launch, ...]:
        """What is launched ahead by the time the turn at ``cursor`` computes: for it and for
        the next turn.  Launches for earlier turns are not listed.
        """
        return tuple(
            Launch(kind, turn.unit, i)
            for i, turn in enumerate(self.turns[cursor : cursor + 1 + AHEAD], cursor)
            for kind in turn.ahead
        )

    def launched_after(self, cursor: int) -> tuple[Launch, ...]:
        """What is launched when the turn at ``cursor`` ends."""
        if cursor < 0:
            return ()
        turn = self.turns[cursor]
        return tuple(Launch(kind, turn.unit, cursor) for kind in turn.after)

    def beside(self, cursor: int) -> tuple[Launch, ...]:
        """The transfers that overlap the compute of the turn at ``cursor``: those ahead of
        later turns, and those launched after the previous turn.
        """
        ahead = tuple(each for each in self.launched_by(cursor) if each.turn > cursor)
        return (*ahead, *self.launched_after(cursor - 1))

    def launches(self) -> tuple[Launch, ...]:
        """All transfers of units in launch order; the root's come before and after them."""
        order: dict[Launch, None] = {}
        for i in range(len(self.turns)):
            order |= dict.fromkeys((*self.launched_by(i), *self.launched_after(i)))
        return tuple(order)
