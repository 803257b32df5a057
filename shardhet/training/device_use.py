"""What devices do in the steps of a run: computing, and waiting for others."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardhet.comm import devices
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.step.around import Activity, Observed
from shardhet.training.peak_memory import KeptBytes

COMPUTE = (Activity.FORWARD, Activity.BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What one device did since the last look, as fractions of the time of its timed steps."""

    # By the device's own clock.  If the host runs ahead and waits for a peer while the device
    # still has work, no time is lost and none is counted.
    busy_share: float  # in forward and backward
    waiting_share: float  # for parameters, gradients or messages of other ranks
    peak_memory_bytes: int  # allocated on an accelerator; resident of a process on a CPU
    kept: KeptBytes = KeptBytes()  # noqa: RUF009  a tuple


class DeviceTimes:
    """Adds up the time of what this rank's device does in timed steps.

    On a CPU every step is timed.  An accelerator is given two events per computation and wait,
    and the host has to launch them, so it is timed only in the steps that are asked for.
    """

    def __init__(self, model: HetFSDP, device: torch.device) -> None:
        self._model = model
        self._is_on_host = devices.is_on_host(device)
        self._end_timing: Callable[[], None] | None = None  # while steps are timed
        self._is_in_step = False
        self._events: deque[Observed] = deque()  # that the device has not completed yet
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._steps_s = 0.0

    def begin_step(self, *, is_timed: bool) -> None:
        """Time this step if it ``is_timed``, or on a CPU."""
        if self._is_in_step:  # the last step failed
            self._events.clear()
        self._is_in_step = True
        if is_timed or self._is_on_host:
            self._end_timing = self._end_timing or self._model.add_observer(
                self._observe, times_device=True
            )
        elif self._end_timing is not None:
            self._end_timing()
            self._end_timing = None

    def end_step(self, step_time_s: float) -> None:
        """The step has taken so long."""
        self._is_in_step = False
        self._count_events()
        if self._end_timing is not None:
            self._steps_s += step_time_s

    def look(self) -> tuple[float, float]:
        """The shares of time computing and waiting since the last look."""
        self._count_events()
        busy_s = sum(self._seconds[activity] for activity in COMPUTE)
        waiting_s = sum(self._seconds.values()) - busy_s
        steps_s = max(self._steps_s, sys.float_info.min)
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._steps_s = 0.0
        return busy_s / steps_s, waiting_s / steps_s

    def _observe(self, event: Observed) -> None:
        if self._is_in_step:
            self._events.append(event)

    def _count_events(self) -> None:
        """Add up the events that the device has completed: all but those of a bad step, whose
        norm the host does not wait for.
        """
        while self._events:
            try:
                seconds = self._events[0].seconds
            except RuntimeError:  # it has not
                return
            self._seconds[self._events.popleft().activity] += seconds
