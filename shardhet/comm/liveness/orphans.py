"""Ends a rank whose launcher is gone: nobody else would end it, report it or start it again.

The launcher is torchrun's agent on this host, or ``shardhet train``, which is an agent too.
Linux can kill a process when its parent ends (PR_SET_PDEATHSIG), but it does so when the
parent's *thread* ends; so a thread of this process looks once a second who its parent is.
"""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

from shardhet.comm.liveness.ending import EXIT_STATUS

logger = logging.getLogger(__name__)

STARTED_BY_AGENT = "TORCHELASTIC_RUN_ID"  # which agents of torch give to their ranks
INTERVAL_S = 1.0

_threads: list[threading.Thread] = []  # at most one


def end_with_launcher() -> None:
    """From now on, end this process within seconds if the agent that started it is gone.

    Does nothing in a process that no agent has started: a program may outlive its shell.
    """
    if STARTED_BY_AGENT not in os.environ or _threads:
        return
    parent = os.getppid()
    thread = threading.Thread(
        target=_watch, args=(parent,), name="shardhet launcher", daemon=True
    )
    _threads.append(thread)
    thread.start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL_S)
    _end(parent)


def _end(parent: int) -> None:
    message = (
        f"the launcher of this rank, process {parent}, is gone (killed, or out of memory). "
        f"This rank ends with exit status {EXIT_STATUS}; start the run again to go on."
    )
    logger.critical("%s", message)
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    logging.shutdown()
    os._exit(EXIT_STATUS)
