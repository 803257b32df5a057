"""In which order the units are visited: found in the first step, checked in all others.

[Note: Finding the order]
The first forward with gradients, and the first without, find out in which order the units
are visited.  Before each visit all ranks tell each other where they are; ranks without
samples follow the others.  Nothing is prefetched meanwhile.  From then on the schedule is
fixed, ranks without samples walk it alone, and a visit out of order is an error.
"""

from collections.abc import Sequence

from shardhet.distributed import Channel
from shardhet.schedule import Schedule, Segment, make_schedule

NOT_VISITING = -1
END_OF_FORWARD = -2


class VisitOrder:
    """The order of visits of the forward in progress."""

    def __init__(
        self,
        unit_fqns: Sequence[str],
        *,
        trainable_units: frozenset[int],
        reshard_after_forward: bool,
        control: Channel,
    ) -> None:
        self.schedule: Schedule | None = None  # None while the order is being found
        self.found: list[Segment] = []
        self._has_gradients = False
        self._schedules: dict[bool, Schedule] = {}  # by whether gradients are enabled
        self._fqns = tuple(unit_fqns)
        self._trainable_units = trainable_units
        self._reshard_after_forward = reshard_after_forward
        self._control = control

    def begin(self, *, has_gradients: bool) -> None:
        """A forward begins; ``schedule`` is known if there was one like it."""
        self._has_gradients = has_gradients
        self.schedule = self._schedules.get(has_gradients)
        self.found = []

    def find(self, unit: int, needs_backward: bool) -> Segment:
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

    def keeps_after_forward(self, unit: int, following: int) -> bool:
        """While finding: whether the unit stays unsharded although another one is visited."""
        return unit == following or self._keeps_unsharded

    def expect(self, place: int, unit: int, needs_backward: bool) -> bool:
        """Whether the visit that the schedule has at this place needs a backward.

        Raises ``RuntimeError`` if it has another one, or one without the backward needed.
        """
        assert self.schedule is not None
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
        """A computing rank has left the module's forward.  Collective while finding."""
        if self.schedule is None:
            self._agree(END_OF_FORWARD, False)
        elif place < self.schedule.num_forward:
            missing = self._name(self.schedule.turns[place].unit)
            raise RuntimeError(
                f"model(...): forward ended before unit {missing!r} was called, as it was when "
                f"the order was found. Call the units in the same order at every step."
            )

    def settle(self) -> Schedule:
        """The schedule of what was found, kept for all forwards like this one."""
        self.schedule = self._schedules[self._has_gradients] = make_schedule(
            self.found,
            trainable_units=self._trainable_units,
            reshard_after_forward=not self._keeps_unsharded,
        )
        return self.schedule

    @property
    def _keeps_unsharded(self) -> bool:
        """Whether units stay unsharded for a later visit; an evaluation saves the memory."""
        return self._has_gradients and not self._reshard_after_forward

    def _agree(self, unit: int, needs_backward: bool) -> Segment:
        rows = self._control.exchange([unit, needs_backward])
        visited = {int(u) for u, _ in rows if int(u) != NOT_VISITING}
        if len(visited) > 1:
            names = [self._name(int(u)) for u, _ in rows]
            raise RuntimeError(
                f"model(...): ranks visit different units at place {len(self.found)} of "
                f"forward: {names} in plan order. The order of units must not depend on the "
                "samples."
            )
        # A rank that recomputes cannot tell which outputs of the unit before need a gradient
        # and takes all of them to; what one rank holds to need a backward has one on all.
        return Segment(visited.pop(), any(bool(needs) for _, needs in rows))

    def _name(self, unit: int) -> str:
        names = {NOT_VISITING: "(no samples)", END_OF_FORWARD: "(end of forward)"}
        return names.get(unit) or self._fqns[unit]
