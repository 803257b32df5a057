"""Heartbeat: what a rank tells the others about itself, about twice a second.

What its training thread is doing is read from that thread's Python stack, by another thread.
This costs the training nothing, and it covers collectives of torch that a program calls itself
as well as those of shardhet.
"""

import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

import shardhet.comm
from shardhet.comm import devices
from shardhet.comm.channel import progress
from shardhet.comm.members import local_device_spec

READ_AFTER_S = 1.0  # of waiting; before that nobody needs the others' heartbeats
STEP_FACTOR = 5.0
NUM_STEPS_KEPT = 20
MAX_FRAMES = 16
MAX_STACK_CHARACTERS = 4000

_COMM = str(Path(shardhet.comm.__file__).parent)
_OWN = str(Path(_COMM).parent)
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (_OWN, _TORCH, sysconfig.get_paths()["stdlib"], "<")
# A thread that is blocked in a collective is in one of these.
_WAITING = (
    _COMM,
    f"{_OWN}/extras/shared_host",
    f"{_TORCH}/distributed/distributed_c10d.py",
    f"{_TORCH}/distributed/c10d_",
)
# On the stack while code is compiled or tuned, and not while compiled code runs.
_COMPILING = (
    f"{_TORCH}/_dynamo/convert_frame.py",
    f"{_TORCH}/_inductor/compile_fx.py",
    f"{_TORCH}/_inductor/async_compile.py",
    f"{_TORCH}/_inductor/codecache.py",
    "/triton/compiler/",
    "/triton/runtime/autotuner.py",
)
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/debugpy/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life of one rank, with what it is doing."""

    rank: int
    name: str  # "rank 2 (cpu on alpha)"
    host: str = ""
    pid: int = 0
    address: str = ""  # where ranks of other hosts may connect to it (``Connections``)
    number: int = 0  # differs from that of the one before; 0: none has come
    num_steps: int = 0  # finished since the watch began
    step: int = 0  # that of its model at the end of the last one
    doing: str = "an unknown place"
    is_waiting: bool = False  # for other ranks
    is_long: bool = False  # compiling, or declared to take long: slow without being at fault
    stalled_s: float = 0.0  # time since it last made progress
    timeout_s: float = 0.0  # with a rank without progress, once the first step has ended
    limit_s: float | None = None  # of the call in which it waits for all ranks, if it has one
    where: str = "an unknown line"  # file:line of the innermost frame outside of libraries
    stack: str = ""  # of the thread that trains, if it has been still for a while
    is_debugged: bool = False  # at a prompt of a debugger: as slow as its user
    has_left: bool = False  # its program does not take part any more


class OwnRank:
    """This rank: made by the thread that trains, looked at by that of the watch."""

    def __init__(self, rank: int, device: torch.device, *, address: str = "") -> None:
        """``address``: that of the rank's ``Connections``."""
        self._name = f"rank {rank} ({local_device_spec(device)})"
        self.host, self.pid = socket.gethostname(), os.getpid()
        self._address = address
        self.stalled_s = 0.0
        self.a_peer_has_failed = False
        self._rank, self._device = rank, device
        self._thread_id = threading.get_ident()
        self._number = 0
        self._counters = _counters()
        # The pace of its steps, as seen at each look
        self._steps_at_start = self._num_steps_before = progress.num_steps
        self._step_s = 0.0  # since the end of the last step, slow sections excluded
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEPS_KEPT)

    @property
    def name(self) -> str:
        """The rank, its device, and its stage in a pipeline."""
        return self._name + ("" if progress.stage is None else f" of stage {progress.stage}")

    def look(self, passed_s: float, hang_timeout_s: float) -> Heartbeat:
        """The heartbeat of this rank, ``passed_s`` after the one before."""
        found, counters = activity_of(self._thread_ids), _counters()
        self.stalled_s = 0.0 if counters != self._counters else self.stalled_s + passed_s
        self._counters = counters
        self._learn_pace(passed_s)
        timeout_s = max(hang_timeout_s, STEP_FACTOR * max(self._step_times_s, default=0.0))
        self._number += 1
        phases = [name for name in progress.slow_sections if name != progress.doing]
        return Heartbeat(
            rank=self._rank,
            name=self.name,
            host=self.host,
            pid=self.pid,
            address=self._address,
            number=self._number,
            num_steps=progress.num_steps - self._steps_at_start,
            step=progress.step,
            doing=f"{progress.doing} ({', '.join(phases)})" if phases else progress.doing,
            is_waiting=found.is_waiting or self._device_is_busy(timeout_s),
            is_long=bool(progress.slow_sections) or found.is_compiling,
            is_debugged=found.is_debugged,
            stalled_s=self.stalled_s,
            timeout_s=timeout_s,
            limit_s=progress.limit_s,
            where=found.where,
            stack=self.stack() if self.stalled_s > READ_AFTER_S else "",
        )

    def stack(self) -> str:
        """Where the thread that trains is."""
        return stack_of(self._thread_ids)

    def _learn_pace(self, passed_s: float) -> None:
        if not progress.slow_sections:
            self._step_s += passed_s
        num_ended = progress.num_steps - self._num_steps_before
        if not num_ended:
            return
        if self._num_steps_before > self._steps_at_start:  # the first one contains the set-up
            self._step_times_s.append(self._step_s / num_ended)
        self._num_steps_before = progress.num_steps
        self._step_s = 0.0

    def _device_is_busy(self, timeout_s: float) -> bool:
        """Whether an accelerator still has work of a process that stands still.

        Its host may be in any call that waits for the device, as ``loss.item()``, while the
        device waits in a collective for a peer.
        """
        # Not earlier: a query from another thread would disturb the capture of a graph.
        earliest_s = READ_AFTER_S if self.a_peer_has_failed else timeout_s / 2
        if devices.is_on_host(self._device) or self.stalled_s < earliest_s:
            return False
        stream = devices.module_of(self._device).current_stream(self._device)
        try:
            return not stream.query()
        except RuntimeError:  # the device has failed, which the training thread will find out
            return False

    @property
    def _thread_ids(self) -> frozenset[int]:
        return frozenset((self._thread_id, progress.thread_id or self._thread_id))


def _counters() -> tuple[Any, ...]:
    """What changes when this process makes progress."""
    num_collectives = progress.num_collectives
    groups: tuple[Any, ...] = tuple(distributed_c10d._world.pg_map)
    for group in groups:
        with suppress(RuntimeError):  # of a backend that does not count
            num_collectives += group._get_sequence_number_for_group()
    return progress.num_marks, progress.num_steps, num_collectives


class ThreadState(NamedTuple):
    """What a thread is doing."""

    is_waiting: bool = False  # for other ranks, or for a device that may be waiting for them
    is_compiling: bool = False
    is_debugged: bool = False  # it stands at a prompt of pdb, or of another debugger
    where: str = "unknown"  # file:line of the innermost frame outside of libraries


def activity_of(thread_ids: frozenset[int]) -> ThreadState:
    """That of the training thread, which is one of these, or hands over between them."""
    found = [_activity(frame) for frame in _frames_of(thread_ids)]
    # While autograd runs backward on another thread, the main one is inside of its call.
    return next(
        (each for each in found if any(each[:-1])), found[0] if found else ThreadState()
    )


def stack_of(thread_ids: frozenset[int]) -> str:
    """The innermost frames of these threads, as a traceback shows them."""
    parts = []
    for frame in _frames_of(thread_ids):
        lines = traceback.format_list(traceback.extract_stack(frame)[-MAX_FRAMES:])
        parts.append("".join(lines)[-MAX_STACK_CHARACTERS:])
    return "another thread:\n".join(parts)


def _frames_of(thread_ids: frozenset[int]) -> list[FrameType]:
    """The innermost frame of each of these threads, if it runs Python.

    A frame keeps its local variables alive, tensors too.  This thread's own frame would be part
    of a cycle with what is found here, and all frames would live until cycles are collected.
    """
    return [frame for key, frame in sys._current_frames().items() if key in thread_ids]


def _activity(frame: FrameType) -> ThreadState:
    """The activity of a thread whose innermost frame is ``frame``.

    It waits if the innermost frame that is not of a library is one that waits: what waits also
    reads files and looks at clocks, and a thread is likely to be seen in just such a call,
    because it lets other threads run there.
    """
    where, is_waiting, is_compiling, is_debugged = "", None, False, False
    walked: FrameType | None = frame
    while walked is not None:
        name = walked.f_code.co_filename
        is_library = name.startswith(_LIBRARIES) or "site-packages" in name
        is_compiling |= any(part in name for part in _COMPILING)
        is_debugged |= any(part in name for part in _DEBUGGERS)
        if is_waiting is None and (name.startswith((_OWN, *_WAITING)) or not is_library):
            is_waiting = name.startswith(_WAITING)
        if not where and not is_library:
            where = f"{name}:{walked.f_lineno}"
        walked = walked.f_back
    where = where or f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ThreadState(bool(is_waiting), is_compiling, is_debugged, where)
