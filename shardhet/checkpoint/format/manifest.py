"""manifest.json: what a checkpoint is, and the length and digest of each of its files.

The manifest ends with a digest of itself and has one spelling only, so that no byte of it can
change unnoticed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from shardhet.checkpoint.format.errors import CheckpointError, damaged, reading
from shardhet.checkpoint.format.files import MANIFEST, digest_of_bytes, is_plain_name
from shardhet.checkpoint.format.values import tensor_names

FORMAT = "shardhet checkpoint"
FORMAT_VERSION = 2  # 1 had other digests
MAX_COUNT = 2**63


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
            **{each.name: getattr(self, each.name) for each in fields(self)},
        }
        return _text({**document, "digest": digest_of_bytes(_text(document).encode())})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read manifest.json; raises ``CheckpointError`` if it is not what was written."""
        path = folder / MANIFEST
        with reading(path):
            return cls.parse(path.read_bytes(), path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Self:
        """As ``load``, of a file with this ``content``."""
        try:
            return cls._read(json.loads(content), content, path)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(path, f"it is damaged ({error})") from None

    @classmethod
    def _read(cls, document: Any, content: bytes, path: Path) -> Self:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise damaged(path, "it is not a manifest of a checkpoint")
        if document.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: version {document.get('version')!r} but this program reads version "
                f"{FORMAT_VERSION}. Read it with the version of shardhet that wrote it."
            )
        unsigned = {key: value for key, value in document.items() if key != "digest"}
        is_right = digest_of_bytes(_text(unsigned).encode()) == document.get("digest")
        if not is_right or _text(document).encode() != content:
            raise damaged(path, "its content does not fit its digest")
        _check_fields(document)
        values = {each.name: document[each.name] for each in fields(cls)}
        facts = {name: FileFacts(**each) for name, each in document["files"].items()}
        return cls(**{**values, "files": facts})


def _check_fields(document: Mapping[str, Any]) -> None:
    """Raise ``ValueError``, or what a missing field raises, unless it is what was written."""
    step, versions, facts = (document[name] for name in ("step", "versions", "files"))
    is_right_by_field = {
        "step": step is None or _is_count(step),
        "world_size": _is_count(document["world_size"], least=1),
        "model_digest": type(document["model_digest"]) is str,
        "optimizer": type(document["optimizer"]) in (str, type(None)),
        "versions": type(versions) is dict
        and all(type(each) in (str, type(None)) for each in versions.values()),
        "files": type(facts) is dict and all(map(is_plain_name, facts)),
    }
    for name, is_right in is_right_by_field.items():
        if not is_right:
            raise ValueError(f"{name} is {str(document[name])[:100]!r}")
    for name, each in facts.items():
        if not _is_count(each["num_bytes"]) or type(each["digest"]) is not str:
            raise ValueError(f"length and digest of {name!r} are {str(each)[:100]!r}")
    tensor_names(document["extra"])


def _is_count(found: Any, *, least: int = 0) -> bool:
    return type(found) is int and least <= found < MAX_COUNT


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, default=asdict) + "\n"


def model_digest(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """A hash of a model's names, shapes and dtypes, whatever the values and the plan are."""
    rows = [[name, list(shape), dtype] for name, (shape, dtype) in sorted(tensors.items())]
    return sha256(json.dumps(rows).encode()).hexdigest()[:16]
