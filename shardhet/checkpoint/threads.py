"""Threads that write while training goes on, and have ended before the interpreter does.

The interpreter unwinds a thread that is in C++ when it ends, and the process then aborts in
place of ending with its own status (Python 3.11, torch 2.13): a rank that has raised would
look as if it had crashed.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence

from shardhet.comm.channel import progress

SECONDS_TO_FINISH = 10.0  # what was begun, if the program has not failed
SECONDS_TO_STOP = 5.0


class Thread(threading.Thread):
    """A thread that may finish at the end of the program, and is then stopped."""

    def __init__(
        self, target: Callable[[], None], *, name: str, stop: Callable[[], None]
    ) -> None:
        """``stop`` makes ``target`` return soon; called only if the program ends."""
        super().__init__(target=target, name=name, daemon=True)
        self.make_stop = stop

    def start(self) -> None:
        """Begin."""
        _started[:] = [each for each in _started if each.is_alive()]
        _started.append(self)
        super().start()


_started: list[Thread] = []


# Registered when it is imported, so that the watch over ranks, which starts later and ends
# earlier, has told the others that this rank ends before anything waits here.
@atexit.register
def _end() -> None:
    patience_s = 0.0 if _has_failed() else SECONDS_TO_FINISH
    _join(_started, patience_s)
    left = [thread for thread in _started if thread.is_alive()]
    for thread in left:
        thread.make_stop()
    _join(left, SECONDS_TO_STOP)


def _has_failed() -> bool:
    """Whether the program ends with an error: peers will not go on with what was begun."""
    has_raised = getattr(sys, "last_value", None) is not None
    return has_raised or progress.failure is not None


def _join(threads: Sequence[Thread], patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
