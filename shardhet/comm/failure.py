"""Failure propagation: every rank reports one rank's failure, within seconds."""

import atexit
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch

from shardhet.comm import devices
from shardhet.comm.channel import Channel
from shardhet.comm.groups import Communicators
from shardhet.comm.peers import LostPeerError, holder_of, is_running
from shardhet.comm.progress import progress

SECONDS_TO_HEAR_THE_CAUSE = 3.0
SECONDS_BETWEEN_LOOKS = 0.05
MIB, GIB = 2**20, 2**30
LIMIT_AFTER_FAILURE = 0.9  # of the memory that was predicted, or had been allocated
MEND = "All ranks stop. Fix the cause on that rank and start again."
ENDED = "shardhet_ended_"  # in the store, with a position
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

        With A allocated, x asked for and p predicted: 0.9 A p / max(p, A + x), that is what
        fitted, less in the ratio by which more was needed than predicted, and a tenth.
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


class Lifeline:
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
        self._doing = "starting"
        self._communicators = communicators
        self._channel = channel
        self._names = tuple(names)  # by position
        self._is_broken = False
        if channel.group is not None:
            process = json.dumps([socket.gethostname(), os.getpid()])
            self._store.set(f"shardhet_process_{channel.position}", process)
            _lifelines.add(self)
        if not _hooks_before:
            _hooks_before.append(sys.excepthook)
            sys.excepthook = _tell_before_the_end
            atexit.register(_say_that_it_ended)

    @property
    def doing(self) -> str:
        """What this rank is doing; part of its message."""
        return self._doing

    @doing.setter
    def doing(self, doing: str) -> None:
        self._doing = doing
        progress.mark(doing)

    @contextmanager
    def guard(self, doing: str | None = None) -> Iterator[None]:
        """Guard a block of code that other ranks may wait for."""
        self.doing = doing or self.doing
        try:
            yield
            self.doing = "the program around HetFSDP"
        except LostPeerError as error:
            if (own := self._failure_of_device(error)) is not None:
                self._announce(own)
                raise own from None  # it is no consequence, see ``is_out_of_memory``
            raise RuntimeError(self._hear_the_cause(error)) from error
        except Exception as error:
            self._announce(error)
            raise

    def say_that_it_ended(self) -> None:
        """Leave word that this rank's program came to its end, if that is to be read then."""
        with suppress(RuntimeError):
            if holder_of(self._store)[1] is None:  # a rank may have taken the store along
                steps = f"{progress.step} step{'s' * (progress.step != 1)}"
                self._store.set(f"{ENDED}{self._channel.position}", steps)

    def tell(self, error: BaseException) -> None:
        """Announce an error that ends this process outside of ``guard``, unless others have."""
        if not self._is_broken and progress.verdict is None:
            self._announce(error)

    def _failure_of_device(self, error: LostPeerError) -> BaseException | None:
        """What this rank's device has failed with, if NCCL has met it first.

        A failure in a kernel, as of an index out of range, is that of every later call; there
        may be no memory for a buffer of NCCL.
        """
        if devices.is_on_host(self._device) or progress.verdict is not None:
            return None
        if OF_CUDA in str(error):
            return error.__cause__
        try:
            devices.module_of(self._device).current_stream(self._device).query()
        except RuntimeError as own:
            return own
        return None

    def _announce(self, error: BaseException) -> None:
        name = self._names[self._channel.position]
        is_short = _is_out_of_device_memory(error)
        memory = self._memory(error) if is_short else ""
        error.add_note(f"{name} failed in {self.doing}.{memory}")
        if self._channel.group is None or self._is_broken:
            return
        self._is_broken = True
        message = f"{name} failed in {self.doing}: {type(error).__name__}: {error}{memory}"
        progress.fail(message)
        with suppress(RuntimeError):
            self._store.compare_set("shardhet_failure", "", message)
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

    def _hear_the_cause(self, error: LostPeerError) -> str:
        if not self._is_broken:
            self._is_broken = True
            self._communicators.break_connections()
        if progress.verdict is not None:
            with suppress(RuntimeError):  # for ranks that lose it before their own verdict
                self._store.compare_set("shardhet_failure", "", progress.verdict)
            return progress.verdict
        try:
            return self._look_up_the_cause(error)
        except RuntimeError:  # the store is gone, and so is the process that held it
            deadline = time.monotonic() + SECONDS_TO_HEAR_THE_CAUSE
            # If it stood still, another rank was the first to see it, and this one is about to.
            while progress.is_watched and time.monotonic() < deadline:
                if progress.verdict is not None:
                    return progress.verdict
                time.sleep(SECONDS_BETWEEN_LOOKS)
            holder, _ = holder_of(self._store)
            return (
                f"{holder}, which holds the rendezvous store, or the network to it is gone "
                f"while this rank was in {self.doing} ({error}). Look at its log and exit code."
            )

    def _look_up_the_cause(self, error: LostPeerError) -> str:
        store = self._store
        store.set(f"shardhet_signed_off_{self._channel.position}", "1")
        deadline = time.monotonic() + SECONDS_TO_HEAR_THE_CAUSE
        while time.monotonic() < deadline:
            if progress.verdict is not None:
                return progress.verdict
            if store.check(["shardhet_failure"]):
                cause = store.get("shardhet_failure").decode()
                return f"{cause}\n{MEND}"
            time.sleep(SECONDS_BETWEEN_LOOKS)
        silent = [
            position
            for position in range(len(self._names))
            if not store.check([f"shardhet_signed_off_{position}"])
        ]
        for position in silent:
            if store.check([f"{ENDED}{position}"]):
                steps = store.get(f"{ENDED}{position}").decode()
                return (
                    f"{self._names[position]} ended without an exception after {steps}, while "
                    f"this rank is in {self.doing} of step {progress.step + 1}. Give every "
                    "rank as many batches: is its loader shorter?"
                )
        ended, unknown = self._split_by_host(silent)
        if ended:
            return (
                f"{', '.join(ended)} ended without a message while this rank was in "
                f"{self.doing}. Look at its exit code and log: killed, out of memory, or cut "
                "off."
            )
        if unknown:
            return (
                f"{', '.join(unknown)} did not answer within {SECONDS_TO_HEAR_THE_CAUSE:g} s "
                f"while this rank was in {self.doing}: ended without a message, cut off, or "
                "computing still. Look at the exit codes and logs there."
            )
        return f"The ranks lost each other in {self.doing}: {error}. Check the network."

    def _split_by_host(self, silent: Sequence[int]) -> tuple[list[str], list[str]]:
        """Names of those that have ended, and of those of other hosts, which may be busy.

        A rank of this host that still runs is neither: it is busy with something else.
        """
        ended, unknown = [], []
        for position in silent:
            key = f"shardhet_process_{position}"  # of those that have come so far
            here = self._store.check([key])
            host, pid = json.loads(self._store.get(key)) if here else (None, 0)
            if host != socket.gethostname():
                unknown.append(self._names[position])
            elif not is_running(pid):
                ended.append(self._names[position])
        return ended, unknown

    @property
    def _store(self) -> Any:  # a rendezvous store; torch does not export its type
        assert self._channel.group is not None
        return self._channel.group.get_group_store()


_lifelines: WeakSet[Lifeline] = WeakSet()
_hooks_before: list[Callable[..., Any]] = []  # at most one


def _say_that_it_ended() -> None:
    if getattr(sys, "last_value", None) is None:  # what the interpreter ends with
        for each in list(_lifelines):
            each.say_that_it_ended()


def _tell_before_the_end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """In the place of ``sys.excepthook``: others hear what the program around models raises."""
    try:
        for each in list(_lifelines):
            each.tell(error)
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


def _is_internal(trace: TracebackType) -> bool:
    return INTERNAL.search(trace.tb_frame.f_code.co_filename) is not None
