"""Task: a model with the samples it learns from and those it is judged by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from shardhet.config.models import (
    DecoderConf,
    MaskedLmConf,
    PySourceConf,
    TextConf,
    TextDirConf,
    VitConf,
)
from shardhet.config.train import Precision, TrainConf
from shardhet.data import (
    VOCAB_SIZE,
    Batch,
    Batches,
    Corpus,
    GlobalBatches,
    PySource,
    TextDir,
    TokenBatch,
    held_out_windows,
    table_scores,
)
from shardhet.models.decoder import Decoder
from shardhet.models.encoder import MaskedLm, Vit
from shardhet.samples import (
    DIGIT_SIDE,
    MASK_TOKEN,
    NOT_A_STEP,
    NUM_DIGIT_CLASSES,
    DigitBatches,
    Digits,
    MaskedBatches,
    masked,
)
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
    data_digest: str  # equal on two machines exactly if their samples are
    score_name: str  # of what ``score`` returns
    target_name: str = "tokens"  # what throughput counts
    baselines: Mapping[str, float] = field(default_factory=dict)  # by simpler means

    def score(self, evaluation: Evaluation) -> float:
        """The number that tells how good the model is."""
        if evaluation.accuracy is not None:
            return evaluation.accuracy
        return evaluation.bits_per_target


def make_task(conf: TrainConf, *, global_batch_size: int, cache_dir: Path) -> Task:
    """The task that the configuration describes; the same on every rank."""
    if isinstance(conf.model, VitConf):
        return _digits_task(conf, conf.model, global_batch_size)
    assert isinstance(conf.data, TextConf)
    corpus = load_corpus(conf.data, cache_dir)
    if isinstance(conf.model, MaskedLmConf):
        return _masked_task(conf, conf.model, _text(conf, corpus, global_batch_size))
    assert isinstance(conf.model, DecoderConf)
    batches, judged = _text(conf, corpus, global_batch_size)
    scores = table_scores(corpus.train, judged)
    with torch.device("meta"):
        shape = conf.model.to_record(vocab_size=VOCAB_SIZE, seq_len=conf.data.seq_len)
        module = Decoder(shape).to(DTYPE_BY_PRECISION[conf.precision])
    return Task(
        module=module,
        batches=batches,
        judged=judged,
        data_digest=corpus.digest,
        score_name="bits per byte",
        baselines={
            "unigram table": scores.unigram_bits_per_byte,
            "bigram table": scores.bigram_bits_per_byte,
        },
    )


def _masked_task(
    conf: TrainConf, model: MaskedLmConf, text: tuple[GlobalBatches, TokenBatch]
) -> Task:
    batches, judged = text
    fraction = model.mask_fraction
    with torch.device("meta"):
        module = MaskedLm(
            model.to_record(), vocab_size=MASK_TOKEN + 1, seq_len=batches.seq_len
        ).to(DTYPE_BY_PRECISION[conf.precision])
    return Task(
        module=module,
        batches=MaskedBatches(text=batches, fraction=fraction, seed=conf.seed),
        judged=masked(judged, fraction=fraction, seed=0, step=NOT_A_STEP),
        data_digest=batches.corpus.digest,
        score_name="bits per masked byte",
    )


def _digits_task(conf: TrainConf, model: VitConf, global_batch_size: int) -> Task:
    digits = Digits.load()
    with torch.device("meta"):
        module = Vit(
            model.to_record(),
            image_side=DIGIT_SIDE,
            patch_side=model.patch_side,
            num_classes=NUM_DIGIT_CLASSES,
        ).to(DTYPE_BY_PRECISION[conf.precision])
    return Task(
        module=module,
        batches=DigitBatches(
            digits=digits, global_batch_size=global_batch_size, seed=conf.seed
        ),
        judged=digits.held_out,
        data_digest=digits.digest,
        score_name="accuracy",
        target_name="images",
    )


def _text(
    conf: TrainConf, corpus: Corpus, global_batch_size: int
) -> tuple[GlobalBatches, TokenBatch]:
    """What is trained on, and what is judged."""
    data = conf.data
    assert isinstance(data, TextConf)
    batches = GlobalBatches(
        corpus=corpus,
        seq_len=data.seq_len,
        global_batch_size=global_batch_size,
        seed=conf.seed,
    )
    judged = held_out_windows(corpus, seq_len=data.seq_len, num_samples=data.num_judged_samples)
    return batches, judged


def load_corpus(data: TextConf, cache_dir: Path) -> Corpus:
    """The text; large ones are mapped from token files in ``cache_dir``."""
    if isinstance(data, TextDirConf):
        return TextDir(root=Path(data.path), pattern=data.pattern).load(cache_dir)
    assert isinstance(data, PySourceConf)
    return PySource().load()
