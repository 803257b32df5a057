"""What models are trained for: their batches, with padding, and their losses in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

NUM_WORDS = 61
NUM_CLASSES = 5
IMAGE_SIDE = 32
NUM_CHANNELS = 3
IGNORED = -100
PAD = 0
FIRST_WORD = 4  # below are padding and the like

Batch = dict[str, Tensor]  # by argument of the model's forward; "labels" is one of them


def _words(generator: Generator, num_samples: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask that pads every sample but the first at its end."""
    size = (num_samples, seq_len)
    tokens = torch.randint(FIRST_WORD, NUM_WORDS, size, generator=generator)
    least = max(2, seq_len // 2)
    lengths = torch.randint(least, seq_len + 1, (num_samples, 1), generator=generator)
    lengths[:1] = seq_len
    mask = torch.arange(seq_len)[None] < lengths
    return tokens.where(mask, PAD), mask.long()


def _next_words(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    tokens, mask = _words(generator, num_samples, seq_len)
    labels = tokens.where(mask.bool(), IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _masked_words(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    tokens, mask = _words(generator, num_samples, seq_len)
    is_hidden = (torch.rand(tokens.shape, generator=generator) < 0.4) & mask.bool()
    is_hidden[:, 0] = True
    return {
        "input_ids": tokens.where(~is_hidden, 3),
        "attention_mask": mask,
        "labels": tokens.where(is_hidden, IGNORED),
    }


def _sentences(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    tokens, mask = _words(generator, num_samples, seq_len)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _translations(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    tokens, mask = _words(generator, num_samples, seq_len)
    words, words_mask = _words(generator, num_samples, max(2, seq_len - 4))
    labels = words.where(words_mask.bool(), IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _images(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    """Squares with sides of ``seq_len`` pixels."""
    shape = (num_samples, NUM_CHANNELS, seq_len, seq_len)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": labels}


def _timm_images(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    batch = _images(generator, num_samples, seq_len)
    return {"x": batch["pixel_values"], "labels": batch["labels"]}


def _pairs(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    tokens, mask = _words(generator, num_samples, seq_len)
    pixels = _images(generator, num_samples, IMAGE_SIDE)["pixel_values"]
    labels = torch.arange(num_samples)
    return {
        "input_ids": tokens, "pixel_values": pixels, "attention_mask": mask, "labels": labels
    }  # fmt: skip


def _speech(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    """Waves; ``seq_len`` is in hundreds of samples of sound."""
    shape = (num_samples, 100 * seq_len)
    waves = torch.randn(shape, generator=generator, dtype=torch.float64)
    lengths = torch.randint(60 * seq_len, 100 * seq_len, (num_samples, 1), generator=generator)
    lengths[:1] = 100 * seq_len
    mask = torch.arange(100 * seq_len)[None] < lengths
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return {"input_values": waves * mask, "attention_mask": mask.long(), "labels": labels}


def _dictation(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    batch = _speech(generator, num_samples, seq_len)
    batch["labels"] = torch.randint(1, NUM_CLASSES, (num_samples, 3), generator=generator)
    return batch


def _spectra(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    shape = (num_samples, 8, 2 * seq_len)
    features = torch.randn(shape, generator=generator, dtype=torch.float64)
    words, mask = _words(generator, num_samples, 7)
    return {"input_features": features, "labels": words.where(mask.bool(), IGNORED)}


def _sequences_first(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    shape = (seq_len, num_samples, 12)
    vectors = torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(NUM_CLASSES, (seq_len, num_samples), generator=generator)
    return {"input": vectors, "labels": labels}


def _two_sequences_first(generator: Generator, num_samples: int, seq_len: int) -> Batch:
    sources = torch.randn((seq_len, num_samples, 12), generator=generator, dtype=torch.float64)
    targets = torch.randn(
        (seq_len - 2, num_samples, 12), generator=generator, dtype=torch.float64
    )
    labels = torch.randint(12, (seq_len - 2, num_samples), generator=generator)
    return {"src": sources, "tgt": targets, "labels": labels}


def _num_labels(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def _num_shifted(labels: Tensor) -> int:
    return _num_labels(labels[:, 1:])


def _each_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    flat = logits.double().reshape(-1, logits.shape[-1])
    loss = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")
    return loss, _num_labels(labels)


def _shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return _each_label(logits[:, :-1], labels[:, 1:])


def _alignment(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    if not len(logits):
        return logits.double().sum(), 0  # ctc_loss takes no empty batch
    log_probs = logits.double().log_softmax(-1).transpose(0, 1)
    frames = torch.full((logits.shape[0],), logits.shape[1])
    lengths = torch.full((labels.shape[0],), labels.shape[1])
    loss = F.ctc_loss(log_probs, labels, frames, lengths, reduction="sum")
    return loss, len(labels)


def _of_pairs(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """A sum over samples: each image with its own text."""
    texts, images = logits.double().unbind(1)
    return -(texts * images).sum(), len(logits)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a family is trained for, as its documentation has it."""

    make_batch: Callable[[torch.Generator, int, int], Batch]  # samples, sequence length
    loss: Callable[[Tensor, Tensor], tuple[Tensor, int]] = (
        _each_label  # of logits and labels, in float64
    )
    num_valid: Callable[[Tensor], int] = (
        _num_labels  # labels that a mean of the model's own loss is over
    )
    has_mask: bool = False  # whether it takes an attention_mask
    has_length: bool = True  # whether its sequences may be longer or shorter
    takes_num_items: bool = False  # num_items_in_batch= makes its own loss a sum


# A class label for each sample is valid, whatever it is: ``num_valid=len``.
NEXT_WORD = Task(
    make_batch=_next_words,
    loss=_shifted,
    num_valid=_num_shifted,
    has_mask=True,
    takes_num_items=True,
)
MASKED_WORD = Task(make_batch=_masked_words, has_mask=True)
SENTENCE = Task(make_batch=_sentences, num_valid=len, has_mask=True)
TRANSLATION = Task(make_batch=_translations, has_mask=True)
IMAGE = Task(make_batch=_images, num_valid=len, has_length=False)
TIMM_IMAGE = Task(make_batch=_timm_images, num_valid=len, has_length=False)
PAIR = Task(make_batch=_pairs, loss=_of_pairs, num_valid=len, has_mask=True, has_length=False)
SPEECH = Task(make_batch=_speech, num_valid=len, has_mask=True, has_length=False)
DICTATION = Task(
    make_batch=_dictation, loss=_alignment, num_valid=len, has_mask=True, has_length=False
)
SPECTRUM = Task(make_batch=_spectra, has_length=False)
SEQUENCE_FIRST = Task(make_batch=_sequences_first)
SEQUENCES_FIRST = Task(make_batch=_two_sequences_first)
