"""Streams and events as vector clocks (Fidge 1988, Mattern 1989).

Every operation on a stream advances the stream's own entry.  A stream's clock says, for every
stream, how many of its operations are over before the next operation of this one begins.

Operations also take time, if ``Accelerator.seconds_of`` says how much: a stream's next one
begins when the stream is free and the host has launched it, and waits move that moment on.
"""

import time
import traceback
from itertools import count
from typing import NamedTuple

_numbers = count()


class Clock(dict[int, int]):
    """By stream: how many of its operations have happened before."""

    def join(self, other: "Clock") -> None:
        """Let everything in ``other`` have happened before, too."""
        for stream, number in other.items():
            if self.get(stream, 0) < number:
                self[stream] = number

    def missing(self, other: "Clock") -> "Clock":
        """What has happened in ``other`` and not here."""
        return Clock({s: t for s, t in other.items() if self.get(s, 0) < t})


class Moment(NamedTuple):
    """One operation of a stream."""

    stream: int
    time: int

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.time


class Host:
    """The thread that launches: what it has waited for is over for every later operation."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.streams: list[Stream] = []
        self.name_by_stream: dict[int, str] = {}
        self.syncs: list[str] = []  # why the host waited for the device
        self.num_timed = 0  # events that were to tell the time
        self.now_s = 0.0  # later than whatever it has waited for; launching takes no time
        self.is_blocked = False  # the device waits for ever, and so does who waits for it
        self.current = Stream(self, "compute")

    def wait(self, clock: Clock, why: str, until_s: float) -> None:
        """Let the host wait, and note where in the library it does, unless it is over."""
        if self.clock.missing(clock):
            self.syncs.append(f"{_place()}: {why}")
        while self.is_blocked:
            time.sleep(0.05)
        self.clock.join(clock)
        self.now_s = max(self.now_s, until_s)


class Stream:
    """A queue of operations; the surface of ``torch.cuda.Stream`` as far as it is used."""

    def __init__(self, host: Host, name: str) -> None:
        self.number = next(_numbers)
        self.name = name
        self.clock = Clock()
        self.free_at_s = 0.0
        self.spans: list[tuple[str, float, float]] = []  # what took time, from when until when
        self._host = host
        host.streams.append(self)
        host.name_by_stream[self.number] = name

    def begin(self, what: str = "", seconds: float = 0.0) -> Moment:
        """Queue an operation."""
        begins_s = max(self.free_at_s, self._host.now_s)
        self.free_at_s = begins_s + seconds
        if seconds:
            self.spans.append((what, begins_s, self.free_at_s))
        self.clock.join(self._host.clock)
        time = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = time
        return Moment(self.number, time)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._host)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.clock.join(event.clock)
        self.free_at_s = max(self.free_at_s, event.at_s)

    def wait_stream(self, stream: "Stream") -> None:
        self.clock.join(stream.clock)
        self.free_at_s = max(self.free_at_s, stream.free_at_s)

    def synchronize(self) -> None:
        self._host.wait(self.clock, f"stream {self.name}", self.free_at_s)

    def query(self) -> bool:
        return False  # the host runs ahead


class Event:
    """A point in a stream; the surface of ``torch.cuda.Event`` as far as it is used."""

    def __init__(self, host: Host, *, enable_timing: bool = False) -> None:
        host.num_timed += enable_timing
        self.clock = Clock()
        self.at_s = 0.0
        self._host = host
        self._recorded_at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._host.current
        stream.clock.join(self._host.clock)
        self.clock = Clock(stream.clock)
        self.at_s = max(stream.free_at_s, self._host.now_s)
        self._recorded_at_s = time.perf_counter()  # operations run when they are launched

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._host.current).wait_event(self)

    def synchronize(self) -> None:
        self._host.wait(self.clock, "event", self.at_s)

    def query(self) -> bool:
        return not self._host.clock.missing(self.clock)

    def elapsed_time(self, end: "Event") -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end._recorded_at_s - self._recorded_at_s) * 1000


def _place() -> str:
    """The innermost function of the library that is running."""
    for frame in reversed(traceback.extract_stack()):
        _, found, path = frame.filename.rpartition("/shardhet/")
        if found and not path.startswith("tests/"):
            return f"{path} {frame.name}"
    return "outside"
