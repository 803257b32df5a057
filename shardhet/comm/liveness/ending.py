"""Ends this process once the run cannot go on: in order if that is possible, else at once.

    at once         connections are broken, so that a blocked collective raises
    after a grace   a training thread that is still blocked, or is itself at fault, is ended
                    with the whole process, by ``os._exit``

A training thread that has noticed handles its error for as long as it likes.  Once the program
ends, the process gets ``SECONDS_FOR_EXIT``: destructors of torch may wait for a store that
stands still (torch 2.13).
"""

import atexit
import faulthandler
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from shardhet.comm.groups import break_all_connections

logger = logging.getLogger(__name__)

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: start the run again
GRACE_S = 5.0
SECONDS_FOR_EXIT = 15.0


class Ending:
    """The end of this process, step by step, driven by the watch."""

    def __init__(self, text: str, *, is_culprit: bool, breaks_after_s: float = GRACE_S) -> None:
        """``is_culprit``: this rank is the one that stands still, so it will not notice.

        A training thread that is blocked for ``breaks_after_s`` has its connections broken; 0
        breaks them now.
        """
        self._text = text
        self._is_culprit = is_culprit
        self._breaks_after_s = breaks_after_s
        self._blocked_s = 0.0
        self._breaking: threading.Thread | None = None
        atexit.register(_limit_exit)
        if not breaks_after_s:
            self._break()

    def advance(self, passed_s: float, *, is_waiting: bool, stack: str) -> None:
        """Go on after ``passed_s``; does not return if the process has to end now."""
        self._blocked_s += passed_s if is_waiting or self._is_culprit else 0.0
        if self._breaking is None:
            if self._blocked_s >= self._breaks_after_s:
                self._break()
                self._blocked_s = 0.0
        elif self._blocked_s >= GRACE_S:
            self._exit(stack)

    def join(self, within_s: float) -> None:
        """Wait for what this has started: a thread that outlives the interpreter aborts it."""
        if self._breaking is not None:
            self._breaking.join(within_s)

    def _break(self) -> None:
        # Not here: to abort a communicator may block, and the grace goes on meanwhile.
        self._breaking = threading.Thread(
            target=break_all_connections, name="shardhet break", daemon=True
        )
        self._breaking.start()

    def _exit(self, stack: str) -> None:
        message = (
            f"{self._text}\nThis process ends with exit status {EXIT_STATUS}, because its "
            f"training thread does not react. It is at\n{stack}"
        )
        logger.critical("%s", message)
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{message}\n")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        logging.shutdown()
        os._exit(EXIT_STATUS)


def _limit_exit() -> None:
    """End the process, with status 1, if the interpreter has not ended it in time."""
    # A thread of C, which no lock of the interpreter stops.
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 -- open until the process ends
    faulthandler.dump_traceback_later(SECONDS_FOR_EXIT, exit=True, file=nowhere)
