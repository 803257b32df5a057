"""One rank's file: tensors and plain values, one ``torch.save`` after the other.

The file is laid out as ``torch.distributed.checkpoint`` does, which reads each item at its
place with ``torch.load``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    file: str
    facts: FileFacts
    place_by_name: Mapping[str, BytesPlace]  # of entries


def write_rank_file(
    folder: Path,
    entries: Sequence[Entry],
    content: Mapping[str, Any],
    *,
    position: int,
) -> Report | None:
    """Write this rank's chunks of ``entries``; None if it has none.

    ``content`` has this rank's rows of a tensor, or a plain value, by the entry's name.
    """
    name = f"__{position}_0.distcp"
    mine = [(e, c) for e in entries for c in e.chunks if c.position == position]
    if not mine:
        return None
    file = files.DigestingFile(folder / name)
    places: dict[str, BytesPlace] = {}
    try:
        for entry, chunk in mine:
            start = file.num_bytes
            value = content[entry.name]
            if entry.shape is not None:
                value = _packed(value, chunk.shape)
            torch.save(value, file)  # type: ignore[arg-type]  # it only writes
            places[entry.name] = BytesPlace(name, Span(start, file.num_bytes))
        file.finish()
    except Exception as error:
        file.abandon()
        raise file.failure or error from None
    facts = FileFacts(file.num_bytes, file.digest)
    return Report(file=name, facts=facts, place_by_name=places)


def _packed(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``rows`` in host memory of their own: torch.save writes all memory behind a tensor."""
    host = rows.detach().cpu().contiguous().reshape(shape)
    is_alone = host.untyped_storage().nbytes() == host.nbytes
    return host if is_alone else host.clone()
