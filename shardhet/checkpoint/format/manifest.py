"""manifest.json: what a checkpoint is, and the length and digest of each of its files.

The manifest ends with a digest of itself and has one spelling only, so that no byte of it can
change unnoticed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from shardhet.checkpoint.format.errors import CheckpointError, damaged
from shardhet.checkpoint.format.files import MANIFEST, bytes_fit, digest_of_bytes

FORMAT = "shardhet checkpoint"
FORMAT_VERSION = 2  # 1 had other digests
_TYPES = {"world_size": int, "model_digest": str, "versions": dict, "files": dict}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Length and digest of one file."""

    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint besides its tensors."""

    step: int | None  # optimizer steps finished; None for a plain module
    world_size: int  # ranks that wrote it
    model_digest: str  # of names, shapes and dtypes
    optimizer: str | None  # its class
    versions: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    extra: Any = None  # as ``values.encode`` returns it

    def to_json(self) -> str:
        """The text of manifest.json."""
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "model_digest": self.model_digest,
            "optimizer": self.optimizer,
            "versions": dict(self.versions),
            "files": {
                name: {"num_bytes": facts.num_bytes, "digest": facts.digest}
                for name, facts in self.files.items()
            },
            "extra": self.extra,
        }
        return _text({**document, "digest": digest_of_bytes(_text(document).encode())})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read manifest.json; raises ``CheckpointError`` if it is not what was written."""
        path = folder / MANIFEST
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise damaged(path, "it is missing") from None
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Self:
        """As ``load``, of a file with this ``content``."""
        try:
            return cls.from_json(content, path)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(path, f"it is damaged ({error})") from None

    @classmethod
    def from_json(cls, content: bytes, path: Path) -> Self:
        """The inverse of ``to_json``; ``path`` is named in errors."""
        document = json.loads(content)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise damaged(path, "it is no manifest of a checkpoint")
        if document.get("version") not in (1, FORMAT_VERSION):
            raise CheckpointError(
                f"{path}: version {document.get('version')!r} but this program reads versions "
                f"up to {FORMAT_VERSION}. Read it with the version of shardhet that wrote it."
            )
        unsigned = {key: value for key, value in document.items() if key != "digest"}
        is_right = bytes_fit(_text(unsigned).encode(), str(document.get("digest")))
        if not is_right or _text(document).encode() != content:
            raise damaged(path, "its content does not fit its digest")
        for key, kind in _TYPES.items():
            if type(document[key]) is not kind:
                raise ValueError(f"{key} is {document[key]!r} but must be {kind.__name__}")
        return cls(
            step=document["step"],
            world_size=document["world_size"],
            model_digest=document["model_digest"],
            optimizer=document["optimizer"],
            versions=document["versions"],
            files={
                name: FileFacts(int(facts["num_bytes"]), str(facts["digest"]))
                for name, facts in document["files"].items()
            },
            extra=document["extra"],
        )


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def model_digest(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """A hash of a model's names, shapes and dtypes, whatever the values and the plan are."""
    rows = [[name, list(shape), dtype] for name, (shape, dtype) in sorted(tensors.items())]
    return sha256(json.dumps(rows).encode()).hexdigest()[:16]
