"""Checks whether peer processes are still running, and ends waits for them."""

import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from shardhet.comm import devices


class LostPeerError(RuntimeError):
    """A collective failed because another rank is gone; the cause is known elsewhere."""


def is_running(pid: int) -> bool:
    """Whether process ``pid`` of this host is running; a zombie is not."""
    return birth(pid) is not None


def birth(pid: int) -> int | None:
    """Return a process's start time, in ticks since boot; None if it is not running.

    The start time distinguishes processes that have had the same pid.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = status.rpartition(")")[2].split()  # proc(5), from the third field on
    return None if fields[0] in "ZX" else int(fields[19])


def holder_of(store: Any) -> tuple[str, int | None]:
    """What holds the store, in words, and which rank, if it is one."""
    store = _underlying(store)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher on {getattr(store, 'host', 'the first host')}", None
    if "RANK" in os.environ:
        return "rank 0", 0
    return f"the process at {getattr(store, 'host', '?')}:{getattr(store, 'port', '?')}", None


def host_of(store: Any) -> str | None:
    """The host, or its address, to which the store's connection goes, if it has one."""
    host: str | None = getattr(_underlying(store), "host", None)
    return host


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


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
