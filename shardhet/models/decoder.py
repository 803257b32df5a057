"""A small decoder-only language model whose parts are natural FSDP units.

    tokens -> embedding -> blocks.0 -> ... -> blocks.L-1 -> head -> (loss_sum, num_tokens)

The head contains the last norm, the projection to the vocabulary and the loss, so that a run
in microbatches never holds the logits of more than one.  There are no biases, no buffers
and no dropout inside the attention.  Every module with parameters of its own has
``reset_parameters``, so each unit can be built on the meta device and initialized by itself.

Shape suffixes: B batch, T tokens, D width, F hidden width, V vocabulary,
H query heads, K key and value heads, C channels of one head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDING_INIT_STD = 0.3  # a first run on bytes learned fastest with these two values
HEAD_INIT_GAIN = 0.5
ROTARY_BASE = 10_000.0  # RoFormer's
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_width: int
    seq_len: int  # the longest sample
    dropout: float = 0.0  # on what attention and MLP add to the residual stream

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads) != 0:
            raise ValueError(
                f"width: {self.width} but rotary positions need an even number of channels "
                f"in each of {self.num_heads} heads. Make it a multiple of "
                f"{2 * self.num_heads}."
            )
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} but it must divide num_heads "
                f"{self.num_heads}. Use one of its divisors."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_width(self) -> int:
        return self.head_width * self.num_kv_heads


class Projection(nn.Linear):
    """x W^T without bias; W is normal with deviation ``init_gain`` / sqrt(in_width)."""

    def __init__(self, in_width: int, out_width: int, *, init_gain: float = 1.0) -> None:
        self.init_std = init_gain / in_width**0.5
        super().__init__(in_width, out_width, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)


class Embedding(nn.Embedding):
    """The token embedding, with one row of length ``width`` per token."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=EMBEDDING_INIT_STD)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, config: DecoderConfig, *, out_init_gain: float) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_width = config.head_width
        self.qkv = Projection(config.width, config.width + 2 * config.kv_width)
        self.out = Projection(config.width, config.width, init_gain=out_init_gain)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads_BTHC = self.qkv(x_BTD).unflatten(-1, (-1, self.head_width))
        # Queries and keys are rotated by the same angles, so they are rotated together.
        qk_BTHC, v_BTKC = heads_BTHC.split([num_heads + num_kv_heads, num_kv_heads], dim=2)
        q_BHTC, k_BKTC = (
            rotate_by_position(qk_BTHC, positions_BT)
            .transpose(1, 2)
            .split([num_heads, num_kv_heads], dim=1)
        )
        mixed_BHTC = F.scaled_dot_product_attention(
            q_BHTC,
            k_BKTC,
            v_BTKC.transpose(1, 2),
            is_causal=True,
            enable_gqa=num_kv_heads != num_heads,
        )
        return self.out(mixed_BHTC.transpose(1, 2).flatten(2))


def rotate_by_position(x_BTHC: Tensor, positions_BT: Tensor | None = None) -> Tensor:
    """Rotate each pair of channels (i, i + C/2) by position * base^(-2i/C) (RoFormer).

    The angles are computed where they are used: a buffer would be uninitialized after the meta
    device and would have to be sent between ranks.
    """
    num_tokens, head_width = x_BTHC.shape[1], x_BTHC.shape[3]
    angle_dtype = torch.promote_types(x_BTHC.dtype, torch.float32)
    device = x_BTHC.device
    exponents_C = torch.arange(0, head_width, 2, device=device, dtype=angle_dtype) / head_width
    if positions_BT is None:
        positions_BT = torch.arange(num_tokens, device=device)
    angles_BTC = positions_BT.to(angle_dtype)[..., None] * ROTARY_BASE**-exponents_C
    cos_BT1C = angles_BTC.cos().to(x_BTHC.dtype).unsqueeze(-2)
    sin_BT1C = angles_BTC.sin().to(x_BTHC.dtype).unsqueeze(-2)
    first, second = x_BTHC.chunk(2, dim=-1)
    return torch.cat(
        (first * cos_BT1C - second * sin_BT1C, first * sin_BT1C + second * cos_BT1C), dim=-1
    )


class Mlp(nn.Module):
    """SwiGLU: (silu(x G) * x U) W (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, *, out_init_gain: float) -> None:
        super().__init__()
        self.gate_up = Projection(config.width, 2 * config.hidden_width)
        self.out = Projection(config.hidden_width, config.width, init_gain=out_init_gain)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.out(F.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    """Attention, then an MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # 2 L outputs are added up: each starts smaller, so that their sum does not grow.
        out_init_gain = (2 * config.num_layers) ** -0.5
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config, out_init_gain=out_init_gain)
        self.mlp_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.mlp = Mlp(config, out_init_gain=out_init_gain)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.dropout(
            self.attention(self.attention_norm(x_BTD), positions_BT)
        )  # in one expression, so that what is added is not alive beside the MLP
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Head(nn.Module):
    """Returns the summed loss and its number of tokens, or the logits without targets."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.projection = Projection(config.width, config.vocab_size, init_gain=HEAD_INIT_GAIN)

    def forward(
        self, x_BTD: Tensor, targets_BT: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        logits_BTV = self.projection(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return next_token_loss(logits_BTV, targets_BT)


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of -log p(target) in nats, number of targets); negative targets are ignored."""
    loss_dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    is_counted_BT = targets_BT >= 0
    loss_sum = F.cross_entropy(
        logits_BTV.flatten(0, 1).to(loss_dtype),
        targets_BT.masked_fill(~is_counted_BT, -1).flatten(),
        ignore_index=-1,
        reduction="sum",
    )
    return loss_sum, is_counted_BT.sum()


class Decoder(nn.Module):
    """The whole model; returns ``(loss_sum, num_tokens)`` with targets, else logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        position_ids: Tensor | None = None,  # [B, T]; None: samples are whole
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, position_ids)
        return self.head(x_BTD, targets_BT)
