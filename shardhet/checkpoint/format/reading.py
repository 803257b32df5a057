"""A checkpoint on disk: opened, verified, and read box by box."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import CheckpointError, damaged, reading
from shardhet.checkpoint.format.manifest import Manifest
from shardhet.checkpoint.format.metadata import BytesPlace, Stored, StoredTensor, read_metadata
from shardhet.records.layout import Span


class SavedCheckpoint:
    """The tensors and values in a folder, whoever wrote it and with however many ranks.

    Nothing in it is executed: ``.metadata`` is read by names that are allowed, and tensors
    and values with ``torch.load(weights_only=True)``.
    """

    def __init__(self, folder: Path, manifest: Manifest | None, stored: Stored) -> None:
        self.folder = folder
        self.manifest = manifest  # None: written by torch.distributed.checkpoint itself
        self.stored = stored
        # What lies elsewhere: a whole file, or the bytes of one place.
        self.content_by_place: dict[BytesPlace, memoryview] = {}

    @classmethod
    def described(cls, folder: Path, manifest: bytes, metadata: bytes) -> Self:
        """A checkpoint of which ``folder`` need not have the files; they are not looked at.

        Raises ``CheckpointError`` if what describes it is damaged.
        """
        found = Manifest.parse(manifest, folder / files.MANIFEST)
        facts = found.files.get(files.METADATA)
        if facts is None or files.digest_of_bytes(metadata) != facts.digest:
            what = f"its content does not fit its digest in {files.MANIFEST}"
            raise damaged(folder / files.METADATA, what)
        saved = cls(folder, found, read_metadata(metadata, folder))
        saved._check_places()
        return saved

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read what says what there is, and see that all files have their length.

        Raises ``CheckpointError`` naming the file that is missing, too short or damaged.
        """
        folder = Path(path).absolute()
        _check_is_there(folder)
        if (folder / files.MANIFEST).exists() or not (folder / files.METADATA).exists():
            described_by = (_read_bytes(folder / n) for n in (files.MANIFEST, files.METADATA))
            saved = cls.described(folder, *described_by)
            for name, facts in saved.manifest.files.items() if saved.manifest else ():
                _check_length(folder / name, facts.num_bytes)
            return saved
        saved = cls(folder, None, read_metadata(_read_bytes(folder / files.METADATA), folder))
        if saved.stored.is_written_here:
            raise damaged(folder / files.MANIFEST, "it is missing")
        saved._check_places()
        return saved

    def verify(self, share: int = 0, num_shares: int = 1) -> None:
        """Compare every ``num_shares``-th file with its digest, from number ``share`` on.

        Raises ``CheckpointError`` naming a file that is not what was written.  Files without
        a manifest cannot be verified.
        """
        if self.manifest is None:
            return
        names = sorted(self.manifest.files)
        for name in names[share::num_shares]:
            path = self.folder / name
            with reading(path):
                is_right = files.fits(path, self.manifest.files[name].digest)
            if not is_right:
                raise damaged(path, f"its content does not fit its digest in {files.MANIFEST}")

    @property
    def num_bytes(self) -> int:
        """Of all its files that hold tensors or values."""
        return sum((self.folder / name).stat().st_size for name in self.file_names)

    @property
    def file_names(self) -> list[str]:
        """The files that hold tensors or values."""
        return sorted({place.file for place in self._places()})

    def _places(self) -> Iterator[BytesPlace]:
        yield from self.stored.values.values()
        for tensor in self.stored.tensors.values():
            yield from (chunk.place for chunk in tensor.chunks)

    def _check_places(self) -> None:
        lengths: dict[str, int] = {}
        for place in self._places():
            path = self.folder / place.file
            if place.file not in lengths:
                lengths[place.file] = self._length_of(path)
            if place.bytes.stop > lengths[place.file]:
                what = f"{lengths[place.file]} bytes but tensors up to {place.bytes.stop}"
                raise damaged(path, what)

    def _length_of(self, path: Path) -> int:
        if self.manifest is not None:  # files that are here have been compared with it
            if path.name not in self.manifest.files:
                raise damaged(path, "not in the manifest")
            return self.manifest.files[path.name].num_bytes
        with reading(path):
            return path.stat().st_size


class Reader:
    """Open files of a checkpoint; reads boxes of its tensors."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        self._saved = saved
        self._files: dict[str, IO[bytes]] = {}

    @classmethod
    @contextmanager
    def of(cls, saved: SavedCheckpoint) -> Iterator["Reader"]:
        """A context with a reader, whose files are closed at the end."""
        reader = cls(saved)
        try:
            yield reader
        finally:
            for file in reader._files.values():
                file.close()

    def value(self, name: str) -> Any:
        """A plain value.  Raises ``CheckpointError`` if it is none."""
        place = self._saved.stored.values[name]
        return self._load(place, name)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in host memory."""
        stored = self._saved.stored.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        num_rows = stored.shape[0] if stored.shape else 1
        self.read_rows(name, Span(0, num_rows), whole if stored.shape else whole.view(1))
        return whole

    def read_rows(self, name: str, rows: Span, output: Tensor) -> None:
        """Copy rows of a tensor to ``output``, [rows.numel, ...], in its dtype and device.

        A scalar is one row.  Raises ``CheckpointError`` if what lies there is another tensor.
        """
        stored = self._saved.stored.tensors[name]
        for chunk in stored.chunks_with(rows):
            offsets, sizes = chunk.offsets or (0,), chunk.shape or (1,)
            own = chunk.rows
            part = rows.intersect(own)
            found = self._load(chunk.place, name)
            _check_tensor(
                found, stored, chunk.shape, self._saved.folder / chunk.place.file, name
            )
            found = found.reshape(sizes)[part.start - own.start : part.stop - own.start]
            inner = zip(offsets[1:], sizes[1:], strict=True)
            box = (
                slice(part.start - rows.start, part.stop - rows.start),
                *(slice(start, start + size) for start, size in inner),
            )
            output[box].copy_(found)

    def _load(self, place: BytesPlace, name: str) -> Any:
        path = self._saved.folder / place.file
        try:
            content: bytes | memoryview | None = self._saved.content_by_place.get(place)
            if content is None:
                if place.file not in self._files:
                    self._files[place.file] = path.open("rb")
                file = self._files[place.file]
                file.seek(place.bytes.start)
                content = file.read(place.bytes.numel)
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load fails in many ways on other bytes
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise damaged(path, f"{name} cannot be read ({reason})") from None


def _check_is_there(folder: Path) -> None:
    if folder.is_dir():
        _check_is_one(folder)
        return
    hint = "Name the folder of a checkpoint."
    if files.unfinished_path(folder).exists():
        hint = "It was never completed: the program ended while it was saved. Use another one."
    found = "it is not a folder" if folder.exists() else "it does not exist"
    raise CheckpointError(f"{folder}: {found}. {hint}")


def _check_is_one(folder: Path) -> None:
    if any((folder / name).exists() for name in (files.MANIFEST, files.METADATA)):
        return
    for each in (folder, folder / "checkpoints"):
        for step in files.steps_in(each)[-1:]:
            newest = files.step_path(each, step)
            raise CheckpointError(
                f"{folder}: it is not a checkpoint, but there is {newest}. Name that one."
            )


def _check_length(path: Path, num_bytes: int) -> None:
    with reading(path):
        found = path.stat().st_size
    if found != num_bytes:
        raise damaged(path, f"{found} bytes but {num_bytes} were written")


def _read_bytes(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


def _check_tensor(
    found: Any, stored: StoredTensor, shape: tuple[int, ...], path: Path, name: str
) -> None:
    is_right = (
        isinstance(found, Tensor)
        and found.layout == torch.strided
        and tuple(found.shape) == shape
        and found.dtype == stored.dtype
    )
    if not is_right:
        raise damaged(path, f"another entry is at the place of {name}")


def param_groups(saved: SavedCheckpoint, reader: Reader, prefix: str) -> list[dict[str, Any]]:
    """The groups of the optimizer: options, and names of parameters as "params".

    Understands both forms that torch writes: by group, and by parameter ("flattened").
    """
    names = [name for name in saved.stored.values if name.startswith(prefix)]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        owner, _, option = name.removeprefix(prefix).rpartition(".")
        found.setdefault(owner, {})[option] = reader.value(name)
    groups = []
    for owner, options in found.items():
        fqns = options.get("params", None if owner.isdecimal() else [owner])
        if not isinstance(fqns, list) or not all(isinstance(fqn, str) for fqn in fqns):
            raise CheckpointError(
                f"{saved.folder}: group {owner} of its optimizer has no names of parameters. "
                "Save with torch.distributed.checkpoint.state_dict.get_state_dict."
            )
        groups.append({**options, "params": fqns})
    return groups


def states_by_fqn(saved: SavedCheckpoint, prefix: str) -> Mapping[str, Mapping[str, str]]:
    """For every parameter and state of the optimizer the name of the entry."""
    found: dict[str, dict[str, str]] = {}
    for name in (*saved.stored.tensors, *saved.stored.values):
        if name.startswith(prefix):
            fqn, _, state = name.removeprefix(prefix).rpartition(".")
            found.setdefault(fqn, {})[state] = name
    return found
