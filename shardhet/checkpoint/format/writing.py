"""One rank's file: tensors and plain values, one ``torch.save`` after the other.

The file is laid out as ``torch.distributed.checkpoint`` does, which reads each item at its
place with ``torch.load``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from shardhet.checkpoint.format.entries import Entry
from shardhet.checkpoint.format.errors import in_words
from shardhet.checkpoint.format.files import DigestingFile
from shardhet.checkpoint.format.manifest import FileFacts
from shardhet.checkpoint.format.metadata import BytesPlace
from shardhet.records.layout import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank has written, or why it could not."""

    rank: int
    file: str | None = None  # None: it has nothing to write
    facts: FileFacts | None = None
    bytes_by_name: Mapping[str, Span] | None = None
    failure: str | None = None

    def to_json(self) -> str:
        """As text, for a store."""
        facts = self.facts and [self.facts.num_bytes, self.facts.digest]
        spans = {name: [s.start, s.stop] for name, s in (self.bytes_by_name or {}).items()}
        return json.dumps([self.rank, self.file, facts, spans, self.failure])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of ``to_json``."""
        rank, file, facts, spans, failure = json.loads(text)
        return cls(
            rank=rank,
            file=file,
            facts=FileFacts(*facts) if facts else None,
            bytes_by_name={name: Span(*span) for name, span in spans.items()},
            failure=failure,
        )

    def places(self, position: int) -> dict[tuple[str, int], BytesPlace]:
        """Where each entry that the rank at ``position`` wrote lies."""
        spans = (self.bytes_by_name or {}).items()
        return {(name, position): BytesPlace(self.file or "", span) for name, span in spans}


def write_rank_file(
    folder: Path,
    entries: Sequence[Entry],
    content: Mapping[str, Any],
    *,
    rank: int,
    position: int,
) -> Report:
    """Write this rank's chunks of ``entries``; never raises, but reports a failure.

    ``content`` has this rank's rows of a tensor, or a plain value, by the entry's name.
    """
    name = f"__{position}_0.distcp"
    mine = [(e, c) for e in entries for c in e.chunks if c.position == position]
    if not mine:
        return Report(rank=rank)
    file: DigestingFile | None = None
    spans: dict[str, Span] = {}
    try:
        file = DigestingFile(folder / name)
        for entry, chunk in mine:
            start = file.num_bytes
            value = content[entry.name]
            if entry.shape is not None:
                value = _packed(value, chunk.shape)
            torch.save(value, file)  # type: ignore[arg-type]  # it only writes
            spans[entry.name] = Span(start, file.num_bytes)
        file.finish()
    except Exception as error:
        if file is not None:
            file.abandon()
        cause = (file.failure if file is not None else None) or error
        return Report(rank=rank, failure=in_words(cause))
    facts = FileFacts(file.num_bytes, file.digest)
    return Report(rank=rank, file=name, facts=facts, bytes_by_name=spans)


def _packed(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``rows`` in host memory of their own: torch.save writes all memory behind a tensor."""
    host = rows.detach().cpu().contiguous().reshape(shape)
    is_alone = host.untyped_storage().nbytes() == host.nbytes
    return host if is_alone else host.clone()
