"""Sign: what a rank tells the others about itself, about twice a second."""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of life of one rank, with what it is doing."""

    rank: int
    name: str  # "rank 2 (cpu on alpha)"
    host: str = ""
    pid: int = 0
    address: str = ""  # where ranks of other hosts may connect to it (``Connections``)
    beat: int = 0  # differs from that of the sign before
    num_steps: int = 0  # finished since the watch began
    step: int = 0  # that of its model at the end of the last one
    doing: str = "an unknown place"
    is_waiting: bool = False  # for other ranks
    is_long: bool = False  # compiling, or in a declared phase: slow without being at fault
    still_s: float = 0.0  # time since it last made progress
    patience_s: float = 0.0  # with a rank without progress, once the first step has ended
    limit_s: float | None = None  # of the call in which it waits for all ranks, if it has one
    place: str = "an unknown line"  # file:line of the innermost frame outside of libraries
    stack: str = ""  # of the thread that trains, if it has been still for a while
    failure: str | None = None  # the rank has failed, with this message
    is_debugged: bool = False  # at a prompt of a debugger: as slow as its user
    has_left: bool = False  # its program does not take part any more

    def to_json(self) -> str:
        """The sign as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``to_json`` returned."""
        return cls(**json.loads(text))


def no_sign(rank: int) -> Sign:
    """In place of the sign of a rank that has not given any."""
    return Sign(rank=rank, name=f"rank {rank}")


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
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return cls.GONE if Path("/proc/self/stat").exists() else cls.UNKNOWN
        except OSError:  # out of file descriptors, which says nothing about the process
            return cls.UNKNOWN
        letter = status.rpartition(")")[2].split()[0]  # proc(5)
        if letter in "ZX":
            return cls.GONE
        return {"T": cls.STOPPED, "t": cls.TRACED}.get(letter, cls.RUNNING)
