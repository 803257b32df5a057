"""``.metadata`` of ``torch.distributed.checkpoint``: which boxes of which tensors lie where.

The file is a pickle.  It is written with torch's own classes, so that torch reads it, and
read with an unpickler that knows these few names only and builds inert records for them: no
code of torch or of anybody else runs, whatever the file holds.
"""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardhet.checkpoint.format.entries import Entry
from shardhet.checkpoint.format.errors import damaged
from shardhet.checkpoint.format.files import METADATA, is_plain_name
from shardhet.records.layout import Span

WRITTEN_HERE = "shardhet"  # marks the files that a manifest belongs to

DTYPES: dict[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


@dataclass(frozen=True, slots=True)
class BytesPlace:
    """A range of bytes in a file of the folder; ``torch.load`` reads it."""

    file: str
    bytes: Span


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor and where it lies."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: BytesPlace

    @property
    def rows(self) -> Span:
        """Its rows of the tensor; a scalar is one row."""
        start, number = (self.offsets or (0,))[0], (self.shape or (1,))[0]
        return Span(start, start + number)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def chunks_with(self, rows: Span) -> Iterator[StoredChunk]:
        """The boxes that have elements in ``rows``."""
        for chunk in self.chunks:
            if 0 not in chunk.shape and rows.intersect(chunk.rows).numel:
                yield chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """All tensors and plain values by name."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, BytesPlace]
    is_written_here: bool  # by this package, and so with a manifest


def metadata_of(
    entries: Sequence[Entry], place_of: Mapping[tuple[str, int], BytesPlace]
) -> Metadata:
    """The metadata of ``entries``; ``place_of`` has names and positions of the writers."""
    described: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for entry in entries:
        for each in (entry, *entry.aliases):
            described[each.name] = _description(each)
            for chunk in each.chunks:
                offset = None if each.shape is None else torch.Size(chunk.offsets)
                place = place_of[entry.name, chunk.position]
                storage[MetadataIndex(each.name, offset)] = _StorageInfo(
                    place.file, place.bytes.start, place.bytes.numel
                )
    return Metadata(
        state_dict_metadata=described,
        planner_data={e.name: e.keys for entry in entries for e in (entry, *entry.aliases)},
        storage_data=storage,
        storage_meta=StorageMeta(save_id=WRITTEN_HERE),
        version=CURRENT_DCP_VERSION,
    )


def _description(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.shape is None or entry.dtype is None:
        return BytesStorageMetadata()
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
        for chunk in entry.chunks
    ]
    properties = TensorProperties(dtype=DTYPES[entry.dtype])
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


# Reading #


class _UnpickledStub:
    """Stands for an object of a class of torch: keeps what it was made of."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field; raises ``ValueError`` if there is none."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{type(self).__name__} without {name}")
        return self.state[name]


class _Tensor(_UnpickledStub): ...


class _Bytes(_UnpickledStub): ...


class _Size(tuple[int, ...]): ...


_RECORDS = "torch.distributed.checkpoint.metadata"
_STUBS = ("Metadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties")
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(_RECORDS, each): _UnpickledStub for each in (*_STUBS, "StorageMeta")},
    (_RECORDS, "TensorStorageMetadata"): _Tensor,
    (_RECORDS, "BytesStorageMetadata"): _Bytes,
    (_RECORDS, "_MEM_FORMAT_ENCODING"): _UnpickledStub,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _UnpickledStub,
    ("torch.serialization", "_get_layout"): _UnpickledStub,
    ("torch", "Size"): _Size,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    **{("torch", name.removeprefix("torch.")): dtype for name, dtype in DTYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Knows the names above, and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which metadata of a checkpoint never does"
            )
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def read_metadata(content: bytes, folder: Path) -> Stored:
    """What ``.metadata`` with this ``content`` says, checked for sense.

    Raises ``CheckpointError`` naming the file if it is damaged or of another kind.
    """
    try:
        return _stored(_Unpickler(io.BytesIO(content)).load())
    except Exception as error:  # an unpickler fails in any way on bytes that are no pickle
        what = f"it is damaged, or no checkpoint of torch ({error})"
        raise damaged(folder / METADATA, what) from None


def _stored(found: Any) -> Stored:
    _check(isinstance(found, _UnpickledStub), "no metadata in it")
    described, storage = found.get("state_dict_metadata"), found.get("storage_data")
    _check(isinstance(described, dict) and isinstance(storage, dict), "no tables in it")
    place_of: dict[tuple[str, tuple[int, ...] | None], BytesPlace] = {}
    for index, info in storage.items():
        # A field that keeps its default may be absent.
        offset = index.state.get("offset") if isinstance(index.state, dict) else None
        place_of[index.get("fqn"), None if offset is None else _ints(offset)] = _place(info)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, BytesPlace] = {}
    for name, each in described.items():
        _check(isinstance(name, str), f"the name {name!r}")
        if isinstance(each, _Bytes):
            values[name] = place_of[name, None]
        else:
            _check(isinstance(each, _Tensor), f"{name} of an unknown kind")
            tensors[name] = _stored_tensor(name, each, place_of)
    meta = found.state.get("storage_meta")
    facts = (
        meta.state if isinstance(meta, _UnpickledStub) and isinstance(meta.state, dict) else {}
    )
    is_written_here = facts.get("save_id") == WRITTEN_HERE
    return Stored(tensors=tensors, values=values, is_written_here=is_written_here)


def _stored_tensor(
    name: str,
    found: _UnpickledStub,
    place_of: Mapping[tuple[str, tuple[int, ...] | None], BytesPlace],
) -> StoredTensor:
    properties, shape = found.get("properties"), _ints(found.get("size"))
    dtype = properties.state[0] if isinstance(properties, _UnpickledStub) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} without a dtype")
    chunks = []
    for chunk in found.get("chunks"):
        offsets, sizes = _ints(chunk.get("offsets")), _ints(chunk.get("sizes"))
        is_inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= length
            for offset, size, length in zip(offsets, sizes, shape, strict=True)
        )
        _check(is_inside, f"{name}: a box at {offsets} of {sizes} outside of {shape}")
        chunks.append(StoredChunk(offsets, sizes, place_of[name, offsets]))
    covered = sum(prod(chunk.shape) for chunk in chunks)
    _check(covered == prod(shape), f"{name}: {covered} elements of {prod(shape)}")
    _check(not _overlap(chunks), f"{name}: boxes that overlap")
    return StoredTensor(shape, dtype, tuple(chunks))


def _overlap(chunks: Sequence[StoredChunk]) -> bool:
    """Whether any two boxes do; boxes of rows are only compared with their neighbours."""
    boxes = sorted(
        [
            Span(o, o + n)
            for o, n in zip(chunk.offsets or (0,), chunk.shape or (1,), strict=True)
        ]
        for chunk in chunks
        if 0 not in chunk.shape
    )
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if other[0].start >= box[0].stop:
                break
            if all(a.intersect(b).numel for a, b in zip(box, other, strict=True)):
                return True
    return False


def _place(info: _UnpickledStub) -> BytesPlace:
    if info.state.get("transform_descriptors"):
        raise ValueError("compressed tensors, which are not supported; save without extensions")
    file, (start, length) = (
        info.get("relative_path"),
        _ints((info.get("offset"), info.get("length"))),
    )
    _check(isinstance(file, str) and is_plain_name(file), f"the file name {file!r}")
    return BytesPlace(file, Span(start, start + length))


def _ints(found: Any) -> tuple[int, ...]:
    _check(isinstance(found, tuple), f"{found!r} instead of numbers")
    _check(all(type(each) is int and each >= 0 for each in found), f"the numbers {found!r}")
    return tuple(found)


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)
