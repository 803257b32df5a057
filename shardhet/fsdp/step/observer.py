"""Observation of the runtime: one record per computation or wait.

[Note: Whose clock]
On an accelerator the host runs ahead: it launches a computation long before the device begins
it, and does not block in a wait between streams.  The time on the device is therefore taken
between two device events on the compute stream, one before and one after the activity:

    host      |launch|launch|agree ....|launch|
    device           |b  forward  e|   |b  forward  e|
                                 b...e                  in a wait the device is idle that long

Nothing waits for these events within a step; they are read after the device has passed them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

from torch.profiler import record_function


class Activity(Enum):
    """What a rank did between the two times of a record."""

    FORWARD = "forward"
    BACKWARD = "backward"  # including recomputation
    WAIT_GATHER = "wait_gather"  # waiting for parameters that other ranks store
    WAIT_REDUCE = "wait_reduce"  # waiting for gradients of other ranks, and adding them up
    WAIT_STAGE = "wait_stage"  # waiting for samples or gradients of another stage
    AGREE = "agree"  # a small exchange between hosts, which waits for the slowest rank


class DeviceSpan(NamedTuple):
    """The device events before and after an activity ([Note: Whose clock])."""

    begin: Any  # a timed device event, as is ``end``
    end: Any

    @property
    def seconds(self) -> float:
        """Time on the device.  Raises ``RuntimeError`` until the device has passed ``end``."""
        return float(self.begin.elapsed_time(self.end)) / 1000  # from milliseconds


class Observed(NamedTuple):
    """One activity.  Times are those of ``time.perf_counter`` on the host."""

    unit: str  # fqn; "" is the root
    activity: Activity
    microbatch: int | None
    start_s: float
    end_s: float
    cpu_s: float | None = None  # CPU time of the thread; None: not counted
    device_span: DeviceSpan | None = None  # None: not requested, or the device is a CPU

    @property
    def seconds(self) -> float:
        """Device time if it was measured, else host time.  Raises as ``DeviceSpan.seconds``."""
        span = self.device_span
        return self.end_s - self.start_s if span is None else span.seconds


Observer = Callable[[Observed], None]


class Observers:
    """The observers of a runtime; without any, an activity costs two truth tests.

    ``is_traced`` labels every activity in the trace that torch.profiler records.
    """

    def __init__(self, mark_device_time: Callable[[], Any] | None = None) -> None:
        """``mark_device_time`` records a timed event on the compute stream; None on CPU, where
        the host itself is the device.
        """
        self.is_traced = False
        self._observers: dict[Observer, tuple[bool, bool]] = {}  # and what each asks for
        self._counts_cpu = False
        self._times_device = False
        self._mark_device_time = mark_device_time

    def add(
        self, observer: Observer, *, counts_cpu: bool = False, times_device: bool = False
    ) -> Callable[[], None]:
        """Call ``observer`` with every record from now on, in the thread that does the work.

        Returns a function that ends it.

        ``counts_cpu`` fills ``cpu_s`` of all records, at two system calls each;
        ``times_device`` fills ``device_span`` if the device is not the host, at two device
        events each.  The time that an observer takes counts as part of the activity for
        observers added after it and in traces; this is used to make a device look slower.
        """
        self._observers[observer] = (counts_cpu, times_device)
        self._follow_observers()

        def remove() -> None:
            del self._observers[observer]
            self._follow_observers()

        return remove

    def _follow_observers(self) -> None:
        asked = self._observers.values()
        self._counts_cpu = any(counts_cpu for counts_cpu, _ in asked)
        self._times_device = any(times_device for _, times_device in asked)

    def watch(
        self, unit: str, activity: Activity, microbatch: int | None = None
    ) -> AbstractContextManager[None]:
        """A context whose activity is reported to the observers."""
        if not self._observers and not self.is_traced:
            return _UNWATCHED
        return self._watch(unit, activity, microbatch)

    def label(self, text: str) -> AbstractContextManager[Any]:
        """A context that the trace shows as ``text``, around activities."""
        return record_function(text) if self.is_traced else _UNWATCHED

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
