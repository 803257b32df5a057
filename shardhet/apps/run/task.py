"""Task: a model with its training samples and its held-out samples."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardhet.config.models import (
    NUM_BYTES,
    DataConf,
    DecoderConf,
    HfConf,
    ModelConf,
)
from shardhet.config.train import Precision, TrainConf
from shardhet.models.decoder import Decoder
from shardhet.models.pretrained import LanguageModel, language_loss
from shardhet.profiler.batch import LossFn
from shardhet.training.data import (
    DIGEST_LENGTH_IN_NAMES,
    Corpus,
    GlobalBatches,
    ModelTokenizer,
    TokenBatch,
    held_out_windows,
    mapped,
)
from shardhet.training.trainer import Run, run_plainly

BYTES = "bytes"  # in place of a tokenizer's digest where each byte is a token
DTYPE_BY_PRECISION = {
    Precision.FP64: torch.float64,
    Precision.FP32: torch.float32,
    Precision.BF16: torch.float32,  # as stored; gathered as bfloat16
    Precision.FP16: torch.float32,
}
PARAM_DTYPE_BY_PRECISION = {  # where parameters are gathered in another format than stored
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its data, and how it is scored."""

    module: nn.Module  # on the meta device
    batches: GlobalBatches
    held_out: TokenBatch | None  # None: nothing is held out
    data_digest: str  # equal on two machines exactly if their samples are
    score_name: str  # of the bits for each target
    model_name: str | None = None  # None: the name of its kind in the configuration
    loss_fn: LossFn | None = None  # of HetFSDP
    run: Run = run_plainly  # of the trainer


def make_task(conf: TrainConf, *, global_batch_size: int, token_dir: Path) -> Task:
    """The task that the configuration describes; the same on every rank."""
    text = _text(conf, token_dir)
    if isinstance(conf.model, HfConf):
        return _hf_task(conf, conf.model, text, global_batch_size, token_dir)
    batches, held_out = _batches(conf, text, global_batch_size)
    return Task(
        module=make_module(conf.model, conf.data, conf.precision),
        batches=batches,
        held_out=held_out,
        data_digest=f"{text.digest} {BYTES}",
        score_name="bits per byte",
    )


def make_files(conf: TrainConf, *, token_dir: Path) -> None:
    """Write the files that all ranks of a host read, unless they exist."""
    own = own_tokenizer(conf.model, conf.data) if isinstance(conf.model, HfConf) else None
    _as_tokens(conf.data, _text(conf, token_dir), token_dir, own)


def _text(conf: TrainConf, token_dir: Path) -> Corpus:
    chat = conf.model.folder().chat if isinstance(conf.model, HfConf) else None
    return conf.data.load(token_dir, chat)


def make_module(model: ModelConf, data: DataConf, precision: Precision) -> nn.Module:
    """The model that learns from such data, on the meta device."""
    assert isinstance(model, DecoderConf)
    with torch.device("meta"):
        module = Decoder(model.to_record(vocab_size=NUM_BYTES, seq_len=data.seq_len))
        return module.to(DTYPE_BY_PRECISION[precision])


def _hf_task(
    conf: TrainConf, model: HfConf, text: Corpus, global_batch_size: int, token_dir: Path
) -> Task:
    """The folder's model on text, tokenized by its own tokenizer or as bytes."""
    folder = model.folder()
    own = own_tokenizer(model, conf.data)
    corpus = _as_tokens(conf.data, text, token_dir, own)
    batches, held_out = _batches(conf, corpus, global_batch_size)
    module = folder.in_memory(
        dtype=DTYPE_BY_PRECISION[conf.precision],
        weights=model.weights,
        seed=conf.seed,
        lora=model.adapters(PARAM_DTYPE_BY_PRECISION.get(conf.precision)),
    )
    return Task(
        module=module,
        batches=batches,
        held_out=held_out,
        data_digest=f"{corpus.digest} {BYTES if own is None else own.digest}",
        score_name="bits per byte" if own is None else "bits per token",
        model_name=model.name_of(module),
        loss_fn=language_loss,
        run=LanguageModel(folder.objective),
    )


def own_tokenizer(model: HfConf, data: DataConf) -> ModelTokenizer | None:
    """The tokenizer in the model's folder, if text is to be split by it."""
    if not model.reads_with_own_tokenizer(data):
        return None
    folder = model.folder()
    assert folder.tokenizer_path is not None
    state = folder.tokenizer_path.read_text(encoding="utf-8")
    end = ModelTokenizer(state).token("<|endoftext|>", "</s>", "<eos>", "[SEP]")
    if isinstance(folder.config.eos_token_id, int):
        end = folder.config.eos_token_id
    tokenizer = ModelTokenizer(state, end)
    if tokenizer.num_token_kinds > folder.vocab_size:
        raise ValueError(
            f"{folder.tokenizer_path}: {tokenizer.num_token_kinds} kinds of tokens but the "
            f"model has {folder.vocab_size}. Set data.tokenizer=BYTES, or fix the folder."
        )
    return tokenizer


def _batches(
    conf: TrainConf, corpus: Corpus, global_batch_size: int
) -> tuple[GlobalBatches, TokenBatch | None]:
    """The training batches, and the held-out samples for evaluations, if there are any."""
    data = conf.data
    batches = GlobalBatches(
        corpus=corpus,
        seq_len=data.seq_len,
        global_batch_size=global_batch_size,
        seed=conf.seed,
    )
    if not corpus.held_out.size:
        return batches, None
    held_out = held_out_windows(corpus, seq_len=data.seq_len, num_samples=data.num_eval_samples)
    return batches, held_out


def _as_tokens(
    data: DataConf, text: Corpus, token_dir: Path, own: ModelTokenizer | None
) -> Corpus:
    if own is None:
        return text
    folder = token_dir if data.cache_dir is None else Path(data.cache_dir)
    digests = [each.digest[:DIGEST_LENGTH_IN_NAMES] for each in (own, text)]
    return mapped(folder / "_".join(("own", *digests)), partial(own.tokens_of, text))
