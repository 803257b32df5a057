"""Failures of ranks: their record, what the system says of processes, and the end of waits."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from shardhet.comm import devices

# An error of this rank, whatever it was waiting for: no memory, or work that failed earlier.
OF_THIS_DEVICE = (torch.AcceleratorError, torch.OutOfMemoryError)
ADVICE = "All ranks stop. Fix the cause on that rank and start again."


class LostPeerError(RuntimeError):
    """A collective failed because another rank is gone; the cause is known elsewhere."""


@contextmanager
def failing_as_peers() -> Iterator[None]:
    """Turn a backend's error into ``LostPeerError``, unless this rank's own device failed."""
    try:
        yield
    except RuntimeError as error:
        raise_as_peers(error)


def raise_as_peers(error: RuntimeError) -> NoReturn:
    """Raise what ``failing_as_peers`` makes of an error."""
    if isinstance(error, OF_THIS_DEVICE):
        raise error
    raise LostPeerError(str(error)) from error


class FailureKind(StrEnum):
    """How a rank has failed."""

    RAISED = "raised"  # an exception
    GONE = "gone"  # its process has ended without one
    SILENT = "silent"  # no heartbeat: stopped, or cut off from the network
    HUNG = "hung"  # heartbeats, and no progress
    LOST = "lost"  # an exception that follows from the failure of another rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank, or several at once, failed, as other ranks and the launcher read it."""

    kind: FailureKind
    ranks: tuple[int, ...]  # none if all wait for each other
    name: str  # of the first, with its device: "rank 2 (cpu on alpha)"
    what: str  # "ValueError: ...", or what the others know of it
    doing: str = "the program"  # at that time
    where: str = "unknown"  # file:line of the innermost frame outside of libraries
    stack: str = ""  # where it could be had
    step: int = 0  # the last that was taken
    at_s: float = field(default_factory=time.time)  # since the epoch
    plans_again: bool = False  # the run goes on under another plan, if ranks are started again

    @property
    def rank(self) -> int:
        """The first of them, or the one that reports it."""
        return self.ranks[0] if self.ranks else 0

    @property
    def message(self) -> str:
        """What the other ranks raise."""
        if self.kind is FailureKind.RAISED:
            return f"{self.name} failed in {self.doing}: {self.what}\n{ADVICE}"
        return f"{self.what}\nAll ranks stop."

    def to_json(self) -> str:
        """The failure as text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        values |= {"kind": FailureKind(values["kind"]), "ranks": tuple(values["ranks"])}
        return cls(**values)


class ProcessState(Enum):
    """What the system says about the process of a rank."""

    RUNNING = "running"
    STOPPED = "stopped"  # by SIGSTOP
    TRACED = "traced"  # by a debugger
    GONE = "gone"
    CUT = "cut"  # its host, another one, answers no more
    UNKNOWN = "unknown"  # it is on another host, and nothing has been heard of its end

    @classmethod
    def of(cls, pid: int) -> "ProcessState":
        """The state of a process of this host."""
        try:
            fields = stat_of(pid)
        except OSError:  # out of file descriptors, which says nothing about the process
            return cls.UNKNOWN
        if fields is None:
            return cls.GONE if Path("/proc/self/stat").exists() else cls.UNKNOWN
        by_letter = {"Z": cls.GONE, "X": cls.GONE, "T": cls.STOPPED, "t": cls.TRACED}
        return by_letter.get(fields[0], cls.RUNNING)


def stat_of(pid: int) -> list[str] | None:
    """The fields of proc(5)'s stat, from the third on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def birth(pid: int) -> int | None:
    """Return a process's start time, in ticks since boot; None if it is not running.

    The start time distinguishes processes that have had the same pid.  A zombie does not run.
    """
    fields = stat_of(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def holder_of(store: Any) -> tuple[str, int | None]:
    """What holds the store, in words, and which rank, if it is one."""
    host = host_of(store)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher on {host or 'the first host'}", None
    if "RANK" in os.environ:
        return "rank 0", 0
    return f"the process at {host or '?'}:{getattr(_underlying(store), 'port', '?')}", None


def host_of(store: Any) -> str | None:
    """The host, or its address, to which the store's connection goes, if it has one."""
    host: str | None = getattr(_underlying(store), "host", None)
    return host


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def end_waits(groups: Iterable[dist.ProcessGroup]) -> None:
    """Make every wait in ``groups``, now or later, end with an error, here and on the peers.

    Communicators of NCCL are aborted all at once.  To abort one frees its memory, for which
    the device has to finish its work, and kernels of the others may wait there for ever
    (pytorch/pytorch, issue 119797; NVIDIA/nccl, issue 1013).
    """
    aborting, host = [], torch.device("cpu")
    for group in (groups := list(groups)):
        if dist.get_backend(group) != "gloo" or not devices.carries(group, host):
            name = "shardhet abort"
            aborting.append(Thread(target=_abort, args=(group,), name=name, daemon=True))
            aborting[-1].start()
    for group in groups:
        if devices.carries(group, host):
            _close(group)
    for thread in aborting:
        thread.join()


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):
        group.abort()


def _close(group: dist.ProcessGroup) -> None:
    """Close the connections that gloo has for ``group``."""
    # gloo's abort() ends no wait.  A receive that times out does: it closes the connections
    # to all peers, whose waits then end at once (measured with torch 2.13).  A receive from a
    # peer that is already gone fails immediately and closes nothing, so this tries every peer.
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, 2**31 - 1).wait(timedelta(milliseconds=1))
