"""CheckpointError, raised on every rank with one message."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = "Free space or choose another disk"
_CLOSED = "Choose a folder that this user may write to"
REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _CLOSED,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.ENOENT: "Choose a folder that all ranks share, and that nobody removes meanwhile",
    errno.ENOTDIR: "Choose a folder: a part of this path is a file",
}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and what is wrong."""


def in_words(error: Exception) -> str:
    """``error`` as one line for other ranks; files are named by errors of the system."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file that is not what was written."""
    return CheckpointError(
        f"{path}: {what}. Use another checkpoint, or copy this one again from where it is "
        "whole."
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context in which a file counts as damaged if the system does not give it."""
    try:
        yield
    except OSError as error:
        raise damaged(path, (error.strerror or str(error)).lower()) from None


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or folder that the system does not take."""
    remedy = REMEDIES.get(error.errno or 0, "See whether that disk works, or choose another")
    return CheckpointError(
        f"{path}: {error.strerror or error}. {remedy}; earlier checkpoints are as they were."
    )
