"""Memory of a device: its peak, read from the device or from this process, and what is kept."""

import ctypes
import resource
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, optim

from shardhet.comm import devices
from shardhet.fsdp import HetFSDP

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
