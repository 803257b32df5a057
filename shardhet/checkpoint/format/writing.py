"""One rank's file: tensors and plain values, one ``torch.save`` after the other.

The file is laid out as ``torch.distributed.checkpoint`` does, which reads each item at its
place with ``torch.load``.
"""

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import Entry, RankContents
from shardhet.checkpoint.format.manifest import FileFacts, Manifest, model_digest
from shardhet.checkpoint.format.metadata import BytesPlace, metadata_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is known of a checkpoint before its ranks have written their files."""

    holdings: Sequence[RankContents]  # by position
    entries: Sequence[Entry]
    writer: int  # the position that writes what is whole everywhere
    extra: Any  # as JSON, on the writer
    plan_json: str | None

    def texts(self, reports: Sequence[Report | None]) -> dict[str, bytes]:
        """Their contents by name, given what every rank has written, by position."""
        places: dict[tuple[str, int], BytesPlace] = {}
        facts: dict[str, FileFacts] = {}
        for position, report in enumerate(reports):
            if report is not None:
                facts[report.file] = report.facts
                for name, place in report.place_by_name.items():
                    places[name, position] = place
        texts = {files.METADATA: pickle.dumps(metadata_of(self.entries, places))}
        if self.plan_json is not None:
            texts[files.PLAN] = self.plan_json.encode("ascii")
        for name, text in texts.items():
            facts[name] = FileFacts(len(text), files.digest_of_bytes(text))
        mine = self.holdings[self.writer]
        tensors = {
            fqn: (part.global_shape, part.dtype) for part in mine.parts for fqn in part.fqns
        }
        manifest = Manifest(
            step=mine.step,
            world_size=len(self.holdings),
            model_digest=model_digest(tensors),
            optimizer=mine.optimizer,
            versions={"shardhet": version_of("shardhet"), "torch": str(torch.__version__)},
            files=facts,
            extra=self.extra,
        )
        return {**texts, files.MANIFEST: manifest.to_json().encode("ascii")}


def version_of(package: str) -> str | None:
    """The version that is installed; None if none is."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
