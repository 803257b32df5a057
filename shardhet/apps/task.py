"""Task: a model with the samples it learns from and those it is judged by."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardhet.config.checks import ConfigError
from shardhet.config.models import DecoderConf, PySourceConf, TextConf, TextDirConf
from shardhet.config.train import Precision, TrainConf
from shardhet.data import (
    VOCAB_SIZE,
    Batch,
    Batches,
    Corpus,
    GlobalBatches,
    PySource,
    TextDir,
    held_out_windows,
    table_scores,
)
from shardhet.models.decoder import Decoder
from shardhet.trainer import Evaluation

DTYPE_BY_PRECISION = {
    Precision.FP64: torch.float64,
    Precision.FP32: torch.float32,
    Precision.BF16: torch.float32,  # as stored; in flight it is bfloat16
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained on what."""

    module: nn.Module  # on the meta device
    batches: Batches
    judged: Batch
    score_name: str  # of what ``score`` returns
    baselines: Mapping[str, float]  # the same score by simpler means
    corpus_digest: str

    def score(self, evaluation: Evaluation) -> float:
        """The number that tells how good the model is."""
        if evaluation.accuracy is not None:
            return evaluation.accuracy
        return evaluation.bits_per_target


def make_task(conf: TrainConf, *, global_batch_size: int, cache_dir: Path) -> Task:
    """The task that the configuration describes; the same on every rank."""
    data, model = conf.data, conf.model
    if not isinstance(data, TextConf) or not isinstance(model, DecoderConf):
        raise ConfigError(
            f"model: {conf.model.kind.value} cannot learn from data={conf.data.kind.value}. "
            "Choose another model or other data."
        )
    corpus = load_corpus(data, cache_dir)
    judged = held_out_windows(corpus, seq_len=data.seq_len, num_samples=data.num_judged_samples)
    scores = table_scores(corpus.train, judged)
    with torch.device("meta"):
        module = Decoder(model.to_record(vocab_size=VOCAB_SIZE, seq_len=data.seq_len))
    return Task(
        module=module.to(DTYPE_BY_PRECISION[conf.precision]),
        batches=GlobalBatches(
            corpus=corpus,
            seq_len=data.seq_len,
            global_batch_size=global_batch_size,
            seed=conf.seed,
        ),
        judged=judged,
        score_name="bits per byte",
        baselines={
            "unigram table": scores.unigram_bits_per_byte,
            "bigram table": scores.bigram_bits_per_byte,
        },
        corpus_digest=corpus.digest,
    )


def load_corpus(data: TextConf, cache_dir: Path) -> Corpus:
    """The text; large ones are mapped from token files in ``cache_dir``."""
    if isinstance(data, TextDirConf):
        return TextDir(root=Path(data.path), pattern=data.pattern).load(cache_dir)
    assert isinstance(data, PySourceConf)
    return PySource().load()
