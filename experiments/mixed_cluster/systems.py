"""Every system of the comparison, behind one ``step`` on the global batch.

All start from the same weights and take the same step: AdamW on the mean loss over the
global batch, in float32, with nothing recomputed.  Each rank takes its own samples out of
the global batch, so that systems may deal it out differently.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from experiments.contestants import fully_sharded, fused_adamw, het_fsdp_step
from experiments.decoders import CPU, make_decoder, units_of
from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.models.decoder import Block, Decoder, DecoderConfig, Embedding, Head
from shardhet.training.emulation import EmulatedDevice

LEARNING_RATE = 1e-3
FSDP2_RECOMPUTED = "FSDP2, recomputed"
FSDP2, FSDP2_UNEVEN = "FSDP2", "FSDP2, uneven counts"  # the second is the strong baseline

# Of the global batch, tokens and targets, [B, T]; the parts of all ranks add up to the mean
# loss over it.
Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True, slots=True)
class System:
    """A model in training on all ranks."""

    name: str
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all systems train."""

    name: str
    config: DecoderConfig
    global_batch_size: int

    @property
    def global_num_tokens(self) -> int:
        """Of one step, all ranks together."""
        return self.global_batch_size * self.config.seq_len

    def model(self) -> Decoder:
        """The same weights for everyone."""
        return make_decoder(self.config)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The same for everyone, too."""
        return fused_adamw(model.parameters(), LEARNING_RATE)


# Ours


def het_fsdp(
    work: Work, name: str, plan: Plan, *, device: EmulatedDevice, device_spec: DeviceSpec
) -> System:
    """``plan`` on all ranks of the default group; ``device`` slows this process down, or not
    where it is of full speed.
    """
    model = HetFSDP(work.model(), plan, device_spec=device_spec)
    optimizer = work.optimizer(model)
    device.slow_down(model, optimizer)
    first = plan.first_sample(model.position)
    own = slice(first, first + plan.ranks[model.position].rank_batch_size)

    def step(tokens: Tensor, targets: Tensor) -> float:
        return het_fsdp_step(model, optimizer, tokens[own], targets[own]) / plan.world_size

    return System(name, step)


# Stock PyTorch.  Its gradients are means over ranks, so each rank's loss is scaled by the
# number of ranks; losses are sums over tokens divided by those of the global batch.


def plain_pytorch(work: Work, rank_batch_size: int, microbatch_size: int) -> System:
    """One process by itself."""
    model = work.model()
    optimizer = work.optimizer(model)
    own = _spans([rank_batch_size], microbatch_size)[0]
    num_tokens = rank_batch_size * work.config.seq_len

    def step(tokens: Tensor, targets: Tensor) -> float:
        losses = [_backward(model, tokens[s], targets[s], 1 / num_tokens) for s in own]
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses)

    return System("plain PyTorch", step)


def fsdp2(work: Work, name: str, microbatch_size: int | None = None) -> System:
    """Fully sharded, even batches."""
    model = work.model()
    sharded = fully_sharded(model, units_of(model))
    return _stock(work, name, sharded, _even(work), microbatch_size)


def fsdp2_recomputed(work: Work, name: str) -> System:
    """The same with the activations of every block recomputed, for devices short of memory."""
    model = work.model()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return _stock(work, name, fully_sharded(model, units_of(model)), _even(work), None)


def fsdp2_uneven(
    work: Work, name: str, rank_batch_sizes: Sequence[int], microbatch_size: int
) -> System:
    """FSDP2 with a number of microbatches of each rank's own.

    That is possible where parameters stay unsharded from the first forward to the last
    backward (as in ZeRO-2) and gradients are reduced after the last microbatch only: then all
    ranks launch the same collectives.
    """
    model = work.model()
    sharded = fully_sharded(model, units_of(model), reshards=False)

    def prepare(is_last: bool) -> None:
        sharded.set_requires_gradient_sync(is_last)
        sharded.set_reshard_after_backward(is_last)

    return _stock(work, name, sharded, rank_batch_sizes, microbatch_size, prepare)


def fsdp1(work: Work, name: str) -> System:
    """FSDP's first version, fully sharded, the same units."""
    model = FullyShardedDataParallel(
        work.model(),
        auto_wrap_policy=ModuleWrapPolicy({Block, Embedding, Head}),
        device_id=CPU,
        use_orig_params=True,
    )
    return _stock(work, name, model, _even(work), None)


def ddp(work: Work, name: str) -> System:
    """Everything on every rank."""
    return _stock(work, name, DistributedDataParallel(work.model()), _even(work), None)


def _even(work: Work) -> list[int]:
    each, rest = divmod(work.global_batch_size, dist.get_world_size())
    if rest:
        raise ValueError(
            f"{work.name}: a global batch of {work.global_batch_size} does not divide by "
            f"{dist.get_world_size()} ranks, but stock systems need it to. Change it."
        )
    return [each] * dist.get_world_size()


def _stock(
    work: Work,
    name: str,
    model: Any,
    rank_batch_sizes: Sequence[int],
    microbatch_size: int | None,
    prepare: Callable[[bool], None] = lambda is_last: None,
) -> System:
    """Gradient accumulation over the rank's microbatches; None is one for the whole."""
    optimizer = work.optimizer(model)
    own = _spans(rank_batch_sizes, microbatch_size or max(rank_batch_sizes))[dist.get_rank()]
    world_size = dist.get_world_size()
    scale = world_size / work.global_num_tokens

    def step(tokens: Tensor, targets: Tensor) -> float:
        losses = []
        for i, span in enumerate(own):
            prepare(i == len(own) - 1)
            losses.append(_backward(model, tokens[span], targets[span], scale))
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / world_size

    return System(name, step)


def _spans(rank_batch_sizes: Sequence[int], microbatch_size: int) -> list[list[slice]]:
    """Samples of the global batch of each microbatch of each rank."""
    stops = accumulate(rank_batch_sizes)
    return [
        [
            slice(start, min(start + microbatch_size, stop))
            for start in range(stop - size, stop, microbatch_size)
        ]
        for size, stop in zip(rank_batch_sizes, stops, strict=True)
    ]


def _backward(model: Any, tokens: Tensor, targets: Tensor, scale: float) -> float:
    loss_sum, _ = model(tokens, targets)
    loss = loss_sum * scale
    loss.backward()
    return float(loss.detach())


# DeepSpeed, where it is installed


def has_deepspeed() -> bool:
    """Whether it can be imported; it is no dependency of anything here."""
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed_zero3(work: Work, name: str) -> System:
    """ZeRO stage 3, even batches."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # it does not start without
    import deepspeed

    rank_batch_size = _even(work)[0]
    engine, *_ = deepspeed.initialize(
        model=work.model(),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": rank_batch_size,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 3},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "torch_adam": True, "fused": True},
            },
            "steps_per_print": 2**31,
        },
    )
    own = _spans(_even(work), rank_batch_size)[dist.get_rank()][0]
    world_size = dist.get_world_size()
    scale = world_size / work.global_num_tokens

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss_sum, _ = engine(tokens[own], targets[own])
        loss = loss_sum * scale
        engine.backward(loss)
        engine.step()
        return float(loss.detach()) / world_size

    return System(name, step)


Make = Callable[[Work], System]


def stock_systems(
    work: Work, speeds: Sequence[float], microbatch_size: int, *, is_capped: bool
) -> dict[str, Make]:
    """What there is besides HetFSDP, by name; ``speeds`` are for the strong baseline."""
    counts = Plan.proportional(
        speeds=speeds,
        global_batch_size=work.global_batch_size // microbatch_size,
        microbatch_size=1,
    )
    uneven = [rank.rank_batch_size * microbatch_size for rank in counts.ranks]
    made: dict[str, Make] = {
        FSDP2: partial(fsdp2, name=FSDP2),
        f"{FSDP2}, batches of {microbatch_size}": partial(
            fsdp2,
            name=f"{FSDP2}, batches of {microbatch_size}",
            microbatch_size=microbatch_size,
        ),
        FSDP2_UNEVEN: partial(
            fsdp2_uneven,
            name=FSDP2_UNEVEN,
            rank_batch_sizes=uneven,
            microbatch_size=microbatch_size,
        ),
        "FSDP1": partial(fsdp1, name="FSDP1"),
        "DDP": partial(ddp, name="DDP"),
    }
    if is_capped:
        made[FSDP2_RECOMPUTED] = partial(fsdp2_recomputed, name=FSDP2_RECOMPUTED)
    if has_deepspeed():
        made["DeepSpeed ZeRO-3"] = partial(deepspeed_zero3, name="DeepSpeed ZeRO-3")
    return made
