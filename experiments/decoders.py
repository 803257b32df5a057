"""The model that experiments train, a GPT of any size, and random tokens for it."""

import torch
from torch import Tensor, nn

from shardhet.models.decoder import Decoder, DecoderConfig

Batch = tuple[Tensor, Tensor]  # tokens and their successors, [B, T]
CPU = torch.device("cpu")


def decoder_config(
    *,
    width: int,
    num_layers: int,
    seq_len: int,
    vocab_size: int = 256,
    head_width: int = 64,
    mlp_ratio: float = 3.0,
) -> DecoderConfig:
    """A GPT with ``width / head_width`` heads and an MLP ``mlp_ratio`` times as wide."""
    num_heads = width // head_width
    return DecoderConfig(
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        hidden_width=int(mlp_ratio * width),
        seq_len=seq_len,
    )


def make_decoder(config: DecoderConfig, device: torch.device = CPU) -> Decoder:
    """The same weights on every rank and in every system, made where they are needed."""
    torch.manual_seed(0)
    with device:
        return Decoder(config)


def units_of(model: Decoder) -> list[nn.Module]:
    """In order of execution."""
    return [model.embedding, *model.blocks, model.head]


def random_batches(
    config: DecoderConfig, num_samples: int, *, seed: int, num_batches: int = 1
) -> list[Batch]:
    """Batches of ``num_samples`` each, on the CPU; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_batches, num_samples, config.seq_len + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


def num_params(config: DecoderConfig) -> int:
    """Elements in all parameters of ``Decoder(config)``."""
    width = config.width
    attention = width * (2 * width + 2 * config.kv_width)
    mlp = 3 * width * config.hidden_width
    block = attention + mlp + 2 * width
    return 2 * config.vocab_size * width + config.num_layers * block + width
