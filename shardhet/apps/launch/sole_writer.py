"""A lock: only one run at a time writes to a run folder.

Where ranks are started again by themselves, two groups of them may both believe to be the run:
a node that was cut off, or one that came back and did not find the others.  Both would go on
from the same checkpoint and write over each other's.
"""

import errno
import fcntl
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from shardhet.apps.launch.run_folder import RunFolder
from shardhet.comm.failure import ProcessState
from shardhet.comm.liveness.ending import launcher_of

# For ranks of the same launch that are still saving, as torchrun lets them for 30 s, and for a
# server of files to let go of a node that is lost (NFSv4: 90 s).
PATIENCE_S = 120.0
PATIENCE_WITH_ORPHANS_S = 10.0  # ranks end within seconds of their launcher
NAMES_HOLDER_AFTER_S = 2.0
SECONDS_BETWEEN_TRIES = 0.2
HELD = (errno.EACCES, errno.EAGAIN)
HOLDER = re.compile(r"process (\d+) on (\S+) since .*, launched by process (\d+) \((\S+)\)")

logger = logging.getLogger(__name__)


@contextmanager
def sole_writer(
    folder: RunFolder, rank: int, *, patience_s: float = PATIENCE_S
) -> Iterator[None]:
    """Context in which rank zero holds the folder; other ranks do nothing.

    The system lets go of it when the process ends, however it does.  Raises ``RuntimeError``
    on rank zero if another process has held it for ``patience_s``; at once, if that process
    lives on this host and is no rank of this launch.  Where files cannot be locked, it warns
    and goes on.
    """
    if rank != 0:
        yield
        return
    with folder.lock_path.open("a+", encoding="utf-8") as file:
        begin_s, has_named = time.monotonic(), False
        while True:
            try:
                # Of lockf, because children that are forked do not inherit it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in HELD:
                    logger.warning("%s cannot be locked: %s", folder.lock_path, error)
                    break
                waited_s = time.monotonic() - begin_s
                file.seek(0)
                holder = file.read().strip()
                limit_s = min(patience_s, _patience_s(holder))
                if waited_s >= limit_s:
                    raise RuntimeError(
                        f"run_dir: {folder.path} is in use by another run, "
                        f"{holder or 'another process'}. Stop that run, or name another folder."
                    ) from None
                if waited_s > NAMES_HOLDER_AFTER_S and not has_named:
                    has_named = True
                    sys.stderr.write(
                        f"run_dir: {folder.path} is held by {holder or 'another process'}; "
                        f"waiting up to {limit_s:.0f} s for it to end\n"
                    )
                    sys.stderr.flush()
                time.sleep(SECONDS_BETWEEN_TRIES)
        file.truncate(0)
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        launcher, launch = _launch()
        file.write(
            f"process {os.getpid()} on {socket.gethostname()} since {since}, launched by "
            f"process {launcher} ({launch})\n"
        )
        file.flush()
        yield


def _launch() -> tuple[int, str]:
    """The launcher of this process, and the name that all launchers of its run have."""
    return launcher_of(os.getpid()) or 0, os.environ.get("TORCHELASTIC_RUN_ID", "none")


def _patience_s(holder: str) -> float:
    """How long the holder of the lock may go on."""
    found = HOLDER.fullmatch(holder)
    if found is None or found[2] != socket.gethostname():
        return PATIENCE_S
    process, launcher = int(found[1]), int(found[3])
    mine, launch = _launch()
    # "none" is the name that torchrun gives where the user gives none.
    is_same = 0 != launcher == mine if launch == "none" else found[4] == launch
    if ProcessState.of(process) is ProcessState.GONE or is_same:
        return PATIENCE_S
    is_orphan = launcher and launcher_of(process) != launcher
    return PATIENCE_WITH_ORPHANS_S if is_orphan else 0.0
