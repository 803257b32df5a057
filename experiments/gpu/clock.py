"""Seconds and bytes of what a device does, seen from the host.

A turn is timed as a whole: the device is waited for before it and after it, not between its
steps, so that whoever lets the host run ahead has the good of it, and whoever makes the host
wait in every step pays for that.
"""

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch


def synchronize(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Callable[[], object], count: int, device: torch.device) -> float:
    """The mean over ``count`` calls in a row."""
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start_s) / count


def allocated_bytes(device: torch.device) -> int:
    """What tensors occupy now; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_everything(device: torch.device) -> None:
    """Give memory of objects that nobody refers to back to the driver."""
    gc.collect()  # a wrapped model and its modules refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes above what was there when the measurement began."""

    allocated: int  # of tensors
    reserved: int  # of the caching allocator, what it could not use included


class PeakMeter:
    """The most that tensors occupy from now on, above what they occupy now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = allocated_bytes(device)
        self._reserved_base = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._reserved_base = torch.cuda.memory_reserved(device)

    def read(self) -> Peak:
        """Up to now.  On a CPU the process's own, which stands for it in a rehearsal."""
        if self._device.type != "cuda":
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return Peak(resident, resident)
        allocated = torch.cuda.max_memory_allocated(self._device) - self._base
        reserved = torch.cuda.max_memory_reserved(self._device) - self._reserved_base
        return Peak(allocated, reserved)


@dataclass(frozen=True, slots=True)
class Turn:
    """A few steps of one system."""

    case: str
    number: int
    seconds: float  # of a step
    peak_bytes: int  # of tensors, above what was there before


def take_turns(
    step_by_case: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    num_rounds: int,
    budget_s: float,
    at_most: int,
) -> Iterator[Turn]:
    """Turns of ``at_most`` steps or as many as the budget allows, each after a step that does
    not count.

    Turns, not runs of their own: a device's clock falls as it warms up, and in one process a
    slow minute meets all systems.  Who goes first in one round goes last in the next.
    """
    cases = list(step_by_case)
    step_s = max(seconds_per_call(step, 1, device) for step in step_by_case.values())
    turn_s = budget_s / (num_rounds * len(cases))
    num_steps = max(1, min(at_most, int(turn_s / max(step_s, 1e-6)) - 1))
    for number in range(num_rounds):
        for case in cases if number % 2 else reversed(cases):
            meter = PeakMeter(device)
            step_by_case[case]()
            seconds = seconds_per_call(step_by_case[case], num_steps, device)
            yield Turn(case, number, seconds, meter.read().allocated)
