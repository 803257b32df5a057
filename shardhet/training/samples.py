"""Samples for bidirectional models: text with masks, or with targets in its second half.

As with plain text, the global batch of a step is a pure function of (data, seed, step).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardhet.training.data import Batches, TokenBatch

MASK_TOKEN = 256  # not a byte
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


def second_half(batch: TokenBatch, *, step: int = 0) -> TokenBatch:
    """Keep only the targets in the second half of each sample, at any ``step``."""
    targets = batch.targets.copy()
    targets[:, : targets.shape[1] // 2] = -1
    return TokenBatch(tokens=batch.tokens, targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedBatches:
    """The batches of ``text``, each changed by ``change(batch, step=step)``."""

    text: Batches
    change: Callable[..., TokenBatch]

    @property
    def global_batch_size(self) -> int:
        return self.text.global_batch_size

    def __getitem__(self, step: int) -> TokenBatch:
        return self.change(self.text[step], step=step)
