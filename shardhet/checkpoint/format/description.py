"""The files that describe a checkpoint: metadata and manifest."""

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import Entry, Holding
from shardhet.checkpoint.format.manifest import FileFacts, Manifest, model_digest
from shardhet.checkpoint.format.metadata import BytesPlace, metadata_of
from shardhet.checkpoint.format.writing import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is known of a checkpoint before its ranks have written their files."""

    holdings: Sequence[Holding]  # by position
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
            versions={name: _version(name) for name in ("shardhet", "torch")},
            files=facts,
            extra=self.extra,
        )
        return {**texts, files.MANIFEST: manifest.to_json().encode("ascii")}


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
