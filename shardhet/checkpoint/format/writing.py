"""One rank's file: tensors and plain values, one ``torch.save`` after the other.

The file is laid out as ``torch.distributed.checkpoint`` does, which reads each item at its
place with ``torch.load``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import Entry
from shardhet.checkpoint.format.manifest import FileFacts
from shardhet.checkpoint.format.metadata import BytesPlace
from shardhet.records.layout import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank has written."""

    file: str | None = None  # None: it has nothing to write
    facts: FileFacts | None = None
    bytes_by_name: Mapping[str, Span] = field(default_factory=dict)

    def places(self, position: int) -> dict[tuple[str, int], BytesPlace]:
        """Where each entry that the rank at ``position`` wrote lies."""
        spans = self.bytes_by_name.items()
        return {(name, position): BytesPlace(self.file or "", span) for name, span in spans}


def write_rank_file(
    folder: Path,
    entries: Sequence[Entry],
    content: Mapping[str, Any],
    *,
    position: int,
) -> Report:
    """Write this rank's chunks of ``entries``.

    ``content`` has this rank's rows of a tensor, or a plain value, by the entry's name.
    """
    name = f"__{position}_0.distcp"
    mine = [(e, c) for e in entries for c in e.chunks if c.position == position]
    if not mine:
        return Report()
    file = files.DigestingFile(folder / name)
    spans: dict[str, Span] = {}
    try:
        for entry, chunk in mine:
            start = file.num_bytes
            value = content[entry.name]
            if entry.shape is not None:
                value = _packed(value, chunk.shape)
            torch.save(value, file)  # type: ignore[arg-type]  # it only writes
            spans[entry.name] = Span(start, file.num_bytes)
        file.finish()
    except Exception as error:
        file.abandon()
        raise file.failure or error from None
    facts = FileFacts(file.num_bytes, file.digest)
    return Report(file=name, facts=facts, bytes_by_name=spans)


def _packed(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``rows`` in host memory of their own: torch.save writes all memory behind a tensor."""
    host = rows.detach().cpu().contiguous().reshape(shape)
    is_alone = host.untyped_storage().nbytes() == host.nbytes
    return host if is_alone else host.clone()
