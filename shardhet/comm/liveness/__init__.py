"""A watch over all ranks, which ends the run when one of them stands still.

HetFSDP starts it; ``watch_ranks`` changes it or switches it off.  Code that takes long on one
rank while others wait for it, and in which nothing is wrong, goes into ``with phase("...")``.
"""

from shardhet.comm.channel import phase
from shardhet.comm.liveness.ending import EXIT_STATUS, end_with_launcher
from shardhet.comm.liveness.watch import (
    HANG_TIMEOUT_S,
    Watch,
    watch_ranks,
    watch_unless_decided,
)

__all__ = [
    "EXIT_STATUS",
    "HANG_TIMEOUT_S",
    "Watch",
    "end_with_launcher",
    "phase",
    "watch_ranks",
    "watch_unless_decided",
]
