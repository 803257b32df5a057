"""Schemas of ``model=...`` and ``data=...``.

torch is imported where a record is made, so that help and completion stay quick.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from shardhet.config.checks import ConfigError, check_at_least, check_below_one

if TYPE_CHECKING:
    from shardhet.models.decoder import DecoderConfig


class ModelKind(Enum):
    """Which class of model the fields describe; follows from ``model=...``."""

    DECODER = "decoder"


class DataKind(Enum):
    """Where samples come from; follows from ``data=...``."""

    PYSOURCE = "pysource"
    TEXT_DIR = "text_dir"


@dataclass(kw_only=True)
class ModelConf:
    """What every model has."""

    kind: ModelKind = MISSING


@dataclass(kw_only=True)
class DecoderConf(ModelConf):
    """A decoder-only language model: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    kind: ModelKind = ModelKind.DECODER
    width: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING  # equal to num_heads: every query head has its own
    hidden_width: int = MISSING  # of the MLP
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for key in ("width", "num_layers", "num_heads", "num_kv_heads", "hidden_width"):
            check_at_least(f"model.{key}", getattr(self, key), 1)
        check_below_one("model.dropout", self.dropout)

    def to_record(self, *, vocab_size: int, seq_len: int) -> "DecoderConfig":
        """The shape of the decoder."""
        from shardhet.models.decoder import DecoderConfig

        try:
            return DecoderConfig(
                vocab_size=vocab_size,
                width=self.width,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                hidden_width=self.hidden_width,
                seq_len=seq_len,
                dropout=self.dropout,
            )
        except ValueError as error:
            raise ConfigError(f"model.{error}") from None


@dataclass(kw_only=True)
class DataConf:
    """What every kind of data has."""

    kind: DataKind = MISSING


@dataclass(kw_only=True)
class TextConf(DataConf):
    """Text as bytes, cut into windows."""

    seq_len: int = 64
    num_judged_samples: int = 1000  # windows of held-out text in an evaluation

    def __post_init__(self) -> None:
        check_at_least("data.seq_len", self.seq_len, 1)
        check_at_least("data.num_judged_samples", self.num_judged_samples, 1)


@dataclass(kw_only=True)
class PySourceConf(TextConf):
    """The Python standard library's own sources."""

    kind: DataKind = DataKind.PYSOURCE


@dataclass(kw_only=True)
class TextDirConf(TextConf):
    """All files below a folder whose names fit a pattern."""

    kind: DataKind = DataKind.TEXT_DIR
    path: str = MISSING
    pattern: str = "*.txt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.path).is_dir():
            raise ConfigError(
                f"data.path: {self.path!r} is no folder. Give the folder with your text files."
            )
        if not any(Path(self.path).rglob(self.pattern)):
            raise ConfigError(
                f"data.pattern: no file below {self.path!r} fits {self.pattern!r}. Give "
                "another, such as '*.md'."
            )
