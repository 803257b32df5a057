"""The same model and optimizer under HetFSDP, FSDP2 and plain PyTorch, behind one ``step``.

Every rank has the same number of tokens, so FSDP2's mean of the ranks' mean losses is the
mean over the global batch, which HetFSDP computes from sums and counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from experiments.contestants import (
    fully_sharded,
    fused_adamw,
    het_fsdp_step,
    over_gloo,
    plain_step,
)
from experiments.decoders import make_decoder, units_of
from shardhet import HetFSDP, Plan
from shardhet.models.decoder import DecoderConfig

Step = Callable[[Tensor, Tensor], float]  # tokens and targets, [B, T] -> this rank's loss
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class System:
    """A model in training."""

    name: str
    step: Step


def het_fsdp(config: DecoderConfig, plan: Plan, *, name: str) -> System:
    """``plan`` on all ranks of the default group, or on one process without a group."""
    model = HetFSDP(make_decoder(config), plan)
    optimizer = fused_adamw(model.parameters(), LEARNING_RATE)
    return System(name, partial(het_fsdp_step, model, optimizer))


def het_fsdp_over_gloo(config: DecoderConfig, plan: Plan, *, name: str) -> System:
    """The same through sockets, as between hosts."""
    with over_gloo() as group:
        model = HetFSDP(make_decoder(config), plan, group=group)
    optimizer = fused_adamw(model.parameters(), LEARNING_RATE)
    return System(name, partial(het_fsdp_step, model, optimizer))


def fsdp2(config: DecoderConfig) -> System:
    """Fully sharded over all ranks of the default group."""
    model = make_decoder(config)
    fully_sharded(model, units_of(model))
    optimizer = fused_adamw(model.parameters(), LEARNING_RATE)
    return System("FSDP2", partial(plain_step, model, optimizer))


def plain_pytorch(config: DecoderConfig) -> System:
    """One process."""
    model = make_decoder(config)
    optimizer = fused_adamw(model.parameters(), LEARNING_RATE)
    return System("plain PyTorch", partial(plain_step, model, optimizer))
