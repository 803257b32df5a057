"""A Hugging Face language model in a folder: what it learns, and where its loss is computed.

The folder is what ``save_pretrained`` writes: config.json, and optionally weights and
tokenizer.json.  transformers is imported only when a model is requested.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.models.decoder import next_token_loss
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.counting import logits_of

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
NUM_EXAMPLES = 32


class Objective(Enum):
    """What a model learns from a window of text."""

    NEXT_TOKEN = "next token"
    MASKED = "masked tokens"
    SECOND_HALF = "second half"  # token by token, after the encoder has read the first


def check_torchvision() -> None:
    """Raise ``ImportError`` if a torchvision is there that torch cannot load.

    transformers imports it for many of its classes, and then says nothing of it (5.24).
    """
    try:
        import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"torchvision {version('torchvision')}: it does not fit torch {torch.__version__} "
            f"({error}) but transformers imports it. Install the one that belongs to this "
            "torch, or uninstall it."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters (Hu et al., 2021), which are the only trained parameters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of linear layers
    dropout: float = 0.0
    frozen_dtype: torch.dtype | None = None  # in which the rest is stored; None: as read


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedFolder:
    """A folder with a model; only config.json has been read."""

    path: Path
    config: Any  # transformers.PreTrainedConfig
    objective: Objective

    @classmethod
    def open(cls, name: str) -> "PretrainedFolder":
        """Open a folder, or a hub name that is in the local cache; does not use the network.

        Raises ``ValueError`` if there is no model, or if it cannot be trained on text, and
        what ``check_torchvision`` raises.
        """
        check_torchvision()
        from transformers import AutoConfig

        path = _find(name)
        try:
            config = AutoConfig.from_pretrained(path.absolute())  # which adapters' files name
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{path / CONFIG}: {reason} Give another folder.") from None
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"{path}: the model is quantized, so its weights are not rows of parameters. "
                "Give the folder of the model that it was made from."
            )
        return cls(path=path, config=config, objective=_objective_of(config, path))

    @property
    def vocab_size(self) -> int:
        """The number of rows of its embedding."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_seq_len(self) -> int | None:
        """The longest text that it takes, in tokens; None if the configuration does not say."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def tokenizer_path(self) -> Path | None:
        """The path of its own tokenizer, if the folder has one."""
        path = self.path / TOKENIZER
        return path if path.is_file() else None

    def chat(self, messages: list[Any]) -> str:
        """A conversation as the tokenizer's chat template writes it.

        Raises ``ValueError`` if it cannot.
        """
        try:
            return str(
                _whole_tokenizer(self.path).apply_chat_template(messages, tokenize=False)
            )
        except Exception as error:  # of the template, or because there is none
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"a conversation that {self.path} does not write as text: {reason}"
            ) from None

    @property
    def has_weights(self) -> bool:
        """Whether the folder contains weights."""
        return any(self.path.glob("*.safetensors"))

    def on_meta(self, *, dtype: torch.dtype, lora: Lora | None = None) -> nn.Module:
        """The model on the meta device, without memory or values."""
        with torch.device("meta"):
            return _adapted(self._from_config(dtype), lora)

    def in_memory(
        self, *, dtype: torch.dtype, weights: bool, seed: int, lora: Lora | None = None
    ) -> nn.Module:
        """The model with the folder's weights, or with random weights drawn from ``seed``.

        Every rank gets the whole model, with the same values.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self._from_folder(dtype) if weights else self._from_config(dtype)
            return _adapted(model, lora).train()

    def _from_config(self, dtype: torch.dtype) -> Any:
        return self._auto_class().from_config(self.config, dtype=dtype)

    def _from_folder(self, dtype: torch.dtype) -> Any:
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()  # every rank would draw one
        model, loading = self._auto_class().from_pretrained(
            self.path.absolute(), dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        if loading["missing_keys"]:
            raise ValueError(
                f"{self.path}: its safetensors lack {sorted(loading['missing_keys'])} of "
                f"{type(model).__name__}. Give the folder of a whole model, or set "
                "model.weights=false."
            )
        return model

    def _auto_class(self) -> Any:
        import transformers

        return {
            Objective.NEXT_TOKEN: transformers.AutoModelForCausalLM,
            Objective.MASKED: transformers.AutoModelForMaskedLM,
            Objective.SECOND_HALF: transformers.AutoModelForSeq2SeqLM,
        }[self.objective]


@cache
def _whole_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _find(name: str) -> Path:
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):
            raise ValueError(
                f"{name!r} is not a folder, and no model of that name is in the local cache. "
                "Give a folder with config.json, or download it with hf download."
            ) from None
    if not (path / CONFIG).is_file():
        if (path / "adapter_config.json").is_file():
            raise ValueError(
                f"{path}: it holds an adapter but no model. Give the folder of the model that "
                "it adapts."
            )
        raise ValueError(f"{path}: it has no {CONFIG}. Give a folder of save_pretrained.")
    return path


def _objective_of(config: Any, path: Path) -> Objective:
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    is_named_masked = any("ForMaskedLM" in name for name in config.architectures or ())
    if kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and config.is_encoder_decoder:
        return Objective.SECOND_HALF
    is_decoder = getattr(config, "is_decoder", False) and not is_named_masked
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING and not is_decoder:
        return Objective.MASKED
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return Objective.NEXT_TOKEN
    raise ValueError(
        f"{path / CONFIG}: model_type {config.model_type!r} is not a language model that "
        "learns from text alone. Give a causal or masked one, or an encoder with a decoder."
    )


def _adapted(model: Any, lora: Lora | None) -> nn.Module:
    if lora is None:
        plain: nn.Module = model
        return plain
    from peft import LoraConfig, get_peft_model

    linear = {
        fqn.rpartition(".")[2]
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    missing = sorted(set(lora.targets) - linear)
    if missing:
        raise ValueError(
            f"model.lora.targets: {missing} are not linear layers of {type(model).__name__}. "
            f"Choose among {', '.join(sorted(linear))}."
        )
    adapters = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
    )
    with warnings.catch_warnings():  # peft uses deprecated names of transformers
        warnings.simplefilter("ignore", FutureWarning)
        adapted: nn.Module = get_peft_model(model, adapters)
    for param in adapted.parameters() if lora.frozen_dtype else ():
        if not param.requires_grad and param.is_floating_point():
            param.data = param.data.to(lora.frozen_dtype)
    return adapted


def language_loss(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """``next_token_loss`` of logits, or of the output of a model that has them."""
    return next_token_loss(logits_of(output), targets)


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """How a Hugging Face model is called with tokens; its ``loss_fn`` is ``language_loss``."""

    objective: Objective

    def __call__(self, model: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """(loss_sum, num_tokens) of ``model``, a HetFSDP, for tokens and targets."""
        tokens, targets = tensors
        # In place of logits, unless the model changes them: then it is all that there is.
        return logits_of(model(**self.inputs(tokens), loss_inputs=(self.predicted(targets),)))

    def trained(
        self,
        module: nn.Module,
        *,
        vocab_size: int,
        seq_len: int,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> TrainedModel:
        """The model with random tokens, as ``measure`` takes it."""
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocab_size, (NUM_EXAMPLES, seq_len), generator=random)
        return TrainedModel(
            module=module,
            batch=ExampleBatch(
                kwargs=self.inputs(tokens), loss_inputs=(self.predicted(tokens),)
            ),
            loss_fn=language_loss,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            init_fn=fill_for_times,
            seed=seed,
        )

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """The arguments of the model."""
        if self.objective is not Objective.SECOND_HALF:
            return {"input_ids": tokens}
        half = tokens.shape[1] // 2
        return {"input_ids": tokens[:, :half], "decoder_input_ids": tokens[:, half:]}

    def predicted(self, targets: Tensor) -> Tensor:
        """The targets at the positions that the model predicts."""
        if self.objective is not Objective.SECOND_HALF:
            return targets
        return targets[:, targets.shape[1] // 2 :].contiguous()


@torch.no_grad()
def fill_for_times(module: nn.Module) -> None:
    """Fill the model with small positive values, which times hardly depend on."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_floating_point():
            tensor.uniform_(0.01, 0.03)
