"""What experiments that compare systems share: how each is made ready, stepped and checked.

Models return ``(loss_sum, num_tokens)``.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

from shardhet import HetFSDP
from shardhet.comm.transport import SWITCH

LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order
AS_STORED = MixedPrecisionPolicy()


def fully_sharded(
    model: nn.Module,
    units: Sequence[nn.Module],
    *,
    reshards: bool = True,
    policy: MixedPrecisionPolicy = AS_STORED,
) -> FSDPModule:
    """FSDP2 over the default group, wrapped as torchtitan does it: each unit, then the root.

    ``units`` are in order of execution.  The last is the first of backward, so it stays
    unsharded in between (HetFSDP does the same by itself); the others, too, unless
    ``reshards``.
    """
    for unit in units[:-1]:
        fully_shard(unit, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(units[-1], mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=reshards)


@contextmanager
def over_gloo() -> Iterator[dist.ProcessGroup]:
    """A group of all ranks whose models talk as if they shared no memory.  Collective.

    Models are to be wrapped inside.
    """
    with mock.patch.dict(os.environ, {SWITCH: "gloo"}):
        group = dist.new_group()
        assert group is not None
        yield group


def fused_adamw(params: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    """Fused: the loop over parameters costs FSDP2 a dispatch of DTensor per operation."""
    return AdamW(params, lr=learning_rate, fused=True)


def het_fsdp_step(
    model: HetFSDP, optimizer: Optimizer, tokens: Tensor, targets: Tensor
) -> float:
    """One step on this rank's samples, [B, T]; the mean loss over the global batch."""
    mean_loss = model.backward(*model(tokens, targets))
    optimizer.step()
    optimizer.zero_grad()
    assert mean_loss is not None
    return mean_loss


def plain_step(
    model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor
) -> float:
    """One step as anyone writes it, for FSDP2 too; the mean loss over these tokens, [B, T]."""
    loss_sum, num_tokens = model(tokens, targets)
    loss = loss_sum / num_tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def slowest_rank_seconds(take_step: Callable[[int], object], num_steps: int) -> list[float]:
    """Seconds of ``take_step(0)``, ``take_step(1)``, ... on the rank where each took longest.

    Ranks begin the first step together.  Collective.
    """
    durations_s = torch.empty(num_steps, dtype=torch.float64)
    dist.barrier()
    for step in range(num_steps):
        start_s = time.perf_counter()
        take_step(step)
        durations_s[step] = time.perf_counter() - start_s
    dist.all_reduce(durations_s, op=dist.ReduceOp.MAX)
    seconds: list[float] = durations_s.tolist()
    return seconds


def check_same_losses(losses_by_system: Mapping[str, Tensor]) -> None:
    """Raise ``RuntimeError`` unless all have the losses of the first, [steps], or nearly."""
    all_losses = list(losses_by_system.items())
    for name, losses in all_losses[1:]:
        first, expected = all_losses[0]
        if not torch.allclose(losses, expected, rtol=LOSS_TOLERANCE, atol=0):
            raise RuntimeError(
                f"{name}: losses {losses.tolist()} but {first} has {expected.tolist()}. "
                "They do not train the same; mend that first."
            )
