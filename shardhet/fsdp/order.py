"""In which order the units are visited: found while a model is probed, checked ever after.

[Note: Finding the order]
A probe (probe.py) runs the model before the first step and finds out in which order the units
are visited.  Before each visit all ranks tell each other where they are; ranks without samples
follow the others.  Nothing is prefetched meanwhile.  From then on the schedule is fixed, ranks
without samples walk it alone, and a visit out of order is an error.
"""

from collections.abc import Sequence

from shardhet.comm.channel import Channel
from shardhet.records.schedule import Schedule, Segment, make_schedule

NOT_VISITING = -1
END_OF_FORWARD = -2
FAILED = -3


class PeerFailed(BaseException):
    """Another rank cannot go on with this forward; passes the model's own ``except`` by."""


class OrderFinder:
    """The order of visits of one forward, as all ranks agree on it."""

    def __init__(self, unit_fqns: Sequence[str], control: Channel) -> None:
        self.found: list[Segment] = []
        self._fqns = tuple(unit_fqns)
        self._control = control

    def visit(self, unit: int, needs_backward: bool) -> Segment:
        """Agree with all ranks that this visit comes next.  Collective."""
        segment = self._agree(unit, needs_backward)
        self.found.append(segment)
        return segment

    def follow(self) -> Segment | None:
        """On a rank without samples: the others' next visit, None at the end.  Collective."""
        segment = self._agree(NOT_VISITING, False)
        if segment.unit == END_OF_FORWARD:
            return None
        self.found.append(segment)
        return segment

    def end(self) -> None:
        """A computing rank has left the module's forward.  Collective."""
        self._agree(END_OF_FORWARD, False)

    def fail(self) -> None:
        """This rank cannot go on; all others get ``PeerFailed``.  Collective."""
        self._control.exchange([FAILED, False])

    def _agree(self, unit: int, needs_backward: bool) -> Segment:
        rows = self._control.exchange([unit, needs_backward])
        visited = {int(u) for u, _ in rows if int(u) != NOT_VISITING}
        if FAILED in visited:
            raise PeerFailed
        if len(visited) > 1:
            names = [_name(self._fqns, int(u)) for u, _ in rows]
            raise RuntimeError(
                f"model(...): ranks visit different units at place {len(self.found)} of "
                f"forward: {names} in plan order. The order of units must not depend on the "
                "samples."
            )
        # What one rank holds to need a backward has one on all.
        return Segment(visited.pop(), any(bool(needs) for _, needs in rows))


class VisitOrder:
    """The order of visits of the forward in progress, checked against its schedule."""

    def __init__(self, unit_fqns: Sequence[str]) -> None:
        self.schedule = make_schedule(
            (), trainable_units=frozenset(), reshard_after_forward=True
        )
        self._fqns = tuple(unit_fqns)

    def begin(self, schedule: Schedule) -> None:
        """A forward with this schedule begins."""
        self.schedule = schedule

    def expect(self, place: int, unit: int, needs_backward: bool) -> bool:
        """Whether the visit that the schedule has at this place needs a backward.

        Raises ``RuntimeError`` if it has another one, or one without the backward needed.
        """
        turns = self.schedule.turns[: self.schedule.num_forward]
        expected = turns[place].unit if place < len(turns) else END_OF_FORWARD
        if unit != expected:
            raise RuntimeError(
                f"model(...): unit {self._name(unit)!r} was called at place {place} of "
                f"forward, where {self._name(expected)!r} was when the order was found. Call "
                "the units in the same order at every step."
            )
        backward = self.schedule.turns[len(turns) :]
        has_backward = any(turn.segment == place for turn in backward)
        if needs_backward and not has_backward:
            raise RuntimeError(
                f"model(...): unit {self._name(unit)!r} needs a backward now, unlike when the "
                "order was found. Freeze and unfreeze parameters before HetFSDP."
            )
        return has_backward

    def end_visits(self, place: int) -> None:
        """Raise ``RuntimeError`` if a computing rank leaves the forward too early."""
        if place < self.schedule.num_forward:
            missing = self._name(self.schedule.turns[place].unit)
            raise RuntimeError(
                f"model(...): forward ended before unit {missing!r} was called, as it was when "
                f"the order was found. Call the units in the same order at every step."
            )

    def _name(self, unit: int) -> str:
        return _name(self._fqns, unit)


def _name(fqns: Sequence[str], unit: int) -> str:
    names = {NOT_VISITING: "(no samples)", END_OF_FORWARD: "(end of forward)"}
    return names.get(unit) or fqns[unit]
