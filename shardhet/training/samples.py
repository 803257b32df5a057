"""Samples for bidirectional models: masked text, and small images with labels.

As with plain text, the global batch of a step is a pure function of (data, seed, step).
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardhet.records.layout import Span
from shardhet.training.data import Batches, TokenBatch

MASK_TOKEN = 256  # not a byte
NUM_DIGIT_CLASSES = 10
DIGIT_SIDE = 8  # pixels
HELD_OUT_EVERY = 5  # one image in five is held out from training
STEPLESS_SEED = 2**63  # seeds the generator for masks that belong to no step


def masked(
    batch: TokenBatch, *, fraction: float, seed: int, step: int, mask_token: int = MASK_TOKEN
) -> TokenBatch:
    """Mask each token with probability ``fraction``; only masked tokens are predicted."""
    words = np.random.Philox(key=[seed + 1, step]).random_raw(batch.tokens.size)
    is_hidden = (words / 2.0**64 < fraction).reshape(batch.tokens.shape)
    return TokenBatch(
        tokens=np.where(is_hidden, mask_token, batch.tokens),
        targets=np.where(is_hidden, batch.tokens, -1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedBatches:
    """The batches of ``text``, each changed in a way of its own."""

    text: Batches

    @property
    def global_batch_size(self) -> int:
        return self.text.global_batch_size

    def __getitem__(self, step: int) -> TokenBatch:
        batch = self.text[step]
        assert isinstance(batch, TokenBatch)
        return self._changed(batch, step)

    def _changed(self, batch: TokenBatch, step: int) -> TokenBatch:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedBatches(ChangedBatches):
    """The batches of ``text``, each with its own random mask."""

    fraction: float
    seed: int = 0
    mask_token: int = MASK_TOKEN

    def _changed(self, batch: TokenBatch, step: int) -> TokenBatch:
        return masked(
            batch,
            fraction=self.fraction,
            seed=self.seed,
            step=step,
            mask_token=self.mask_token,
        )


def second_half(batch: TokenBatch) -> TokenBatch:
    """Keep only the targets in the second half of each sample."""
    targets = batch.targets.copy()
    targets[:, : targets.shape[1] // 2] = -1
    return TokenBatch(tokens=batch.tokens, targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondHalfBatches(ChangedBatches):
    """The batches of ``text``, with targets only in the second half of each sample."""

    def _changed(self, batch: TokenBatch, step: int) -> TokenBatch:
        return second_half(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch:
    """Images in global order, with their class labels."""

    images: npt.NDArray[np.float32]  # [samples, side, side], between 0 and 1
    labels: npt.NDArray[np.int64]  # [samples]

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.images, self.labels

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    @property
    def num_targets(self) -> int:
        return len(self.labels)

    def samples(self, span: Span) -> "ImageBatch":
        """Only the samples in ``span``; views, no copy."""
        part = slice(span.start, span.stop)
        return ImageBatch(images=self.images[part], labels=self.labels[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """The handwritten digits that come with scikit-learn, without a download."""

    train: ImageBatch
    held_out: ImageBatch

    @property
    def digest(self) -> str:
        """A hash that is equal on two machines exactly if their images and labels are."""
        digest = hashlib.sha256()
        for array in (*self.train.arrays, *self.held_out.arrays):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    @classmethod
    def load(cls) -> "Digits":
        """Load all 1797 digits; every fifth is held out."""
        from sklearn.datasets import load_digits

        found = load_digits()
        images = (found.images / found.images.max()).astype(np.float32)
        labels = found.target.astype(np.int64)
        is_held_out = np.arange(len(labels)) % HELD_OUT_EVERY == 0
        return cls(
            train=ImageBatch(images=images[~is_held_out], labels=labels[~is_held_out]),
            held_out=ImageBatch(images=images[is_held_out], labels=labels[is_held_out]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitBatches:
    """``batches[step]``: training images drawn with replacement for (seed, step)."""

    digits: Digits
    global_batch_size: int
    seed: int = 0

    def __getitem__(self, step: int) -> ImageBatch:
        words = np.random.Philox(key=[self.seed, step]).random_raw(self.global_batch_size)
        train = self.digits.train
        chosen = (words % np.uint64(train.num_samples)).astype(np.int64)
        return ImageBatch(images=train.images[chosen], labels=train.labels[chosen])
