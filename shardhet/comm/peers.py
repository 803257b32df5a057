"""Whether the processes on the other side still live."""

from pathlib import Path


class LostPeerError(RuntimeError):
    """A collective ended because another rank is gone; the cause is known elsewhere."""


def is_running(pid: int) -> bool:
    """Whether a process of this host runs, and is no corpse that its parent has not buried."""
    return birth(pid) is not None


def birth(pid: int) -> int | None:
    """When a process started, in ticks since the system did; None if it does not run.

    Tells apart processes that have had the same number.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = status.rpartition(")")[2].split()  # proc(5), from the third on
    return None if fields[0] in "ZX" else int(fields[19])
