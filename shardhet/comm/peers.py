"""Checks whether peer processes are still running."""

import os
from pathlib import Path
from typing import Any


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


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
