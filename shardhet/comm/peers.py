"""Failure propagation: all ranks report the failure of one, by its name, within seconds.

A death is first noticed, on

    one host, without            by who waits for the dead rank's rows, within 50 ms
    accelerators                 (extras.shared_host.arena: SharedCounters.wait_for)
    several hosts, gloo          by the broken connection, at once (calls: wait_all)
    accelerators, NCCL           by what hosts exchange over gloo three times a step; where the
                                 host waits for its device, by the watch, after 2 s: a process
                                 is gone from /proc, or its connection to rank 0 has closed
                                 (liveness.ending)
    a host that is cut off, or   by the watch, within 60 s unless set (liveness.diagnosis)
    a rank that stands still

Then on each of the others, in this order:

    the call that waits   raises LostPeerError: the connection broke by itself, or because the
                          watch has found a rank at fault (``liveness.ending``), which ends a
                          process whose training thread stays blocked for 5 s more
    Peers.fail_together   is around every step and catches it; ``_cause_of`` breaks this rank's
                          own connections, so that ranks further away notice, too
    the message           is that of the first ``Failure`` that any rank has reported to the
                          store, of this model or of all: the rank that raises, or a watch;
                          without one within 3 s, of processes that have ended or do not answer
                          (``_cause_by_silence``)
    the launcher          reads the same record from the run folder (``apps.launch.crash``)
"""

import atexit
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.channel import Channel, progress
from shardhet.comm.failure import Failure, FailureKind, LostPeerError, birth, holder_of
from shardhet.comm.groups import Communicators

SECONDS_TO_HEAR_THE_CAUSE = 3.0
SECONDS_BETWEEN_LOOKS = 0.05
MIB, GIB = 2**20, 2**30
LIMIT_AFTER_FAILURE = 0.9  # of the memory that was predicted, or had been allocated
FAILURE = "shardhet_failure_"  # in the store, with a model if a rank has raised: the first
# In the store, with a position
PROCESS, SIGNED_OFF, ENDED = "shardhet_process_", "shardhet_signed_off_", "shardhet_ended_"
OF_CUDA = "ncclUnhandledCudaError"  # in torch's error, if a call of CUDA failed in NCCL
NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # in torch's RuntimeError
TRACEBACK = "SHARDHET_TRACEBACK"  # "full": with the frames inside of this package
OF_BUGS = (AssertionError, AttributeError, LookupError)  # if this package raises them
# Files of this package, and what torch and Python put between it and the program.
INTERNAL = re.compile(
    f"^{re.escape(str(Path(__file__).parents[1]))}|^<frozen|/contextlib.py$"
    "|/torch/nn/modules/module.py$|/torch/autograd/function.py$"
)
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
BYTES_BY_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this rank's own memory did not suffice."""
    if isinstance(error.__cause__, LostPeerError):  # which may say it of another rank
        return False
    is_of_host = isinstance(error, MemoryError) or NO_HOST_MEMORY in str(error)
    return is_of_host or _is_out_of_device_memory(error)


def _is_out_of_device_memory(error: BaseException) -> bool:
    text = str(error)
    is_of_nccl = OF_CUDA in text and "out of memory" in text
    return is_of_nccl or isinstance(error, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a device held when it was out of memory."""

    allocated_bytes: int  # the most at once
    asked_bytes: int = 0  # more, of what was not allocated; 0: not known
    predicted_bytes: int | None = None  # of the plan

    @classmethod
    def of(cls, error: BaseException, allocated_bytes: int) -> Self:
        """The shortage that torch's error tells of."""
        found = ASKED.search(str(error))
        asked = 0.0 if found is None else float(found[1]) * BYTES_BY_UNIT[found[2]]
        return cls(
            allocated_bytes=allocated_bytes,
            asked_bytes=int(asked),
            predicted_bytes=progress.predicted_bytes,
        )

    @property
    def limit_bytes(self) -> int:
        """The most that a plan may be predicted to need of the device from now on.

        0.9 A p / max(p, A + x), with A bytes allocated, x requested and p predicted: what
        fitted, reduced by the factor of the underprediction and by another tenth.
        """
        needed = self.allocated_bytes + self.asked_bytes
        predicted = self.predicted_bytes or needed
        part = predicted / max(predicted, needed, 1)
        return int(LIMIT_AFTER_FAILURE * self.allocated_bytes * part)

    @property
    def text(self) -> str:
        """What was predicted, what was found, and what to plan with, in MiB."""
        predicted = self.predicted_bytes
        numbers = {
            "allocated": self.allocated_bytes,
            "more asked for": self.asked_bytes,
            "predicted": predicted or 0,
        }
        said = ", ".join(
            f"{each / MIB:,.1f} MiB {what}" for what, each in numbers.items() if each
        )
        return f"{said}: it is planned for with {self.limit_bytes / MIB:,.1f} MiB from now on"


def failure_of(error: BaseException, *, rank: int, name: str, what: str = "") -> Failure:
    """The failure of the rank that raises ``error``.

    ``name`` is with its device; ``what``: in place of what Python says of the error.
    """
    is_lost = any(isinstance(each, LostPeerError) for each in (error, error.__cause__))
    return Failure(
        kind=FailureKind.LOST if is_lost else FailureKind.RAISED,
        ranks=(rank,),
        name=name,
        what=what or "".join(traceback.format_exception_only(error)).strip(),
        doing=progress.doing,
        where=_place_of(error),
        step=progress.step,
    )


def report(failure: Failure, store: Any) -> Failure:
    """Leave word of ``failure`` for all ranks; the first that any has left.

    A program may catch what a rank has raised, and go on with another group of ranks.
    """
    key = FAILURE + (progress.model if failure.kind is FailureKind.RAISED else "")
    return Failure.from_json(store.compare_set(key, "", failure.to_json()))


def reported(store: Any) -> Failure | None:
    """The failure of which a rank has left word, if it is that of the newest model, or ends
    the run.
    """
    found = (key for key in (FAILURE + progress.model, FAILURE) if store.check([key]))
    return next((Failure.from_json(store.get(key)) for key in found), None)


class Peers:
    """Turns a failure on one rank into the same message on every rank, within seconds.

    The failing rank writes what happened to the rendezvous store and then breaks its
    connections.  Its peers see their collectives fail, break their own connections so that
    ranks further away notice too, and look up the cause in the store.  If nobody wrote a
    cause, those of this host that have ended are named, or those of other hosts that do not
    sign off in time.
    """

    def __init__(
        self,
        communicators: Communicators,
        channel: Channel,
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        self._device = device
        self._communicators = communicators
        self._channel = channel
        self._names = tuple(names)  # by position
        self._is_broken = False
        if channel.group is not None:
            process = json.dumps([socket.gethostname(), os.getpid()])
            self._store.set(f"{PROCESS}{channel.position}", process)
            progress.model = str(channel.group.group_name)
            _all.add(self)
        if not _hooks_before:
            _hooks_before.append(sys.excepthook)
            sys.excepthook = _report_before_the_end
            atexit.register(_say_that_it_ended)

    @contextmanager
    def fail_together(self, doing: str | None = None) -> Iterator[None]:
        """Raise on all ranks what a block raises on one, for which others may wait."""
        progress.mark(doing or progress.doing)
        try:
            yield
            progress.mark("the program around HetFSDP")
        except LostPeerError as error:
            if (own := self._failure_of_device(error)) is not None:
                self.report(own)
                raise own from None  # it is no consequence, see ``is_out_of_memory``
            raise RuntimeError(self._cause_of(error)) from error
        except Exception as error:
            self.report(error)
            raise

    def say_that_it_ended(self) -> None:
        """Leave word that this rank's program came to its end, if that is to be read then."""
        with suppress(RuntimeError):
            if holder_of(self._store)[1] is None:  # a rank may have taken the store along
                steps = f"{progress.step} step{'s' * (progress.step != 1)}"
                self._store.set(f"{ENDED}{self._channel.position}", steps)

    def _failure_of_device(self, error: LostPeerError) -> BaseException | None:
        """What this rank's device has failed with, if NCCL has met it first.

        A failure in a kernel, as of an index out of range, is that of every later call; there
        may be no memory for a buffer of NCCL.
        """
        if devices.is_on_host(self._device) or progress.failure is not None:
            return None
        if OF_CUDA in str(error):
            return error.__cause__
        try:
            devices.module_of(self._device).current_stream(self._device).query()
        except RuntimeError as own:
            return own
        return None

    def report(self, error: BaseException) -> None:
        """Report an error of this rank to all others, unless it is known that the run ends."""
        position = self._channel.position
        name, doing = self._names[position], progress.doing
        memory = self._memory(error) if _is_out_of_device_memory(error) else ""
        error.add_note(f"{name} failed in {doing}.{memory}")
        if self._channel.group is None or self._is_broken or not dist.is_initialized():
            return
        self._is_broken = True
        what = f"{type(error).__name__}: {error}{memory}"
        failure = failure_of(error, rank=dist.get_rank(), name=name, what=what)
        if failure.kind is FailureKind.RAISED:
            with suppress(RuntimeError):
                report(failure, _store_of_all())
        self._communicators.break_connections()

    def _memory(self, error: BaseException) -> str:
        """The memory of this rank's device: used, predicted, and the plan that needs less."""
        if devices.is_on_host(self._device):
            return ""
        module = devices.module_of(self._device)
        allocated = module.max_memory_allocated(self._device)
        reserved = module.memory_reserved(self._device)
        predicted = progress.predicted_bytes
        limit_gib = Shortage.of(error, allocated).limit_bytes / GIB
        return (
            f" At most {allocated / GIB:.2f} GiB were allocated here, {reserved / GIB:.2f} GiB "
            "are reserved"
            + (f", and {predicted / GIB:.2f} GiB were predicted" if predicted else "")
            + f". Plan again with limits.{self._channel.position}.memory_gib={limit_gib:.2f}."
        )

    def _cause_of(self, error: LostPeerError) -> str:
        """What has failed elsewhere; it may take a while until that is known."""
        if not self._is_broken:
            self._is_broken = True
            self._communicators.break_connections()
        until_s, has_store = time.monotonic() + SECONDS_TO_HEAR_THE_CAUSE, True
        # Without a store: if it stood still, another rank was the first to see it, and this one
        # is about to.
        while time.monotonic() < until_s and (has_store or progress.is_watched):
            found = progress.failure
            try:
                if found is None and has_store:
                    self._store.set(f"{SIGNED_OFF}{self._channel.position}", "1")
                    found = reported(_store_of_all())
            except RuntimeError:  # it is gone, and so is the process that held it
                has_store = False
            if found is not None:
                return found.message
            time.sleep(SECONDS_BETWEEN_LOOKS)
        try:
            return self._cause_by_silence(error)
        except RuntimeError:
            return (
                f"{holder_of(self._store)[0]}, which holds the rendezvous store, or the "
                f"network to it is gone while this rank was in {progress.doing} ({error}). "
                "Look at its log and exit code."
            )

    def _cause_by_silence(self, error: LostPeerError) -> str:
        """What is known of the ranks that have not noticed: they may be the cause."""
        store, here, doing = self._store, socket.gethostname(), progress.doing
        ended, unknown = [], []
        for position, name in enumerate(self._names):
            if store.check([f"{SIGNED_OFF}{position}"]):
                continue
            if store.check([f"{ENDED}{position}"]):
                steps = store.get(f"{ENDED}{position}").decode()
                return (
                    f"{name} ended without an exception after {steps}, while this rank is in "
                    f"{doing} of step {progress.step + 1}. Every rank makes the same calls: is "
                    "its loader shorter, or do only some ranks make this call?"
                )
            key = f"{PROCESS}{position}"  # of those that have come so far
            host, pid = json.loads(store.get(key)) if store.check([key]) else (None, 0)
            if host != here:  # it may be busy
                unknown.append(name)
            elif birth(pid) is None:  # one of this host that still runs is busy
                ended.append(name)
        if ended:
            return (
                f"{', '.join(ended)} ended without a message while this rank was in {doing}. "
                "Look at its exit code and log: killed, out of memory, or cut off."
            )
        if unknown:
            return (
                f"{', '.join(unknown)} did not answer within {SECONDS_TO_HEAR_THE_CAUSE:g} s "
                f"while this rank was in {doing}: ended without a message, cut off, or "
                "computing still. Look at the exit codes and logs there."
            )
        return f"The ranks lost each other in {doing}: {error}. Check the network."

    @property
    def _store(self) -> Any:  # a rendezvous store; torch does not export its type
        assert self._channel.group is not None
        return self._channel.group.get_group_store()


_all: WeakSet[Peers] = WeakSet()
_hooks_before: list[Callable[..., Any]] = []  # at most one


def _say_that_it_ended() -> None:
    if getattr(sys, "last_value", None) is None:  # what the interpreter ends with
        for each in list(_all):
            each.say_that_it_ended()


def _report_before_the_end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """In the place of ``sys.excepthook``: others hear what the program around models raises."""
    try:
        if progress.failure is None:
            progress.model = ""  # the run ends, whatever the newest model of others is
            for each in [each for each in _all if not each._is_broken]:
                each.report(error)
    finally:
        if os.environ.get(TRACEBACK) != "full":
            leave_out_internals(error)
        _hooks_before[0](kind, error, error.__traceback__)


def leave_out_internals(error: BaseException | None) -> None:
    """Leave of the traceback what its reader can change: the program and its libraries."""
    seen = set[int]()  # an error may be raised from itself
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames, trace = list[TracebackType](), error.__traceback__
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        is_bug = isinstance(error, OF_BUGS) and frames and _is_internal(frames[-1])
        for each in reversed(frames):
            if is_bug or not _is_internal(each):
                trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
        error.__traceback__ = trace
        if isinstance(error.__cause__, LostPeerError):  # the message has what came of it
            error.__cause__ = None
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _place_of(error: BaseException) -> str:
    """The innermost line of user code; without any, that of this package or any other."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not INTERNAL.search(frame.filename)
    ]
    innermost = (own or frames)[-1:]
    return f"{innermost[0].filename}:{innermost[0].lineno}" if innermost else "unknown"


def _store_of_all() -> Any:
    group: Any = dist.group.WORLD
    return group.get_group_store()


def _is_internal(trace: TracebackType) -> bool:
    return INTERNAL.search(trace.tb_frame.f_code.co_filename) is not None
