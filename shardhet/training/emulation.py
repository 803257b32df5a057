"""Emulated devices: ordinary CPU processes that behave like slower or smaller ones.

Computing is stretched in time: work that takes t seconds of processor time lasts t / speed,
and the thread sleeps for the difference.  An emulated device runs the same code on the same
data; only its clock differs.  The real cost of the code, its noise and its progress from one
version to the next stay visible, because no durations are prescribed.  Processor time is
counted instead of wall-clock time to exclude the effect of other processes: while this one
waits for a core, a slow device would have computed.  Memory is capped by the kernel, so that
an allocation beyond the cap fails as on a small device.

Speeds are relative to one process of this machine.  Their sum should not exceed the number of
cores; otherwise the processes wait for cores as well as for their emulated slowness.  If there
are more processes than cores, each is pinned to one core, so that the speeds on a core add up
to at most one.  Without pinning, a device of speed 0.9 lost a fifth of its time to slower ones
that the system put on its core, because all devices begin a turn at the same moment.
"""

import ctypes
import gc
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardhet.fsdp import HetFSDP
from shardhet.fsdp.step.around import COMPUTING, Observed, Observer
from shardhet.training.peak_memory import AllocatedMemory, PeakMemory, memory_of_process

# What a process that trains needs beside its tensors, and a device would not hold: objects of
# Python, graphs of autograd, stacks (17 MiB, measured), and gaps between tensors, which grow
# for some thirty steps (35 to 60 MiB).
HOST_BYTES = 96 * 2**20
M_MMAP_THRESHOLD = -3  # malloc.h
OWN_MAPPING_BYTES = 2**20  # smaller ones would cost more page faults than they save memory
THREAD_STACK_BYTES = 2**20  # instead of the system's 8 MiB
ATTRIBUTES_BYTES = 256  # more than pthread_attr_t has on any platform
PRODUCT_SIZE = 1024  # of matrices large enough for all buffers of the libraries
MAX_CREDIT_S = 0.02  # a few time slices of the system's scheduler
ROUNDING = 1e-9  # on sums of parts of a core
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """The speed and memory that an ordinary process is to emulate.

    device = EmulatedDevice(speed=0.5, memory_bytes=2**30)
    device.cap_memory()                  # before the model is built
    model = HetFSDP(model, plan)
    device.slow_down(model, optimizer)   # before other observers are added
    """

    speed: float = 1.0  # relative to this process's own
    memory_bytes: int | None = None  # for everything it allocates from now on; None: no cap

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 1:
            raise ValueError(
                f"speed: {self.speed} but an emulated device has more than 0 and at most 1 of "
                "this process's own speed. Divide all speeds by the highest."
            )
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(
                f"memory_bytes: {self.memory_bytes} but it must be positive. Give None for no "
                "cap."
            )

    def slowed(self) -> AbstractContextManager[None]:
        """Context that lasts 1 / speed times the processor time of what runs inside."""
        return nullcontext() if self.speed == 1 else Stretch(self.speed).around()

    def observer(self) -> Observer:
        """An observer that stretches every reported computation, in the thread that did it.

        Observers that are added to a model after this one see the stretched times.
        """
        return Stretch(self.speed).observe

    def slow_down(self, model: HetFSDP, *optimizers: Optimizer) -> "Stretch | None":
        """Stretch forward, backward and optimizer steps from now on.

        Call it before other observers are added, so that they see the stretched times.  At
        speed 1 nothing is added and there is no overhead.
        """
        if self.speed == 1:
            return None
        stretch = Stretch(self.speed)
        model.add_observer(stretch.observe, counts_cpu=True)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(stretch.begin_optimizer_step)
            optimizer.register_step_post_hook(stretch.end_optimizer_step)
        return stretch

    def cap_memory(self) -> PeakMemory:
        """Let this process allocate ``memory_bytes`` and ``HOST_BYTES`` more than it has.

        All memory that the process requests counts, used or not, as in a device's allocator.
        Stacks of new threads count too, and are made small, but process groups should exist
        already.  Beyond the cap PyTorch raises its usual RuntimeError, "can't allocate memory".
        Returns what counts the device's memory from now on.
        """
        if self.memory_bytes is None:
            return PeakMemory(CPU)
        _make_stacks_small()
        _have_buffers_made()
        gc.collect()  # 70 MiB at times; they would be cap, and the device's to fill
        _give_back_what_is_freed()
        _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
        cap_bytes = memory_of_process("VmData") + HOST_BYTES + self.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard_bytes))
        return AllocatedMemory() if AllocatedMemory.can_be_read() else PeakMemory(CPU)


class HostMemory:
    """What a process requests between ``begin`` and ``end`` is not the emulated device's.

    A recorder of traces keeps its events in the memory of the host, whatever the device; 70 to
    140 MiB for a step (measured).  Nothing is capped in between, so both are called between
    steps, where the device's own memory is the same.
    """

    def __init__(self, peak_memory: PeakMemory) -> None:
        self._peak_memory = peak_memory
        self._began: tuple[int, int] | None = None  # the cap and the bytes requested by then

    def begin(self) -> None:
        """Lift the cap, if there is one."""
        self._peak_memory.begin_host_work()
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            self._began = (soft, memory_of_process("VmData"))
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def end(self) -> None:
        """Cap again, by as much more as was requested since and is still held."""
        self._peak_memory.end_host_work()
        if self._began is None:
            return
        soft, used_bytes = self._began
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        raised = soft + max(0, memory_of_process("VmData") - used_bytes)
        limit = raised if hard == resource.RLIM_INFINITY else min(raised, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        self._began = None


def _have_buffers_made() -> None:
    """Let the libraries allocate what they keep: 20 MiB, for products of matrices, measured."""
    square = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, requires_grad=True)
    (square @ square).sum().backward()


def _make_stacks_small() -> None:
    """Of new threads: those of Python, and those that libraries start (a trace's recorder)."""
    threading.stack_size(THREAD_STACK_BYTES)
    library = ctypes.CDLL(None)
    if hasattr(library, "pthread_setattr_default_np"):  # of the GNU C library
        attributes = ctypes.create_string_buffer(ATTRIBUTES_BYTES)
        library.pthread_attr_init(attributes)
        library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK_BYTES))
        library.pthread_setattr_default_np(attributes)
        library.pthread_attr_destroy(attributes)


def _give_back_what_is_freed() -> None:
    """Give every tensor a mapping of its own, so that gaps between tensors are not held.

    The C library raises the size from which it does so by itself, up to 32 MiB (mallopt(3)).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # of the GNU C library
        library.mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)


def packed(cores: Sequence[float]) -> list[int | None]:
    """Assign each part of a core to one of this process's cores, without overloading any.

    The largest part is assigned first, each to the emptiest core.  The result is None for all
    parts if they do not fit.
    """
    taken = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    found: list[int | None] = [None] * len(cores)
    for i in sorted(range(len(cores)), key=lambda i: -cores[i]):
        core = min(taken, key=taken.__getitem__)
        taken[core] += cores[i]
        found[i] = core
    return found if max(taken.values()) <= 1 + ROUNDING else [None] * len(cores)


def stay_on(core: int | None) -> None:
    """Pin this thread, and threads that it starts from now on, to ``core`` (None: to none)."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def cores_for(speeds: Sequence[float]) -> list[int | None]:
    """The core to pin each process to; None for all if there are enough cores."""
    if not hasattr(os, "sched_getaffinity"):  # not on macOS
        return [None] * len(speeds)
    has_enough = len(speeds) <= len(os.sched_getaffinity(0))
    return [None] * len(speeds) if has_enough else packed(speeds)


class Stretch:
    """Sleeps for the time by which computations are to be stretched.

    Time lost by sleeping too long, or by waiting for a core for longer than the sleep due, is
    credited to the next computations, up to a limit.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._owed_s = 0.0
        self._optimizer_began = (0.0, 0.0)

    def after(self, seconds: float, cpu_s: float) -> None:
        """Sleep after ``cpu_s`` of computing, which took ``seconds`` by the clock."""
        self._owed_s += cpu_s / self.speed - seconds
        if self._owed_s > 0:
            start_s = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - start_s
        self._owed_s = max(self._owed_s, -MAX_CREDIT_S)

    @contextmanager
    def around(self) -> Iterator[None]:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        yield
        self.after(time.perf_counter() - start_s, time.thread_time() - start_cpu_s)

    def observe(self, event: Observed) -> None:
        # These events are never nested: a unit's recomputation is part of its backward.
        if event.activity in COMPUTING:
            seconds = event.end_s - event.start_s
            self.after(seconds, seconds if event.cpu_s is None else event.cpu_s)

    def begin_optimizer_step(self, *_: Any) -> None:
        self._optimizer_began = (time.perf_counter(), time.thread_time())

    def end_optimizer_step(self, *_: Any) -> None:
        start_s, start_cpu_s = self._optimizer_began
        self.after(time.perf_counter() - start_s, time.thread_time() - start_cpu_s)
