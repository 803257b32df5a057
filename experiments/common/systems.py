"""Systems under comparison: how each is made, takes a step, is timed and is checked.

Models return ``(loss_sum, num_tokens)``.  FSDP2 averages gradients over ranks, so each rank
divides its sum by its own tokens where all have as many, and else by ``num_tokens``, those of
the mean rank.  No loss, norm, draw or initialisation is left to DTensors: its means over uneven
shards are means of ranks, gradients of mse and huber are world-size times too large, and draws
on a CPU mesh repeat rows on every rank (torch 2.13).  Models are built and initialised before
they are sharded, and see this rank's tensors alone.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.comm.calls import SWITCH
from shardhet.training.emulation import EmulatedDevice

HET, FSDP2, PLAIN = "HetFSDP", "FSDP2", "plain PyTorch"
LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order
AS_STORED = MixedPrecisionPolicy()

# Of tensors with samples in dim 0 -> the mean loss over them, a number; stock systems leave it
# in a tensor on the device, so that the host need not wait for it.
Step = Callable[..., Any]
IsLast = Callable[[bool], None]  # before each microbatch: whether it is the last one


@dataclass(frozen=True, slots=True)
class System:
    """A model in training; all ranks take steps together."""

    name: str
    step: Step


def fused_adamw(params: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    """Fused: the loop over parameters costs FSDP2 a dispatch of DTensor per operation."""
    return AdamW(params, lr=learning_rate, fused=True)


def het_fsdp(model: HetFSDP, optimizer: Optimizer | None, *, name: str = HET) -> System:
    """Under the model's plan; without an optimizer gradients are dropped."""
    finish = _finish(model, optimizer)

    def step(*batch: Tensor) -> float | None:
        mean_loss = model.backward(*model(*batch))
        finish()
        return mean_loss

    return System(name, step)


def by_plan(
    module: nn.Module,
    plan: Plan,
    batch: Sequence[Tensor],
    *,
    spec: DeviceSpec,
    learning_rate: float,
    group: dist.ProcessGroup | None = None,
    emulated: EmulatedDevice | None = None,
) -> Callable[[], float]:
    """Takes a step of a plan, in rounds and stages too; returns the mean loss.

    ``batch`` is the global one, of which this rank takes its samples.
    """
    model = HetFSDP(module, plan, group=group, device_spec=spec)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = fused_adamw(trained, learning_rate)
    if emulated is not None:
        emulated.slow_down(model, optimizer)
    own = [each[plan.sample_indices(model.position)] for each in batch]

    def step() -> float:
        mean_loss = model.forward_backward(*own)
        optimizer.step()
        optimizer.zero_grad()
        assert mean_loss is not None
        return mean_loss

    return step


def stock(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    name: str,
    microbatch_size: int | None = None,
    num_tokens: float | None = None,
    before: IsLast = lambda is_last: None,
) -> System:
    """Anything that is called as a plain model is; without an optimizer gradients are dropped.

    It accumulates in the ordinary way, forward and backward of one microbatch after the other.
    Losses are divided by ``num_tokens``: those of the rank's batch, unless it is given.
    """
    finish = _finish(model, optimizer)

    def step(*batch: Tensor) -> Tensor:
        size = microbatch_size or len(batch[0])
        parts = split(batch, size)
        losses = []
        for i, part in enumerate(parts):
            before(i == len(parts) - 1)
            loss_sum, tokens_of_part = model(*part)
            divisor = num_tokens or tokens_of_part * (len(batch[0]) / len(part[0]))
            loss = loss_sum / divisor
            loss.backward()
            losses.append(loss.detach())
        finish()
        return sum(losses[1:], losses[0])

    return System(name, step)


def split(batch: tuple[Tensor, ...], microbatch_size: int) -> list[tuple[Tensor, ...]]:
    """Its microbatches; the last may be smaller."""
    return list(zip(*(tensor.split(microbatch_size) for tensor in batch), strict=True))


def fsdp2(
    model: nn.Module,
    units: Sequence[nn.Module],
    learning_rate: float | None,
    *,
    name: str = FSDP2,
    microbatch_size: int | None = None,
    num_tokens: float | None = None,
    reshards: bool = True,
    policy: MixedPrecisionPolicy = AS_STORED,
) -> System:
    """FSDP2 over the default group, gradients reduced with the last microbatch only.

    Without ``reshards`` parameters are gathered once a step, as in ZeRO-2; then all ranks
    launch the same collectives, whatever their numbers of microbatches.
    """
    sharded = fully_sharded(model, units, reshards=reshards, policy=policy)

    def before(is_last: bool) -> None:
        sharded.set_requires_gradient_sync(is_last)
        if not reshards:
            sharded.set_reshard_after_backward(is_last)

    return stock(
        model,
        None if learning_rate is None else fused_adamw(model.parameters(), learning_rate),
        name=name,
        microbatch_size=microbatch_size,
        num_tokens=num_tokens,
        before=before,
    )


def fully_sharded(
    model: nn.Module,
    units: Sequence[nn.Module],
    *,
    reshards: bool = True,
    policy: MixedPrecisionPolicy = AS_STORED,
) -> FSDPModule:
    """Wrapped as torchtitan does it: each unit, then the root.

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


def _finish(model: nn.Module, optimizer: Optimizer | None) -> Callable[[], None]:
    params = list(model.parameters())

    def finish() -> None:
        if optimizer is not None:
            optimizer.step()
        for param in params:
            param.grad = None

    return finish


def emulated_peak(
    module: nn.Module,
    plan: Plan,
    batch_of: Callable[[HetFSDP], Sequence[Tensor]],
    *,
    num_steps: int,
    max_norm: float | None = None,
    **options: Any,
) -> tuple[int, int]:
    """This rank's position, and the most bytes of its device's tensors in the last step.

    On the emulated accelerator of the tests, which counts the storages that are alive.
    """
    from tests.emulated.accelerator import Accelerator

    with Accelerator().installed() as accelerator:
        memory = accelerator.memory
        model = HetFSDP(module, plan, device=accelerator.device, **options)
        optimizer = AdamW(model.parameters(), fused=True)
        own = [each.to(accelerator.device) for each in batch_of(model)]
        for _ in range(num_steps):
            accelerator.module().synchronize()
            gc.collect()
            memory.peak_bytes = memory.allocated_bytes
            model.forward_backward(*own)
            if max_norm is not None:
                model.clip_grad_norm_(max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return model.position, int(memory.peak_bytes)


# Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """For how long systems take turns."""

    num_rounds: int  # besides the first, which warms up
    num_steps: int  # of a turn, besides the first


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of a system."""

    system: str
    round: int
    step: int  # within the turn; step 0 is left out
    slowest_rank_s: float


def take_turns(
    step_by_system: Mapping[str, Callable[[int], object]],
    rounds: Rounds,
    *,
    in_line: bool = False,
) -> list[TimedStep]:
    """Steps of several systems in the same processes; the same list on every rank.

    Turns, not launches of their own: on a shared machine the same program differs from launch
    to launch (where memory lies, what the neighbours do) by more than the systems differ.  In
    one process a slow second meets all of them.  A turn is a few steps, of which the first is
    left out because another system has just had the caches.  Who goes first in one round goes
    last in the next.
    """
    names = list(step_by_system)
    return [
        TimedStep(system=name, round=turn, step=step, slowest_rank_s=seconds)
        for turn in range(-1, rounds.num_rounds)
        for name in (names if turn % 2 else reversed(names))
        for step, seconds in enumerate(
            slowest_rank_seconds(step_by_system[name], rounds.num_steps + 1, in_line=in_line)
        )
        if turn >= 0 and step > 0
    ]


def turns_of(
    steps: Iterable[Any], system: str, name: str = "slowest_rank_s"
) -> dict[int, float]:
    """Median seconds of one system's steps, by round."""
    seconds: dict[int, list[float]] = {}
    for each in steps:
        if each.system == system:
            seconds.setdefault(each.round, []).append(getattr(each, name))
    return {turn: median(found) for turn, found in seconds.items()}


def slowest_rank_seconds(
    take_step: Callable[[int], object], num_steps: int, *, in_line: bool = False
) -> list[float]:
    """Seconds of ``take_step(0)``, ``take_step(1)``, ... on the rank where each took longest.

    Ranks begin the first step together; each one, where they are to be ``in_line``, so that no
    step pays for a rank that comes late from the last.  Collective.
    """
    durations_s = torch.empty(num_steps, dtype=torch.float64)
    for step in range(num_steps):
        if in_line or step == 0:
            dist.barrier()
        start_s = time.perf_counter()
        take_step(step)
        durations_s[step] = time.perf_counter() - start_s
    dist.all_reduce(durations_s, op=dist.ReduceOp.MAX)
    seconds: list[float] = durations_s.tolist()
    return seconds


# Checks


def first_losses(system: System, batches: Sequence[tuple[Any, ...]], num_steps: int) -> Tensor:
    """Of a system's first steps, [steps]: means over ranks.  Collective."""
    losses = [float(system.step(*batches[i % len(batches)])) for i in range(num_steps)]
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def check_same_steps(steps: Mapping[str, Callable[[], float]]) -> None:
    """Take two steps of each; ranks' losses, added up, are the same for all.  Collective."""
    losses = torch.tensor([[step() for step in (each, each)] for each in steps.values()])
    dist.all_reduce(losses)
    check_same_losses(dict(zip(steps, losses, strict=True)))


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
