"""The real model of this experiment: a byte-level GPT, and random tokens for it."""

import torch
import torch.distributed as dist
from systems import Batch
from torch import nn

from shardhet.models.decoder import Decoder, DecoderConfig

VOCAB_SIZE = 256


def decoder_config(*, width: int, num_layers: int, seq_len: int) -> DecoderConfig:
    """Heads of 64 channels and an MLP three times as wide."""
    return DecoderConfig(
        vocab_size=VOCAB_SIZE,
        width=width,
        num_layers=num_layers,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        hidden_width=3 * width,
        seq_len=seq_len,
    )


def make_decoder(config: DecoderConfig) -> Decoder:
    """The same weights on every rank and in every system."""
    torch.manual_seed(0)
    return Decoder(config)


def units_of(model: Decoder) -> list[nn.Module]:
    """In order of execution."""
    return [model.embedding, *model.blocks, model.head]


def random_batch(config: DecoderConfig, rank_batch_size: int) -> Batch:
    """Tokens and their successors, other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (rank_batch_size, config.seq_len + 1)
    tokens = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
