"""What the runtime tells about itself while it runs: one event per piece of work or wait."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import NamedTuple

from torch.profiler import record_function


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
    cpu_s: float | None = None  # that the thread itself has run for; None: not counted


Observer = Callable[[Event], None]


class Observers:
    """Those who want to know; costs two truth tests per activity while there are none.

    ``is_traced`` names every activity in the trace that torch.profiler records meanwhile.
    """

    def __init__(self) -> None:
        self.is_traced = False
        self._observers: list[Observer] = []
        self._counts_cpu = False

    def add(self, observer: Observer, *, counts_cpu: bool = False) -> None:
        """Call ``observer`` with every event from now on, in the thread that does the work.

        ``counts_cpu`` fills ``cpu_s`` of all events: two calls of the kernel for each.  What an
        observer takes belongs to the activity for those added after it and in traces: that is
        how a device is made to look slower.
        """
        self._observers.append(observer)
        self._counts_cpu |= counts_cpu

    def watch(
        self, unit: str, activity: Activity, microbatch: int | None = None
    ) -> AbstractContextManager[None]:
        """Report what happens inside the context."""
        if not self._observers and not self.is_traced:
            return _UNWATCHED
        return self._watch(unit, activity, microbatch)

    @contextmanager
    def _watch(self, unit: str, activity: Activity, microbatch: int | None) -> Iterator[None]:
        start_s = time.perf_counter()
        start_cpu_s = time.thread_time() if self._counts_cpu else None
        with (
            record_function(_label(unit, activity, microbatch))
            if self.is_traced
            else _UNWATCHED
        ):
            yield
            cpu_s = None if start_cpu_s is None else time.thread_time() - start_cpu_s
            for observer in self._observers:
                end_s = time.perf_counter()
                observer(Event(unit, activity, microbatch, start_s, end_s, cpu_s))


def _label(unit: str, activity: Activity, microbatch: int | None) -> str:
    place = unit or "root"
    return f"{activity.value} {place}" + ("" if microbatch is None else f" [{microbatch}]")


_UNWATCHED = nullcontext()
