"""What devices do in the steps of a run, and the peak of their memory."""

import ctypes
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, optim

from shardhet.comm import devices
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.step.around import COMPUTING, Activity, Observed

RUSAGE_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of each system
SAMPLE_EVERY_S = 0.004  # units of an emulated device take tens of milliseconds


class KeptBytes(NamedTuple):
    """Bytes of rows, gradients and optimizer states, and of inputs of units on the host."""

    on_device: int = 0
    on_host: int = 0


def kept_bytes(model: HetFSDP, optimizers: Sequence[optim.Optimizer]) -> KeptBytes:
    """Measured after the optimizers' step, before gradients are set to None."""
    params = list(model.parameters())
    tensors = [*params, *(each.grad for each in params if each.grad is not None)]
    for state in (state for each in optimizers for state in each.state.values()):
        tensors += [
            value for value in state.values() if isinstance(value, Tensor) and value.dim()
        ]
    own = sum(each.numel() * each.element_size() for each in tensors)
    inputs = model.host_input_bytes
    if model.plan.ranks[model.position].optimizer_on_host:
        return KeptBytes(model.sent_row_bytes, own + inputs)
    return KeptBytes(own, inputs)


class PeakMemory:
    """The most bytes allocated on a device since the last reset; on a CPU, those resident."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> int:
        """The most bytes since ``forget``."""
        if not devices.is_on_host(self._device):
            return int(devices.module_of(self._device).max_memory_allocated(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RUSAGE_UNIT_BYTES

    def begin_host_work(self) -> None:
        """What is allocated until ``end_host_work`` is not the device's."""

    def end_host_work(self) -> None:
        """The end of it."""

    def forget(self) -> None:
        """Reset the peak to what is held now."""
        if not devices.is_on_host(self._device):
            devices.module_of(self._device).reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # works on Linux only; elsewhere the peak stays
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5)


class AllocatedMemory(PeakMemory):
    """What an emulated device has allocated, counted from what the process has allocated now.

    An accelerator's allocator counts tensors.  What is resident of a process counts objects of
    Python as well, and gaps that freed tensors leave: 20 to 60 MiB, more than a small device
    holds.  So a thread asks the C library's allocator, every few milliseconds, how much of its
    memory is in use (mallinfo2(3)).  Memory shared with other processes is added.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._library = ctypes.CDLL(None)
        self._library.mallinfo2.restype = _Allocated
        self._level_bytes = self._now()
        self._peak_bytes = 0
        threading.Thread(target=self._sample, name="peak memory", daemon=True).start()

    @staticmethod
    def can_be_read() -> bool:
        """Whether the C library is one that counts: GNU's, from 2.33 on, on Linux."""
        return hasattr(ctypes.CDLL(None), "mallinfo2")

    def read(self) -> int:
        return max(self._peak_bytes, self._now() - self._level_bytes)

    def forget(self) -> None:
        self._peak_bytes = 0

    def begin_host_work(self) -> None:
        self._level_bytes -= self._now()

    def end_host_work(self) -> None:
        self._level_bytes += self._now()

    def _now(self) -> int:
        allocated = self._library.mallinfo2()
        return int(allocated.uordblks + allocated.hblkhd) + memory_of_process("RssShmem")

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(SAMPLE_EVERY_S):
            self._peak_bytes = max(self._peak_bytes, self._now() - self._level_bytes)


class _Allocated(ctypes.Structure):
    """mallinfo2, as mallinfo(3) has it."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",  # bytes in mappings of their own
            "usmblks",
            "fsmblks",
            "uordblks",  # bytes in use of all others
            "fordblks",
            "keepcost",
        )
    ]


def memory_of_process(key: str) -> int:
    """Bytes of this process, as proc(5) names them.

    VmData is the private writable memory requested, used or not; VmRSS is resident memory.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(
        f"memory_bytes: /proc/self/status has no {key} here. Emulate memory on Linux."
    )


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
        busy_s = sum(self._seconds[activity] for activity in COMPUTING)
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
