"""What the runtime tells about itself while it runs: one event per piece of work or wait."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import NamedTuple


class Activity(Enum):
    """What a rank was doing between the two times of an event."""

    FORWARD = "forward"
    BACKWARD = "backward"  # recomputation included
    WAIT_GATHER = "wait_gather"  # for parameters that other ranks store
    WAIT_REDUCE = "wait_reduce"  # for gradients of other ranks, and adding them up
    AGREE = "agree"  # small exchanges between hosts, which end when the slowest rank comes


class Event(NamedTuple):
    """One activity.  Times are of ``time.perf_counter``; on an accelerator they are the
    host's, which runs ahead of the device.
    """

    unit: str  # fqn; "" is the root
    activity: Activity
    microbatch: int | None
    start_s: float
    end_s: float


Observer = Callable[[Event], None]


class Observers:
    """Those who want to know; costs one truth test per activity while there are none."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Call ``observer`` with every event from now on, in the thread that does the work."""
        self._observers.append(observer)

    def watch(
        self, unit: str, activity: Activity, microbatch: int | None = None
    ) -> AbstractContextManager[None]:
        """Report what happens inside the context."""
        if not self._observers:
            return _UNWATCHED
        return self._watch(unit, activity, microbatch)

    @contextmanager
    def _watch(self, unit: str, activity: Activity, microbatch: int | None) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        event = Event(unit, activity, microbatch, start_s, time.perf_counter())
        for observer in self._observers:
            observer(event)


_UNWATCHED = nullcontext()
