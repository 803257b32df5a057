"""Every system of the comparison, behind one ``step`` on the global batch.

All start from the same weights and take the same step: AdamW on the mean loss over the
global batch, in float32, with nothing recomputed.  Each rank takes its own samples out of
the global batch, so that systems may deal it out differently; the losses of all ranks add up
to the mean loss over it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from experiments.common import systems
from experiments.common.systems import FSDP2, PLAIN, System
from experiments.decoders import CPU, make_decoder, units_of
from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.models.decoder import Block, Decoder, DecoderConfig, Embedding, Head
from shardhet.training.emulation import EmulatedDevice

LEARNING_RATE = 1e-3
FSDP2_UNEVEN = f"{FSDP2}, uneven counts"  # the strong baseline

Make = Callable[[], System]


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
        return systems.fused_adamw(model.parameters(), LEARNING_RATE)

    @property
    def even(self) -> list[int]:
        """Samples of each rank where all have as many."""
        each, rest = divmod(self.global_batch_size, dist.get_world_size())
        if rest:
            raise ValueError(
                f"{self.name}: a global batch of {self.global_batch_size} does not divide by "
                f"{dist.get_world_size()} ranks, but stock systems need it to. Change it."
            )
        return [each] * dist.get_world_size()


def het_fsdp(
    work: Work, name: str, plan: Plan, *, device: EmulatedDevice, device_spec: DeviceSpec
) -> System:
    """``plan`` on all ranks of the default group; ``device`` slows this process down, or not
    where it is of full speed.
    """
    model = HetFSDP(work.model(), plan, device_spec=device_spec)
    optimizer = work.optimizer(model)
    device.slow_down(model, optimizer)
    system = systems.het_fsdp(model, optimizer, name=name)
    return _on_part(system, [rank.rank_batch_size for rank in plan.ranks], model.position)


def plain_pytorch(work: Work, rank_batch_size: int, microbatch_size: int) -> System:
    """One process by itself, on the first samples."""
    model = work.model()
    system = systems.stock(
        model, work.optimizer(model), name=PLAIN, microbatch_size=microbatch_size
    )
    return System(
        PLAIN, lambda *batch: system.step(*(part[:rank_batch_size] for part in batch))
    )


# Stock PyTorch.  Its gradients are means over ranks, so each rank's losses are divided by its
# even part of the global batch's tokens.


def _fsdp2(
    work: Work,
    name: str,
    *,
    microbatch_size: int | None = None,
    rank_batch_sizes: Sequence[int] | None = None,
) -> System:
    """FSDP2; with numbers of microbatches of each rank's own it shards as ZeRO-2 does."""
    model = work.model()
    system = systems.fsdp2(
        model,
        units_of(model),
        LEARNING_RATE,
        name=name,
        microbatch_size=microbatch_size,
        num_tokens=work.global_num_tokens / dist.get_world_size(),
        reshards=rank_batch_sizes is None,
    )
    return _on_part(system, rank_batch_sizes or work.even, dist.get_rank())


def _wrapped(work: Work, name: str, wrap: Callable[[nn.Module], nn.Module]) -> System:
    """Even batches in one microbatch."""
    model = wrap(work.model())
    system = systems.stock(model, work.optimizer(model), name=name)
    return _on_part(system, work.even, dist.get_rank())


def _fsdp1(module: nn.Module) -> nn.Module:
    """Fully sharded, the same units."""
    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block, Embedding, Head}),
        device_id=CPU,
        use_orig_params=True,
    )


def _on_part(system: System, rank_batch_sizes: Sequence[int], position: int) -> System:
    first = sum(rank_batch_sizes[:position])
    own = slice(first, first + rank_batch_sizes[position])

    def step(tokens: Tensor, targets: Tensor) -> float:
        return float(system.step(tokens[own], targets[own])) / len(rank_batch_sizes)

    return System(system.name, step)


def _by_speed(number: int, speeds: Sequence[float]) -> list[int]:
    """In proportion to ``speeds``, rounded by the largest-remainder method."""
    exact = [number * speed / sum(speeds) for speed in speeds]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: number - sum(counts)]:
        counts[i] += 1
    return counts


def stock_systems(work: Work, speeds: Sequence[float], microbatch_size: int) -> dict[str, Make]:
    """What there is besides HetFSDP, by name; ``speeds`` are for the strong baseline."""
    counts = _by_speed(work.global_batch_size // microbatch_size, speeds)
    uneven = [number * microbatch_size for number in counts]
    of_fsdp2: dict[str, dict[str, Any]] = {
        FSDP2: {},
        f"{FSDP2}, batches of {microbatch_size}": {"microbatch_size": microbatch_size},
        FSDP2_UNEVEN: {"microbatch_size": microbatch_size, "rank_batch_sizes": uneven},
    }
    made: dict[str, Make] = {
        name: partial(_fsdp2, work, name, **options) for name, options in of_fsdp2.items()
    }
    made["FSDP1"] = partial(_wrapped, work, "FSDP1", _fsdp1)
    made["DDP"] = partial(_wrapped, work, "DDP", DistributedDataParallel)
    return made
