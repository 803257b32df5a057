"""What the runtime tells about itself while it runs: one event per piece of work or wait.

[Note: Whose clock]
On an accelerator the host runs ahead: it has launched a computation long before the device
begins it, and it passes a wait between streams at once.  What the device did meanwhile is
between two of its own events on the compute stream, one before and one after:

    host      |launch|launch|agree ....|launch|
    device           |b  forward  e|   |b  forward  e|
                                 b...e                  idle for that long, for a wait's pair

Nobody waits for such events within a step; they are read when the device is past them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

from torch.profiler import record_function


class Activity(Enum):
    """What a rank was doing between the two times of an event."""

    FORWARD = "forward"
    BACKWARD = "backward"  # recomputation included
    WAIT_GATHER = "wait_gather"  # for parameters that other ranks store
    WAIT_REDUCE = "wait_reduce"  # for gradients of other ranks, and adding them up
    AGREE = "agree"  # small exchanges between hosts, which end when the slowest rank comes


class DeviceSpan(NamedTuple):
    """From when the device came to an activity until it was past it ([Note: Whose clock])."""

    begin: Any  # timed events of the device
    end: Any

    @property
    def seconds(self) -> float:
        """Of the device's clock.  Raises ``RuntimeError`` while it is not past the end."""
        return float(self.begin.elapsed_time(self.end)) / 1000  # of milliseconds


class Observed(NamedTuple):
    """One activity.  Times are of the host's ``time.perf_counter``."""

    unit: str  # fqn; "" is the root
    activity: Activity
    microbatch: int | None
    start_s: float
    end_s: float
    cpu_s: float | None = None  # that the thread itself has run for; None: not counted
    device_span: DeviceSpan | None = None  # None: not asked for, or a CPU

    @property
    def seconds(self) -> float:
        """That the device has spent on it.  Raises ``RuntimeError`` before it has."""
        span = self.device_span
        return self.end_s - self.start_s if span is None else span.seconds


Observer = Callable[[Observed], None]


class Observers:
    """Those who want to know; costs two truth tests per activity while there are none.

    ``is_traced`` names every activity in the trace that torch.profiler records meanwhile.
    """

    def __init__(self, mark_device_time: Callable[[], Any] | None = None) -> None:
        """``mark_device_time`` records a timed event on the stream that computes; None on a
        CPU, which is the host itself.
        """
        self.is_traced = False
        self._observers: list[Observer] = []
        self._counts_cpu = False
        self._times_device = False
        self._mark_device_time = mark_device_time

    def add(
        self, observer: Observer, *, counts_cpu: bool = False, times_device: bool = False
    ) -> None:
        """Call ``observer`` with every event from now on, in the thread that does the work.

        ``counts_cpu`` fills ``cpu_s`` of all events: two calls of the kernel for each;
        ``times_device`` fills ``device_span`` where the device is not the host: two events of
        the device for each.  What an observer takes belongs to the activity for those added
        after it and in traces: that is how a device is made to look slower.
        """
        self._observers.append(observer)
        self._counts_cpu |= counts_cpu
        self._times_device |= times_device

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
        mark = self._mark_device_time if self._times_device else None
        begin = None if mark is None else mark()
        with (
            record_function(_label(unit, activity, microbatch))
            if self.is_traced
            else _UNWATCHED
        ):
            yield
            cpu_s = None if start_cpu_s is None else time.thread_time() - start_cpu_s
            span = None if mark is None else DeviceSpan(begin, mark())
            for observer in self._observers:
                end_s = time.perf_counter()
                observer(Observed(unit, activity, microbatch, start_s, end_s, cpu_s, span))


def _label(unit: str, activity: Activity, microbatch: int | None) -> str:
    place = unit or "root"
    return f"{activity.value} {place}" + ("" if microbatch is None else f" [{microbatch}]")


_UNWATCHED = nullcontext()
