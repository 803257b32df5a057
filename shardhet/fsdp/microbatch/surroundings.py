"""What happens around the runs of a visit: the tuple of surroundings that each visit carries.

A surrounding is one concern: random numbers, the backward turn, a report to observers.  Visits
enter them in the order of the tuple.  A new concern is a class of its own and a line in
``Visits.around`` (``fsdp.step.around``).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from shardhet.fsdp.sharding.seeds import RandomStates
from shardhet.records.schedule import Phase

Context = AbstractContextManager[Any]


class Surrounding:
    """One concern around one visit.  A method is called when its place begins, and may return
    a context that ends with it; those of this base class do nothing.
    """

    def in_phase(self, phase: Phase) -> Context | None:
        """Around all runs of the visit in forward, or in backward."""
        return None

    def in_microbatch(self, phase: Phase, microbatch: int) -> Context | None:
        """Around one microbatch; in backward with its recomputation."""
        return None

    def in_function(self, start: int, is_repeated: bool) -> Context | None:
        """Around the unit's own forward, also when backward repeats it.  ``start`` is the
        first sample of the microbatch within the rank's batch.
        """
        return None


def entered(around: Sequence[Surrounding], place: str, *given: Any) -> Context:
    """One context of all that ``place``, a method of theirs, returns, entered in order."""
    needed: list[Context] = []
    nothing = getattr(Surrounding, place)
    for one in around:  # a loop that calls nothing in vain: it runs several times a visit
        if getattr(type(one), place) is not nothing:
            context = getattr(one, place)(*given)
            if context is not None:
                needed.append(context)
    if not needed:
        return nullcontext()
    if len(needed) == 1:
        return needed[0]
    stack = ExitStack()
    with stack:
        for each in needed:
            stack.enter_context(each)
        return stack.pop_all()


class Seeded(Surrounding):
    """Seeds by unit, call, step and sample, whichever rank computes it and how often."""

    def __init__(
        self, random: RandomStates, fqn: str, *, call: int, step: int, first_sample: int
    ) -> None:
        """``first_sample`` is the global index of the first sample of the rank's batch."""
        self._random = random
        self._fqn = fqn
        self._call = call
        self._step = step
        self._first_sample = first_sample

    def in_phase(self, phase: Phase) -> Context | None:
        """Restore the program's random state afterwards."""
        return self._random.around(is_training=True)

    def in_function(self, start: int, is_repeated: bool) -> Context | None:
        """Seed."""
        sample = self._first_sample + start
        self._random.seed(self._fqn, self._call, self._step, sample, is_training=True)
        return None
