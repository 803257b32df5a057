"""A lock: only one run at a time writes to a run folder.

Where ranks are started again by themselves, two groups of them may both believe to be the run:
a node that was cut off, or one that came back and did not find the others.  Both would go on
from the same checkpoint and write over each other's.
"""

import errno
import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from shardhet.apps.launch.run_folder import RunFolder

# For ranks of the same launch that are still saving, as torchrun lets them for 30 s, and for a
# server of files to let go of a node that is lost (NFSv4: 90 s).
PATIENCE_S = 120.0
PATIENCE_WITH_ORPHANS_S = 10.0  # where none start again; ranks end soon after their launcher
NAMES_HOLDER_AFTER_S = 2.0
SECONDS_BETWEEN_TRIES = 0.2
HELD = (errno.EACCES, errno.EAGAIN)

logger = logging.getLogger(__name__)


@contextmanager
def sole_writer(
    folder: RunFolder, rank: int, *, timeout_s: float = PATIENCE_WITH_ORPHANS_S
) -> Iterator[None]:
    """Context in which rank zero holds the folder; other ranks do nothing.

    The system lets go of it when the process ends, however it does.  Raises ``RuntimeError``
    on rank zero if another process has held it for ``timeout_s``.  Where files cannot be
    locked, it warns and goes on.
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
                if waited_s >= timeout_s:
                    raise RuntimeError(
                        f"run_dir: {folder.path} is in use by another run, "
                        f"{holder or 'another process'}. Stop that run, or name another folder."
                    ) from None
                if waited_s > NAMES_HOLDER_AFTER_S and not has_named:
                    has_named = True
                    sys.stderr.write(
                        f"run_dir: {folder.path} is held by {holder or 'another process'}; "
                        f"waiting up to {timeout_s:.0f} s for it to end\n"
                    )
                    sys.stderr.flush()
                time.sleep(SECONDS_BETWEEN_TRIES)
        file.truncate(0)
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        file.flush()
        yield
