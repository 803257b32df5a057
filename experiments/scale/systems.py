"""One model in training under HetFSDP, under FSDP2 and in plain PyTorch, each as a step.

Models return ``(loss_sum, num_tokens)``.  FSDP2 accumulates in the ordinary way: forward and
backward of one microbatch after the other, gradients reduced with the last of them.

The optimizer is left out unless a learning rate is given.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from experiments.contestants import fully_sharded, fused_adamw
from experiments.scale.turns import Contestant
from shardhet import HetFSDP, Plan

HET, FSDP2, PLAIN = "HetFSDP", "FSDP2", "plain PyTorch"

Batch = tuple[Tensor, ...]  # of one rank, the samples in dim 0
Finish = Callable[[], None]  # of a step, once the gradients are there


def het_fsdp(
    model: nn.Module,
    plan: Plan,
    batch: Batch,
    *,
    name: str = HET,
    learning_rate: float | None = None,
) -> Contestant:
    """``plan`` on all ranks of the default group."""
    sharded = HetFSDP(model, plan)
    finish = _finish(sharded, learning_rate)

    def step() -> None:
        sharded.backward(*sharded(*batch))
        finish()

    return Contestant(name, step)


def fsdp2(
    model: nn.Module,
    units: Sequence[nn.Module],
    batch: Batch,
    *,
    num_microbatches: int = 1,
    name: str = FSDP2,
    learning_rate: float | None = None,
) -> Contestant:
    """Fully sharded over all ranks of the default group."""
    sharded = fully_sharded(model, units)
    finish = _finish(model, learning_rate)
    microbatches = split(batch, num_microbatches)

    def step() -> None:
        for i, microbatch in enumerate(microbatches):
            sharded.set_requires_gradient_sync(i == num_microbatches - 1)
            _forward_and_backward(model, microbatch, len(batch[0]))
        finish()

    return Contestant(name, step)


def plain(
    model: nn.Module, batch: Batch, *, num_microbatches: int = 1, name: str = PLAIN
) -> Contestant:
    """Every rank by itself: the compute of a step, and nothing else."""
    finish = _finish(model, None)
    microbatches = split(batch, num_microbatches)

    def step() -> None:
        for microbatch in microbatches:
            _forward_and_backward(model, microbatch, len(batch[0]))
        finish()

    return Contestant(name, step)


def split(batch: Batch, num_microbatches: int) -> list[Batch]:
    """Equal ones."""
    return list(zip(*(tensor.chunk(num_microbatches) for tensor in batch), strict=True))


def _forward_and_backward(model: nn.Module, microbatch: Batch, rank_batch_size: int) -> None:
    loss_sum, num_tokens = model(*microbatch)
    share = len(microbatch[0]) / rank_batch_size
    (share * loss_sum / num_tokens).backward()


def _finish(model: nn.Module, learning_rate: float | None) -> Finish:
    if learning_rate is not None:
        optimizer = fused_adamw(model.parameters(), learning_rate)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update
    parameters = list(model.parameters())

    def drop_gradients() -> None:
        for parameter in parameters:
            parameter.grad = None

    return drop_gradients
