"""The work and the memory of every rank over one step, as a record and as a Chrome trace."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shardhet.records.schedule import LaunchKind


class Work(Enum):
    """What a span of time was spent on; a real run reports the same names."""

    FORWARD = "forward"
    BACKWARD = "backward"  # recomputation included
    OPTIMIZER = "optimizer"
    WAIT_GATHER = "wait_gather"
    WAIT_REDUCE = "wait_reduce"
    WAIT_STAGE = "wait_stage"
    AGREE = "agree"  # until the slowest rank arrives
    OVERHEAD = "overhead"  # the runtime's own
    HAND_OVER = "hand_over"  # of links between stages: samples, or their gradients
    TO_HOST = "to_host"  # copies, beside compute
    TO_DEVICE = "to_device"


BUSY = frozenset({Work.FORWARD, Work.BACKWARD, Work.OPTIMIZER})
WAITING = frozenset({Work.WAIT_GATHER, Work.WAIT_REDUCE, Work.WAIT_STAGE, Work.AGREE})
COMPUTE_STREAM = "compute"  # of all work; launches of a kind have a stream of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One piece of work or wait, or one transfer."""

    unit: str  # fqn; "" if it belongs to no unit
    work: Work | LaunchKind
    start_s: float
    end_s: float
    stage: int = 0  # of a transfer: among whose devices it is, or which sends it

    @property
    def seconds(self) -> float:
        """The duration of the event."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The memory that a rank holds from one moment on."""

    time_s: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank's step, in order of time."""

    name: str  # of its device
    events: tuple[Event, ...]
    memory: tuple[MemoryPoint, ...]
    copies: tuple[Event, ...] = ()  # to and from the memory of the host
    stage: int = 0

    def seconds(self, kinds: frozenset[Work]) -> float:
        """Time spent on these kinds of work."""
        return sum(event.seconds for event in self.events if event.work in kinds)

    @property
    def busy_s(self) -> float:
        """Time spent computing."""
        return self.seconds(BUSY)

    @property
    def waiting_s(self) -> float:
        """Time spent waiting, for links or for other ranks."""
        return self.seconds(WAITING)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the rank holds at any moment."""
        return max((point.nbytes for point in self.memory), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All ranks of one step, in plan order, and the links that they share."""

    ranks: tuple[RankTimeline, ...]
    collectives: tuple[Event, ...]
    step_time_s: float

    @property
    def num_stages(self) -> int:
        """How many stages there are; 1 of a plan without."""
        return 1 + max(rank.stage for rank in self.ranks)

    def idle_fraction(self, position: int) -> float:
        """The fraction of the step in which a rank computes nothing."""
        return 1 - self.ranks[position].busy_s / self.step_time_s

    def exposed_comm_s(self, position: int) -> float:
        """Time in which a rank waits while a collective of its stage is running.

        The rest of its waiting is for slower ranks, and other stages.
        """
        rank = self.ranks[position]
        waits = [e for e in rank.events if e.work in WAITING]
        # Waits and collectives are both in order of time, and neither overlap among themselves.
        collectives = [e for e in self.sent_by(rank.stage) if e.work is not Work.HAND_OVER]
        ends_s = [sent.end_s for sent in collectives]
        seconds = 0.0
        for wait in waits:
            for sent in collectives[bisect_right(ends_s, wait.start_s) :]:
                if sent.start_s >= wait.end_s:
                    break
                seconds += min(wait.end_s, sent.end_s) - max(wait.start_s, sent.start_s)
        return seconds

    def sent_by(self, stage: int) -> list[Event]:
        """What runs among the devices of a stage, and what it hands to others."""
        return [each for each in self.collectives if each.stage == stage]

    def to_chrome_trace(self) -> str:
        """The step as JSON for Perfetto, with a process per rank and a thread per stream.

        The format is that of ``torch.profiler``: complete events ("X"), times in microseconds.
        """
        events: list[dict[str, Any]] = []
        for position, rank in enumerate(self.ranks):
            sent = self.sent_by(rank.stage)
            kinds = dict.fromkeys(event.work.value for event in sent)
            label = f"rank {position}: {rank.name}"
            events.append(_named("process_name", position, 0, label))
            copies = dict.fromkeys(event.work.value for event in rank.copies)
            streams = (COMPUTE_STREAM, *kinds, *copies)
            events += [
                _named("thread_name", position, i, each) for i, each in enumerate(streams)
            ]
            for event in (*rank.events, *sent, *rank.copies):
                value = event.work.value
                stream = value if value in streams else COMPUTE_STREAM
                events.append(_complete(event, position, streams.index(stream)))
            events += [_counter(point, position) for point in rank.memory]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write the Chrome trace to a file."""
        Path(path).write_text(self.to_chrome_trace(), encoding="ascii")


def merged(events: Sequence[Event]) -> tuple[Event, ...]:
    """The non-empty events in order of time."""
    kept = [event for event in events if event.end_s > event.start_s]
    return tuple(sorted(kept, key=lambda event: (event.start_s, event.end_s)))


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(point: MemoryPoint, pid: int) -> dict[str, Any]:
    ts, args = point.time_s * 1e6, {"bytes": point.nbytes}
    return {"name": "memory", "ph": "C", "pid": pid, "ts": ts, "args": args}


def _complete(event: Event, pid: int, tid: int) -> dict[str, Any]:
    name = f"{event.work.value} {event.unit}".strip()
    return {
        "name": name,
        "cat": event.work.value,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": event.start_s * 1e6,
        "dur": event.seconds * 1e6,
        "args": {"unit": event.unit},
    }
