"""Shapes of models that take no time, for tests that need one and do not mind which."""

from dataclasses import replace
from typing import Any

from shardhet.models.decoder import DecoderConfig

# The same for every kind of transformers' models.
TRANSFORMERS_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
}
_DECODER = DecoderConfig(
    vocab_size=256,
    width=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    hidden_width=24,
    seq_len=8,
)


def small_decoder(**changes: Any) -> DecoderConfig:
    """Two grouped layers over bytes."""
    return replace(_DECODER, **changes)
