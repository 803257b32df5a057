"""Schemas of ``model=...``, a decoder or a Hugging Face model in a folder, and ``data=...``.

torch is imported only when a record is created, so that help stays fast.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from shardhet.config.checks import (
    Checked,
    ConfigError,
    above,
    at_least,
    checked,
    config_errors,
    fields_of,
    is_below_one,
)
from shardhet.records.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardhet.models.decoder import DecoderConfig
    from shardhet.models.pretrained import Lora, PretrainedFolder
    from shardhet.profiler.batch import TrainedModel
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
    def described(self) -> Callable[..., Workload]:
        """``to_workload``, once for all clusters: counting a real model takes seconds."""
        return cache(self.to_workload)

    def to_workload(
        self, *, param_dtype: str, vocab_size: int | None = None, seq_len: int | None = None
    ) -> Workload:
        """The model as counts and bytes; ConfigError if its shape is impossible.

        Samples are of the model's usual shape where nothing else is given.
        """
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

    def to_workload(
        self, *, param_dtype: str, vocab_size: int | None = None, seq_len: int | None = None
    ) -> Workload:
        """The workload of ``shardhet.models.decoder.Decoder``."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads: {self.num_kv_heads} but it must divide num_heads "
                f"{self.num_heads}. Use one of its divisors."
            )
        with config_errors("model"):
            return Workload.transformer(
                **fields_of(self, Workload.transformer),
                vocab_size=vocab_size or self.usual_vocab_size,
                seq_len=seq_len or self.usual_seq_len,
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
    num_eval_samples: int = checked(1000, at_least(1))

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


TOKENIZER_FILES = ("*token*.json", "vocab*", "merges.txt", "*.model", "chat_template*")


@dataclass(kw_only=True)
class LoraConf(Checked, prefix="model.lora."):
    """Low-rank adapters; if there are any, nothing else is trained."""

    rank: int = checked(0, at_least(0))  # 0: no adapters, the whole model is trained
    alpha: float = checked(16.0, above(0))
    targets: list[str] = field(default_factory=list)  # names of linear layers: [q_proj,v_proj]
    dropout: float = checked(0.0, is_below_one)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.rank) != bool(self.targets):
            raise ConfigError(
                f"model.lora: rank {self.rank} and targets {list(self.targets)}, but each "
                "needs the other. Set model.lora.rank=8 "
                "model.lora.targets=[q_proj,v_proj], or neither."
            )


@dataclass(kw_only=True)
class HfConf(ModelConf):
    """A Hugging Face language model."""

    kind: ModelKind = ModelKind.HF
    path: str = MISSING  # a folder with config.json, or a name in the local cache
    weights: bool = True  # those in the folder; false: random ones, by the model's own rules
    lora: LoraConf = field(default_factory=LoraConf)
    usual_seq_len: int = checked(512, at_least(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"transformers": True, "peft": self.lora.rank > 0}
        for package in (each for each, is_needed in needed.items() if is_needed):
            if find_spec(package) is None:
                raise ConfigError(
                    f"model: hf but the package {package} is not installed. Run "
                    "pip install 'shardhet[hf]', or choose another model."
                )

    def folder(self) -> "PretrainedFolder":
        """The folder at ``path``; ConfigError if it does not hold a language model."""
        from shardhet.models.pretrained import PretrainedFolder

        with config_errors("model.path"):
            return PretrainedFolder.open(self.path)

    def adapters(self, param_dtype: "torch.dtype | None" = None) -> "Lora | None":
        """The LoRA adapters, if any are configured.

        What is frozen is stored in ``param_dtype``, in which it is computed with: the values
        are the same, in half of the memory.
        """
        from shardhet.models.pretrained import Lora

        lora = self.lora
        if not lora.rank:
            return None
        given = fields_of(lora, Lora) | {"targets": tuple(lora.targets)}
        return Lora(**given, frozen_dtype=param_dtype)

    def title(self, choice: str) -> str:
        """The folder's own name."""
        return Path(self.path).resolve().name or choice

    def name_of(self, module: "nn.Module") -> str:
        """A short description of the model that is trained."""
        if not self.lora.rank:
            return type(module).__name__
        adapted: Any = module
        trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
        return f"{type(adapted.get_base_model()).__name__} (LoRA: {trained:,} trained)"

    def to_workload(
        self, *, param_dtype: str, vocab_size: int | None = None, seq_len: int | None = None
    ) -> Workload:
        """The model's workload, counted on tensors without memory."""
        import torch

        from shardhet.profiler.describe import describe_spec
        from shardhet.profiler.model_spec import trace_model

        folder = self.folder()
        seq_len = seq_len or min(self.usual_seq_len, folder.max_seq_len or 2**62)
        self._check_seq_len(folder, seq_len, key="seq_len")
        if vocab_size not in (None, folder.vocab_size):
            raise ConfigError(
                f"vocab_size: {vocab_size} but {folder.path}/config.json says "
                f"{folder.vocab_size}. Leave vocab_size out."
            )
        with config_errors("model"):
            dtype: torch.dtype = getattr(torch, param_dtype)
            model = self.trained(dtype=torch.float32, param_dtype=dtype, seq_len=seq_len)
            return describe_spec(trace_model(model), model)

    def trained(
        self,
        *,
        dtype: "torch.dtype",
        param_dtype: "torch.dtype | None",
        seq_len: int,
        seed: int = 0,
    ) -> "TrainedModel":
        """The model on the meta device, stored in ``dtype``, and how it is trained."""
        from shardhet.models.pretrained import LanguageModel

        folder = self.folder()
        return LanguageModel(folder.objective).trained(
            folder.on_meta(dtype=dtype, lora=self.adapters(param_dtype)),
            vocab_size=folder.vocab_size,
            seq_len=seq_len,
            param_dtype=param_dtype,
            reduce_dtype=dtype,
            seed=seed,
        )

    def check_fits(self, data: DataConf) -> None:
        """Raise ConfigError unless the model can read such samples."""
        folder = self.folder()
        self._check_seq_len(folder, data.seq_len, key="data.seq_len")
        if not self.reads_with_own_tokenizer(data):
            self._check_plain_tokens(folder)
        if self.lora.rank:
            import torch

            with config_errors():
                folder.on_meta(dtype=torch.float32, lora=self.adapters())

    def check_is_trained(self) -> None:
        """Raise ConfigError unless text trains it, and there are weights to start from."""
        from shardhet.models.pretrained import Objective

        folder = self.folder()
        if folder.objective is not Objective.NEXT_TOKEN:
            raise ConfigError(
                f"model.path: the model in {folder.path} is not causal, so it does not learn "
                "from text token by token. Train it with shardhet.hf.HetTrainer and the data "
                "collator of its task."
            )
        if self.lora.rank and not self.weights:
            raise ConfigError(
                "model.lora: adapters of random weights have nothing to adapt. Set "
                "model.weights=true, or leave model.lora out."
            )
        if self.weights and not folder.has_weights:
            raise ConfigError(
                f"model.weights: true but {folder.path} has no safetensors. Set "
                "model.weights=false to begin with random ones."
            )

    def reads_with_own_tokenizer(self, data: DataConf) -> bool:
        """Whether text is split by the model's own tokenizer."""
        is_auto = data.tokenizer is TokenizerKind.AUTO
        return is_auto and self.folder().tokenizer_path is not None

    def copy_tokenizer(self, data: DataConf, to: Path) -> None:
        """Copy the files of the tokenizer that the model has learned with, if it is its own."""
        if self.reads_with_own_tokenizer(data):
            for pattern in TOKENIZER_FILES:
                for each in self.folder().path.glob(pattern):
                    shutil.copy(each, to)

    @staticmethod
    def _check_plain_tokens(folder: "PretrainedFolder") -> None:
        if folder.vocab_size < NUM_BYTES:
            raise ConfigError(
                f"data.tokenizer: {NUM_BYTES} kinds of tokens but the vocab_size in "
                f"{folder.path}/config.json is {folder.vocab_size}. Choose one with a "
                "larger vocabulary, or with a tokenizer.json."
            )

    @staticmethod
    def _check_seq_len(folder: "PretrainedFolder", seq_len: int, *, key: str) -> None:
        from shardhet.models.pretrained import Objective

        least = 2 if folder.objective is Objective.SECOND_HALF else 1
        most = folder.max_seq_len
        if seq_len < least or (most is not None and seq_len > most):
            raise ConfigError(
                f"{key}: {seq_len} tokens but the model in {folder.path} takes {least} to "
                f"{most or 'any number'}. Change {key}."
            )
