"""Events of what a rank does, by the host's clock and by the device's."""

import pytest
import torch
from torch import nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.step.around import Activity, Observed, Observers


class Device:
    """A device that is far behind its host: it comes to a mark when it is told to."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def mark(self) -> "Mark":
        self.marks.append(Mark())
        return self.marks[-1]


class Mark:
    """What torch.cuda.Observed is to the observers."""

    def __init__(self) -> None:
        self.reached_ms: float | None = None

    def elapsed_time(self, end: "Mark") -> float:
        if self.reached_ms is None or end.reached_ms is None:
            raise RuntimeError("not reached yet")
        return end.reached_ms - self.reached_ms


def test_a_device_that_is_behind_its_host_is_read_by_its_own_clock() -> None:
    device = Device()
    observers = Observers(device.mark)
    events: list[Observed] = []
    observers.add(events.append, times_device=True)
    with observers.watch("blocks.0", Activity.FORWARD, 1):
        pass
    with observers.watch("blocks.1", Activity.WAIT_GATHER):
        pass
    assert [event.unit for event in events] == ["blocks.0", "blocks.1"]  # at once, as ever
    with pytest.raises(RuntimeError, match="not reached yet"):
        _ = events[0].seconds
    for mark, reached_ms in zip(device.marks, (1000.0, 1250.0, 1250.0, 1350.0), strict=True):
        mark.reached_ms = reached_ms
    assert [event.seconds for event in events] == [0.25, 0.1]
    assert all(event.end_s - event.start_s < 0.1 for event in events)


def test_a_device_is_marked_only_for_those_who_ask() -> None:
    device = Device()
    observers = Observers(device.mark)
    events: list[Observed] = []
    observers.add(events.append)
    with observers.watch("", Activity.AGREE):
        pass
    assert not device.marks
    assert events[0].seconds == events[0].end_s - events[0].start_s


def test_on_a_cpu_seconds_are_the_hosts() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = HetFSDP(module, Plan.even(1, microbatch_size=1), units=[nn.Linear])
    events: list[Observed] = []
    model.add_observer(events.append, times_device=True)
    output = model(torch.ones(1, 2))
    model.backward(output.sum(), 1)
    assert {event.activity for event in events} >= {Activity.FORWARD, Activity.BACKWARD}
    assert all(event.device_span is None for event in events)
    assert all(event.seconds == event.end_s - event.start_s for event in events)
