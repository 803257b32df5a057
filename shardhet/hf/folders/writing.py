"""Write safetensors files whose tensors arrive one unit after the other.

safetensors' own ``save_file`` needs all tensors of a file at once.  The format is a header with
every tensor's name, dtype, shape and position, followed by the bytes.  If names and shapes are
known in advance, each tensor can be written when it arrives.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from shardhet.records.layout import Span

# The format's own names, https://huggingface.co/docs/safetensors (version 0.8).
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
HEADER_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Place:
    """The file and position of a tensor."""

    file: str
    offset_bytes: int  # from the file's beginning


class StreamedFolder:
    """Writes the weight files of a folder, tensor by tensor."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], *, stem: str, max_shard_bytes: int
    ) -> None:
        """Lay out ``tensors`` (on the meta device) in files of at most ``max_shard_bytes``."""
        self.folder = folder
        groups = _grouped(tensors, max_shard_bytes)
        self.is_sharded = len(groups) > 1
        self._place_by_name: dict[str, Place] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._left = dict(tensors)
        self.total_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        for i, group in enumerate(groups):
            suffix = f"-{i + 1:05d}-of-{len(groups):05d}" if self.is_sharded else ""
            self._begin(f"{stem}{suffix}.safetensors", group)

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor, for the index."""
        return {name: place.file for name, place in self._place_by_name.items()}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor at its position."""
        place, listed = self._place_by_name[name], self._left.pop(name, None)
        if listed is None or (tensor.shape, tensor.dtype) != (listed.shape, listed.dtype):
            needed = "nothing" if listed is None else f"{listed.dtype} {tuple(listed.shape)}"
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} came but {needed} is still "
                "to be written. Save a model whose parameters keep their shapes and dtypes."
            )
        file = self._files[place.file]
        file.seek(place.offset_bytes)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        file.write(flat.numpy().data)

    def close(self) -> None:
        """Close the files; raises ``ValueError`` if a tensor was never written."""
        for file in self._files.values():
            file.close()
        if self._left:
            raise ValueError(f"{self.folder}: {sorted(self._left)[:8]} were never written.")

    def _begin(self, file_name: str, group: Mapping[str, Tensor]) -> None:
        spans: dict[str, Span] = {}
        start = 0
        for name, tensor in group.items():
            spans[name] = Span(start, start + tensor.numel() * tensor.element_size())
            start = spans[name].stop
        entries = {
            name: {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [spans[name].start, spans[name].stop],
            }
            for name, tensor in group.items()
        }
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        header += b" " * (-len(header) % HEADER_ALIGNMENT_BYTES)
        file = (self.folder / file_name).open("wb")
        file.write(struct.pack("<Q", len(header)) + header)
        data_start = 8 + len(header)
        file.truncate(data_start + start)
        self._files[file_name] = file
        for name, span in spans.items():
            self._place_by_name[name] = Place(file_name, data_start + span.start)


def _grouped(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors of each file, wide dtypes first so that every tensor is aligned."""
    groups: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if groups[-1] and used + nbytes > max_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = tensor
        used += nbytes
    return [
        dict(sorted(group.items(), key=lambda item: -item[1].element_size()))
        for group in groups
    ]
