"""Files and folders of a checkpoint on disk: complete, or not there.

.NAME.unfinished   being written, or removed; whoever finds one that nobody writes may remove it
NAME               complete: it appears by one rename, after all its files are on disk
.NAME.replaced     an earlier NAME while the new one takes its place; if the program ends
in between, ``recover`` gives it its name back
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from shardhet.checkpoint.format.errors import CheckpointError, unwritable

MANIFEST, METADATA, PLAN = "manifest.json", ".metadata", "plan.json"
BYTES_BEFORE_WRITEBACK = 2**25
DIGEST_PREFIX = "sha256:"
_OF_STEP = re.compile(r"step_(\d{8,})")
_LEFT_BEHIND = re.compile(r"\.(step_\d{8,})\.(unfinished|replaced|removed)")


class DigestingFile:
    """A new file that knows its length and the digest of what was written to it.

    The disk takes what is written while more of it is digested.
    Raises ``CheckpointError`` naming the file when the disk does not take it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._hash = hashlib.sha256()
        self.failure: CheckpointError | None = None  # torch.save may raise another error
        self._num_bytes_kept = 0  # by the system, of what was written
        with self._named():
            self._file: IO[bytes] = open_new(path)

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``; returns its length."""
        with self._named():
            self._file.write(data)
        self._hash.update(data)
        added = memoryview(data).nbytes
        self.num_bytes += added
        self._num_bytes_kept += added
        if self._num_bytes_kept >= BYTES_BEFORE_WRITEBACK:
            self._begin_writeback()
        return added

    def _begin_writeback(self) -> None:
        start, self._num_bytes_kept = self.num_bytes - self._num_bytes_kept, 0
        with self._named():
            self._file.flush()
            if hasattr(os, "posix_fadvise"):  # of what is not read here again: Linux writes it
                os.posix_fadvise(self._file.fileno(), start, 0, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Writers of torch call it; what counts happens in ``finish``."""

    def finish(self) -> None:
        """Close the file once the disk has it."""
        with self._named():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close the file after a failure."""
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = unwritable(self.path, error)
            raise self.failure from error

    @property
    def digest(self) -> str:
        """Of all that was written: SHA-256, for which processors have instructions."""
        return DIGEST_PREFIX + self._hash.hexdigest()


def open_new(path: Path) -> IO[bytes]:
    """Open a file that must not be there yet."""
    return path.open("xb")


def write_file(path: Path, content: bytes) -> DigestingFile:
    """Write a whole new file; returns it closed, for its length and digest."""
    file = DigestingFile(path)
    try:
        file.write(content)
        file.finish()
    except BaseException:
        file.abandon()
        raise
    return file


def digest_of_bytes(content: bytes) -> str:
    """The digest of ``content``, as ``DigestingFile.digest``."""
    return DIGEST_PREFIX + hashlib.sha256(content).hexdigest()


def fits(path: Path, digest: str) -> bool:
    """Whether the content of a file is the one whose digest was written."""
    with path.open("rb") as file:
        return DIGEST_PREFIX + hashlib.file_digest(file, "sha256").hexdigest() == digest


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is that of a file in the folder of a checkpoint, and of no other."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, in a folder with one per step."""
    return folder / f"step_{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint there, whole or not, in ascending order."""
    names = [each.name for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := _OF_STEP.fullmatch(name)))


def left_behind(folder: Path) -> list[tuple[Path, Path]]:
    """What killed programs have left there: the path of a step, and what is there instead."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    matches = [(each, _LEFT_BEHIND.fullmatch(each.name)) for each in found]
    return [(folder / match[1], each) for each, match in matches if match is not None]


def clean(folder: Path) -> None:
    """Remove what killed programs have left, but for what can take its name back."""
    for path, left in left_behind(folder):
        recover(path)
        shutil.rmtree(left, ignore_errors=True)


def unfinished_path(path: Path) -> Path:
    """Where the checkpoint ``path`` is written until it is complete."""
    return path.with_name(f".{path.name}.unfinished")


def _replaced_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def recover(path: Path) -> None:
    """Put an earlier checkpoint back if a save ended while it was being replaced."""
    replaced = _replaced_path(path)
    if replaced.is_dir() and not path.exists():
        with suppress(FileNotFoundError):  # another process was faster
            replaced.rename(path)


def begin(path: Path) -> Path:
    """Make the folder in which ``path`` is written; remove what a killed save left there.

    Raises ``CheckpointError`` if ``path`` is something else than a checkpoint.
    """
    recover(path)
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_free and not (path / METADATA).is_file() and not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: it exists and is not a checkpoint. Name another folder, or remove it."
        )
    unfinished = unfinished_path(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(_replaced_path(path), ignore_errors=True)
    new_parents = [parent for parent in path.parents if not parent.exists()]
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise unwritable(unfinished, error) from None
    for parent in new_parents:
        sync_folder(parent.parent)
    return unfinished


def complete(path: Path) -> None:
    """Give the unfinished folder its name, on disk when this returns."""
    unfinished, replaced = unfinished_path(path), _replaced_path(path)
    sync_folder(unfinished)
    if path.exists():
        path.rename(replaced)
    unfinished.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def give_up(path: Path) -> None:
    """Remove the unfinished folder of ``path``, so that a full disk has room again."""
    shutil.rmtree(unfinished_path(path), ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; at no time is it there in part."""
    path.rename(unfinished_path(path))
    give_up(path)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in ``folder``."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
