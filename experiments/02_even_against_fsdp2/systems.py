"""The same model and optimizer under HetFSDP, FSDP2 and plain PyTorch, behind one ``step``.

FSDP2 is wrapped as torchtitan does it: the embedding, each block and the head by
themselves, then the root.  The head is the last to be used in forward and the first in
backward, so there it stays unsharded in between (HetFSDP does the same by itself).

Every rank has the same number of tokens, so FSDP2's mean of the ranks' mean losses is the
mean over the global batch, which HetFSDP computes from sums and counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from shardhet import HetFSDP, Plan
from shardhet.models.decoder import Decoder, DecoderConfig

Step = Callable[[Tensor, Tensor], float]  # tokens and targets, [B, T] -> this rank's loss
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class System:
    """A model in training."""

    name: str
    step: Step


def decoder_config(*, width: int, num_layers: int, seq_len: int) -> DecoderConfig:
    """A byte-level GPT with heads of 64 channels and an MLP three times as wide."""
    return DecoderConfig(
        vocab_size=256,
        width=width,
        num_layers=num_layers,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        hidden_width=3 * width,
        seq_len=seq_len,
    )


def het_fsdp(config: DecoderConfig, plan: Plan, *, name: str) -> System:
    """``plan`` on all ranks of the default group, or on one process without a group."""
    model = HetFSDP(_same_model(config), plan)
    optimizer = _optimizer(model)

    def step(tokens: Tensor, targets: Tensor) -> float:
        mean_loss = model.backward(*model(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        assert mean_loss is not None
        return mean_loss

    return System(name, step)


def fsdp2(config: DecoderConfig) -> System:
    """Fully sharded over all ranks of the default group."""
    model = _same_model(config)
    fully_shard(model.embedding, reshard_after_forward=True)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model.head, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=True)
    return System("FSDP2", _plain_step(model, _optimizer(model)))


def plain_pytorch(config: DecoderConfig) -> System:
    """One process."""
    model = _same_model(config)
    return System("plain PyTorch", _plain_step(model, _optimizer(model)))


def _plain_step(model: Decoder, optimizer: Optimizer) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> float:
        loss_sum, num_tokens = model(tokens, targets)
        loss = loss_sum / num_tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _same_model(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config)


def _optimizer(model: torch.nn.Module) -> Optimizer:
    # Fused: the loop over parameters costs FSDP2 a dispatch of DTensor per operation.
    return AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
