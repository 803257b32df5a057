"""The order in which units are visited: found while the model is probed, then checked.

[Note: Finding the order]
A probe (probe.py) runs the model before the first call of each kind and finds the order in
which the units are visited.  Before each visit all ranks exchange the unit that they are about
to visit; ranks without samples follow the others.  A probe prefetches nothing.  After it the
schedule is fixed, ranks without samples follow it without being told, and a visit out of order
is an error.
"""

from collections.abc import Sequence

from shardhet.comm.channel import Channel
from shardhet.records.schedule import Segment

NOT_VISITING = -1
END_OF_FORWARD = -2
FAILED = -3


class PeerFailed(BaseException):
    """Another rank cannot continue this forward.  The model's ``except`` does not catch it."""


class GatherFailed(BaseException):
    """This rank failed where others wait for its rows, so that they cannot agree on it.

    The model's ``except`` does not catch it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class OrderFinder:
    """Finds the order of visits of one forward, on which all ranks agree."""

    def __init__(
        self, unit_fqns: Sequence[str], control: Channel, *, is_behind: bool = False
    ) -> None:
        """A rank that ``is_behind`` follows visits of others that it does not make itself."""
        self.found: list[Segment] = []
        self.has_to_run = True  # whether any rank computes anything at the last visit
        self._is_behind = is_behind
        self._fqns = tuple(unit_fqns)
        self._control = control

    def visit(
        self, unit: int, *, needs_backward: bool = False, has_to_run: bool = False
    ) -> Segment | None:
        """Agree with all ranks that this visit comes next, or another one before it; None at
        the end of forward.  Collective.

        ``unit`` is ``NOT_VISITING`` on a rank without samples, and ``END_OF_FORWARD`` on a
        computing one that has left the module's forward, where others may be behind.
        """
        segment = self._agree(unit, needs_backward, has_to_run)
        if segment.unit == END_OF_FORWARD:
            return None
        self.found.append(segment)
        return segment

    def fail(self) -> None:
        """Report that this rank cannot continue; others raise ``PeerFailed``.  Collective."""
        self._control.exchange([FAILED, False, False, False])

    def _agree(self, unit: int, needs_backward: bool, has_to_run: bool) -> Segment:
        rows = self._control.exchange([unit, needs_backward, self._is_behind, has_to_run])
        visiting = [row for row in rows if int(row[0]) != NOT_VISITING]
        if any(int(row[0]) == FAILED for row in visiting):
            raise PeerFailed
        visited = {int(u) for u, _, is_behind, _ in visiting if not is_behind}
        if END_OF_FORWARD in visited:  # where those that are behind have to be, too
            visited = {int(row[0]) for row in visiting}
        if len(visited) > 1:
            names = [_name(self._fqns, int(row[0])) for row in rows]
            raise RuntimeError(
                f"model(...): ranks visit different units at place {len(self.found)} of "
                f"forward: {names} in plan order. The order of units must not depend on the "
                "samples."
            )
        # A visit that needs a backward on one rank has one on all.
        (found,) = visited
        self.has_to_run = any(row[3] for row in visiting if int(row[0]) == found)
        return Segment(found, any(bool(row[1]) for row in visiting if int(row[0]) == found))


def _name(fqns: Sequence[str], unit: int) -> str:
    names = {NOT_VISITING: "(no samples)", END_OF_FORWARD: "(end of forward)"}
    return names.get(unit) or fqns[unit]
