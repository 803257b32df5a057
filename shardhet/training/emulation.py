"""Emulated devices: ordinary CPU processes that behave like slower or smaller ones.

Time is stretched where computing happens: what the thread has just spent t seconds of the
processor on lasts t / speed, the rest of it asleep.  So the stretched device runs the same
code on the same data and only its clock differs, and what the code really costs, its noise
and its progress from one version to the next stay visible: nothing is filled up to a time
that somebody wrote down.  Counting the processor's seconds and not those of the clock keeps
other processes of the machine out of it: while one has to wait for a core, a slow device
would have computed.  Memory is capped by the kernel, so that an allocation too many fails as
it would on a small device.

Speeds are relative to one process of this machine.  Together they should not exceed its
cores: else the processes wait for cores as well as for their emulated selves.  Where there are
more processes than cores each is kept on one core, so that speeds on a core add up to no more
than it has: all begin a turn at the same moment, and left to the system a device of 0.9 lost a
fifth of its time to slower ones that were put beside it.
"""

import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from shardhet.fsdp import HetFSDP
from shardhet.fsdp.observer import Activity, Observed, Observer

THREAD_STACK_BYTES = 2**20  # instead of the system's 8 MiB
MAX_CREDIT_S = 0.02  # a few turns of the system's scheduler
ROUNDING = 1e-9  # of parts of a core that are added up
STRETCHED = (Activity.FORWARD, Activity.BACKWARD)


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """What an ordinary process is to be like.

    device = EmulatedDevice(speed=0.5, memory_bytes=2**30)
    device.cap_memory()                  # before the model is built
    model = HetFSDP(model, plan)
    device.slow_down(model, optimizer)   # before other observers are added
    """

    speed: float = 1.0  # of this process's own
    memory_bytes: int | None = None  # for all that it allocates from now on; None: no cap

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
        """Be in the context for 1 / speed times what its contents need of the processor."""
        return nullcontext() if self.speed == 1 else _Stretch(self.speed).around()

    def observer(self) -> Observer:
        """What stretches every computation that it is told of, in the thread that did it.

        Observers that are added to a model after this one see the stretched times.
        """
        return _Stretch(self.speed).observe

    def slow_down(self, model: HetFSDP, optimizer: Optimizer) -> None:
        """Stretch forward, backward and optimizer steps from now on.

        To be called before other observers are added, which then see the stretched times.
        At speed 1 nothing is added, and nothing costs anything.
        """
        if self.speed == 1:
            return
        stretch = _Stretch(self.speed)
        model.add_observer(stretch.observe, counts_cpu=True)
        optimizer.register_step_pre_hook(stretch.begin_optimizer_step)
        optimizer.register_step_post_hook(stretch.end_optimizer_step)

    def cap_memory(self) -> int:
        """Let this process allocate ``memory_bytes`` more than it has, and no more.

        Counted is what it asks for, used or not, as a device's allocator counts; stacks of
        new threads are counted too (those of Python's threads are made small), so process
        groups should exist already.  The C library's allocator leaves gaps: a budget of 0.7
        of the cap can be relied on.  Beyond the cap
        PyTorch raises its ordinary RuntimeError, "can't allocate memory".  Returns the bytes
        that are resident now, which are not the emulated device's (0 if nothing is capped).
        """
        if self.memory_bytes is None:
            return 0
        threading.stack_size(THREAD_STACK_BYTES)
        _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
        cap_bytes = memory_of_process("VmData") + self.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard_bytes))
        return memory_of_process("VmRSS")


def memory_of_process(key: str) -> int:
    """Bytes of this process, as proc(5) names them.

    VmData is private writable memory that was asked for, used or not; VmRSS is resident.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(
        f"memory_bytes: /proc/self/status has no {key} here. Emulate memory on Linux."
    )


def packed(cores: Sequence[float]) -> list[int | None]:
    """One of this process's cores for each part of a core, so that none is promised more than
    once; None for all where that cannot be done.  The largest first, each to the emptiest.
    """
    taken = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    found: list[int | None] = [None] * len(cores)
    for i in sorted(range(len(cores)), key=lambda i: -cores[i]):
        core = min(taken, key=taken.__getitem__)
        taken[core] += cores[i]
        found[i] = core
    return found if max(taken.values()) <= 1 + ROUNDING else [None] * len(cores)


def stay_on(core: int | None) -> None:
    """Run this thread, and those that it starts from now on, on this core only, if any."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def cores_for(speeds: Sequence[float]) -> list[int | None]:
    """Where each process is to stay; None for all where every one can have a core anyway."""
    if not hasattr(os, "sched_getaffinity"):  # not on macOS
        return [None] * len(speeds)
    has_enough = len(speeds) <= len(os.sched_getaffinity(0))
    return [None] * len(speeds) if has_enough else packed(speeds)


class _Stretch:
    """Sleeps for what computations owe.

    A sleep that was too long, and waiting for a core for longer than there was to sleep, count
    for what comes next, up to a limit.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._owed_s = 0.0
        self._optimizer_began = (0.0, 0.0)

    def after(self, seconds: float, cpu_s: float) -> None:
        """Pay for ``cpu_s`` of computing, which took ``seconds`` by the clock."""
        self._owed_s += cpu_s / self._speed - seconds
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
        # These never contain each other: a unit's recomputation is part of its backward.
        if event.activity in STRETCHED:
            seconds = event.end_s - event.start_s
            self.after(seconds, seconds if event.cpu_s is None else event.cpu_s)

    def begin_optimizer_step(self, *_: Any) -> None:
        self._optimizer_began = (time.perf_counter(), time.thread_time())

    def end_optimizer_step(self, *_: Any) -> None:
        start_s, start_cpu_s = self._optimizer_began
        self.after(time.perf_counter() - start_s, time.thread_time() - start_cpu_s)
