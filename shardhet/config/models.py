"""Schemas of ``model=...`` and ``data=...``.

torch is imported only when a record is created, so that help stays fast.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from shardhet.config.checks import (
    Checked,
    ConfigError,
    at_least,
    checked,
    config_errors,
    fields_of,
    is_below_one,
)
from shardhet.records.workload import Workload

if TYPE_CHECKING:
    from shardhet.models.decoder import DecoderConfig
    from shardhet.training.data import Chat, Corpus

NUM_BYTES = 256


class ModelKind(Enum):
    """Which class of model the fields describe; follows from ``model=...``."""

    DECODER = "decoder"
    HF = "hf"
    IMPORTED = "imported"


class DataKind(Enum):
    """Where samples come from; follows from ``data=...``."""

    PYSOURCE = "pysource"
    TEXT_DIR = "text_dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """The shape of samples that a plan counts with; None means the model's usual value."""

    vocab_size: int | None = None
    seq_len: int | None = None


@dataclass(kw_only=True)
class ModelConf(Checked, prefix="model."):
    """The fields of every model.

    ``usual_...`` describe the samples that a plan counts with; in training the data does.
    """

    kind: ModelKind = MISSING

    def title(self, choice: str) -> str:
        """The name in reports of the model chosen by ``model=choice``."""
        return choice

    @cached_property
    def _described(self) -> dict[tuple[SampleShape, str], Workload]:
        return {}

    def described(self, samples: SampleShape, *, param_dtype: str) -> Workload:
        """``to_workload``, once for all clusters: counting a real model takes seconds."""
        key = samples, param_dtype
        if key not in self._described:
            self._described[key] = self.to_workload(samples, param_dtype=param_dtype)
        return self._described[key]

    def to_workload(self, samples: SampleShape, *, param_dtype: str) -> Workload:
        """The model as counts and bytes; ConfigError if its shape is impossible."""
        raise NotImplementedError


@dataclass(kw_only=True)
class DecoderConf(ModelConf):
    """A decoder-only language model: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    kind: ModelKind = ModelKind.DECODER
    width: int = checked(MISSING, at_least(1))
    num_layers: int = checked(MISSING, at_least(1))
    num_heads: int = checked(MISSING, at_least(1))
    # If equal to num_heads, every query head has its own.
    num_kv_heads: int = checked(MISSING, at_least(1))
    hidden_width: int = checked(MISSING, at_least(1))  # of the MLP
    dropout: float = checked(0.0, is_below_one)
    usual_vocab_size: int = checked(256, at_least(1))
    usual_seq_len: int = checked(64, at_least(1))

    def to_workload(self, samples: SampleShape, *, param_dtype: str) -> Workload:
        """The workload of ``shardhet.models.decoder.Decoder``."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads: {self.num_kv_heads} but it must divide num_heads "
                f"{self.num_heads}. Use one of its divisors."
            )
        with config_errors("model"):
            return Workload.transformer(
                **fields_of(self, Workload.transformer),
                vocab_size=samples.vocab_size or self.usual_vocab_size,
                seq_len=samples.seq_len or self.usual_seq_len,
                fuses_norms=True,  # on GPUs, which described clusters are of
                param_dtype=param_dtype,
            )

    def to_record(self, *, vocab_size: int, seq_len: int) -> "DecoderConfig":
        """The shape of the decoder."""
        from shardhet.models.decoder import DecoderConfig

        try:
            return DecoderConfig(
                **fields_of(self, DecoderConfig), vocab_size=vocab_size, seq_len=seq_len
            )
        except ValueError as error:
            raise ConfigError(f"model.{error}") from None


class TokenizerKind(Enum):
    """What a token is."""

    AUTO = "auto"  # the one in the model's folder if it has one, else bytes
    BYTES = "bytes"


@dataclass(kw_only=True)
class DataConf(Checked, prefix="data."):
    """Text as tokens, cut into windows: the fields of every kind of data."""

    kind: DataKind = MISSING
    tokenizer: TokenizerKind = TokenizerKind.AUTO
    cache_dir: str | None = None  # where tokens are kept; None: the run folder
    seq_len: int = checked(64, at_least(1))  # tokens
    # Windows of held-out text in an evaluation.
    num_judged_samples: int = checked(1000, at_least(1))

    def load(self, token_dir: Path, chat: "Chat | None" = None) -> "Corpus":
        """The text as bytes; large texts are mapped from files in ``token_dir``.

        ``chat`` writes the messages of a conversation as text.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class PySourceConf(DataConf):
    """The Python standard library's own sources."""

    kind: DataKind = DataKind.PYSOURCE

    def load(self, token_dir: Path, chat: "Chat | None" = None) -> "Corpus":
        """Read at every start: 9 MB."""
        from shardhet.training.data import TextDir

        return TextDir.of_standard_library().read()


@dataclass(kw_only=True)
class TextDirConf(DataConf):
    """A file, or all files below a folder whose names match a pattern: text, or JSON lines."""

    kind: DataKind = DataKind.TEXT_DIR
    path: str = MISSING
    pattern: str = "*.txt"
    # Text for evaluations, which is not trained on: another file or folder; a share of each
    # file, its last part; or none.  null: one file in 20, by a hash of its path, and the last
    # 0.05 of each where there are fewer.
    held_out: str | None = None
    field: str = "text"  # of JSON lines (*.jsonl); those without it are conversations

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.path).exists():
            raise ConfigError(
                f"data.path: {self.path!r} does not exist. Pass the file or folder of your "
                "texts."
            )
        share = self._held_out_share
        is_path = self.held_out is not None and share is None
        if not 0 <= (share or 0) < 1 or (is_path and not Path(str(self.held_out)).exists()):
            raise ConfigError(
                f"data.held_out: {self.held_out!r} is neither a file or folder nor a share "
                "below 1. Set data.held_out=0.05, a path, or none."
            )
        if Path(self.path).is_dir() and not any(Path(self.path).rglob(self.pattern)):
            raise ConfigError(
                f"data.pattern: no file below {self.path!r} fits {self.pattern!r}. Give "
                "another, such as '*.md'."
            )

    @property
    def _held_out_share(self) -> float | None:
        try:
            return 0.0 if self.held_out == "none" else float(str(self.held_out))
        except ValueError:
            return None

    def load(self, token_dir: Path, chat: "Chat | None" = None) -> "Corpus":
        """The files, joined in ``token_dir`` by the first rank of each host."""
        from shardhet.training.data import TextDir

        share = self._held_out_share
        return TextDir(
            root=Path(self.path),
            pattern=self.pattern,
            held_out=Path(self.held_out) if self.held_out and share is None else None,
            held_out_share=share,
            field=self.field,
            chat=chat,
        ).load(token_dir)
