"""Masked text is the same under every plan, and hides what it should."""

from functools import partial

import numpy as np
import pytest

from shardhet.training.data import Corpus, GlobalBatches
from shardhet.training.samples import MASK_TOKEN, ChangedBatches, masked


def text_batches() -> GlobalBatches:
    text = (np.arange(5000) % 200).astype(np.uint8)
    corpus = Corpus(train=text, held_out=text)
    return GlobalBatches(corpus=corpus, seq_len=100, global_batch_size=6)


def masked_batches(*, fraction: float, seed: int) -> ChangedBatches:
    change = partial(masked, fraction=fraction, seed=seed)
    return ChangedBatches(text=text_batches(), change=change)


def test_only_hidden_tokens_are_to_be_predicted() -> None:
    plain = text_batches()[0]
    batch = masked(plain, fraction=0.15, seed=0, step=0)
    is_hidden = batch.tokens == MASK_TOKEN
    np.testing.assert_array_equal(batch.targets[is_hidden], plain.tokens[is_hidden])
    np.testing.assert_array_equal(batch.tokens[~is_hidden], plain.tokens[~is_hidden])
    assert (batch.targets[~is_hidden] == -1).all()
    assert batch.num_targets == is_hidden.sum()
    assert is_hidden.mean() == pytest.approx(0.15, abs=0.03)


def test_masks_depend_on_seed_and_step_alone() -> None:
    batches = [masked_batches(fraction=0.15, seed=seed) for seed in (0, 0, 1)]
    drawn = [batches[0][3], batches[1][3], batches[2][3], batches[0][4]]
    hidden = [(batch.tokens == MASK_TOKEN).tobytes() for batch in drawn]
    assert hidden[0] == hidden[1]
    assert len(set(hidden)) == 3
