"""Ends this process: once the run cannot go on, or once its launcher is gone.

at once         connections are broken, so that a blocked collective raises
after a grace   a training thread that is still blocked, or is itself at fault, is ended
                with the whole process, by ``os._exit``

A training thread that has noticed handles its error for as long as it likes.  Once the program
ends, the process gets ``SECONDS_FOR_EXIT``: destructors of torch may wait for a store that
stands still (torch 2.13).

[Note: The launcher of a rank]
It is torchrun's agent on this host, or ``shardhet train``, which is an agent too: the nearest
ancestor that was not itself started with this rank's variables, as a shell in between is.
Linux can kill a process when its parent ends (PR_SET_PDEATHSIG), but it does so when the
parent's *thread* ends, and never if the parent ended before the call; so a thread looks once a
second who the launcher is.  A launcher that ended before the first look has left this rank to
another process, which, unlike an agent, has not loaded torch.
"""

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from shardhet.comm.failure import stat_of
from shardhet.comm.groups import break_all_connections

logger = logging.getLogger(__name__)

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: start the run again
GRACE_S = 5.0  # for a training thread to notice that its connections are broken
SECONDS_FOR_EXIT = 15.0
OF_THIS_RANK = "TORCHELASTIC_ERROR_FILE"  # agents of torch give each rank one of its own
SECONDS_BETWEEN_LOOKS = 1.0

_launcher: list[int] = []  # at most one; -1 if it was gone at the first look


class Ending:
    """The end of this process, step by step, driven by the watch."""

    def __init__(self, text: str, *, is_at_fault: bool, breaks_after_s: float) -> None:
        """``is_at_fault``: this rank is the one that stands still, so it will not notice.

        A training thread that is blocked for ``breaks_after_s`` has its connections broken; 0
        breaks them now.  ``GRACE_S`` later the process is ended.
        """
        self._text, self._is_at_fault = text, is_at_fault
        self._breaks_after_s = breaks_after_s
        self._blocked_s = 0.0
        self._breaking: threading.Thread | None = None
        atexit.register(_limit_exit)
        if not breaks_after_s:
            self._break()

    def advance(self, passed_s: float, *, is_waiting: bool, stack: str) -> None:
        """Go on after ``passed_s``; does not return if the process has to end now."""
        self._blocked_s += passed_s if is_waiting or self._is_at_fault else 0.0
        if self._breaking is None:
            if self._blocked_s >= self._breaks_after_s:
                self._break()
                self._blocked_s = 0.0
        elif self._blocked_s >= GRACE_S:
            _exit(
                f"{self._text}\nThis process ends with exit status {EXIT_STATUS}, because its "
                f"training thread does not react. It is at\n{stack}"
            )

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


def launcher_of(pid: int) -> int | None:
    """The process that has launched the rank ``pid``; see [Note: The launcher of a rank].

    None if no agent of torch has, or the system does not say.
    """
    mine = _file_of(pid)
    if mine is None:
        return None
    while (parent := _parent_of(pid)) is not None and _file_of(parent) == mine:
        pid = parent
    return parent


def end_with_launcher() -> None:
    """From now on, end this process within seconds if the agent that started it is gone.

    Does nothing in a process that no agent has started: a program may outlive its shell.
    """
    if OF_THIS_RANK not in os.environ or _launcher:
        return
    launcher = _launcher_now()
    _launcher.append(-1 if _has_adopted(launcher) else launcher)
    threading.Thread(target=_look_for_launcher, name="shardhet launcher", daemon=True).start()


def end_if_launcher_is_gone() -> None:
    """End this process now if ``end_with_launcher`` would end it soon."""
    if not _launcher or _launcher_now() == _launcher[0]:
        return
    which = "" if _launcher[0] < 0 else f", process {_launcher[0]},"
    _exit(
        f"the launcher of this rank{which} is gone (killed, or out of memory). This rank ends "
        f"with exit status {EXIT_STATUS}; start the run again to go on."
    )


def _look_for_launcher() -> None:
    while True:
        end_if_launcher_is_gone()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _launcher_now() -> int:
    return launcher_of(os.getpid()) or os.getppid()


def _has_adopted(pid: int) -> bool:
    """Whether a process has adopted this rank, whose launcher had ended before the first look.

    An agent has loaded torch, and it is of this rank's user, who may look into it.
    """
    try:
        return "libtorch" not in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return pid == 1 and Path("/proc/self/maps").exists()


def _file_of(pid: int) -> bytes | None:
    """The value of ``OF_THIS_RANK`` with which a process was started."""
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = each.partition(b"=")
            if name == OF_THIS_RANK.encode():
                return value
    return None


def _parent_of(pid: int) -> int | None:
    with suppress(OSError):
        fields = stat_of(pid)
        return None if fields is None else int(fields[1])
    return None


def _exit(message: str) -> NoReturn:
    logger.critical("%s", message)
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{message}\n")
    end_now(EXIT_STATUS)


def end_now(status: int) -> NoReturn:
    """End the process, whatever its threads do, and without the destructors of torch."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(status)


def _limit_exit() -> None:
    """End the process, with status 1, if the interpreter has not ended it in time."""
    # A thread of C, which no lock of the interpreter stops.
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 -- open until the process ends
    faulthandler.dump_traceback_later(SECONDS_FOR_EXIT, exit=True, file=nowhere)
