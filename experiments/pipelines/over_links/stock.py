"""torch's own pipeline: ``Schedule1F1B`` over equal stages, each of them ``fully_shard``."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from experiments.common.systems import fused_adamw
from experiments.pipelines.over_links.model import NUM_BLOCKS, Model, Stage, loss_sum

NUM_STAGES, STAGE_SIZE = 2, 2
CPU = torch.device("cpu")


def schedules_1f1b(
    samples_per_s: float,
    batch: tuple[Tensor, Tensor],
    *,
    numbers_of_microbatches: Sequence[int],
    learning_rate: float,
) -> dict[int, Callable[[], float]]:
    """Take steps by number of microbatches; they return this rank's part of the mean loss.

    Collective.  Every rank of a stage computes as many samples.  As torchtitan does it, units
    stay gathered from the first to the last microbatch of a step, and gradients are reduced
    with the last.
    """
    mesh = init_device_mesh(
        "cpu", (NUM_STAGES, STAGE_SIZE), mesh_dim_names=("stages", "shards")
    )
    return {
        number: _pipeline(mesh, samples_per_s, batch, number, learning_rate)
        for number in numbers_of_microbatches
    }


def _pipeline(
    mesh: DeviceMesh,
    samples_per_s: float,
    batch: tuple[Tensor, Tensor],
    num_microbatches: int,
    learning_rate: float,
) -> Callable[[], float]:
    number, position = mesh.get_local_rank("stages"), mesh.get_local_rank("shards")
    size = NUM_BLOCKS // NUM_STAGES
    module = Stage(Model(samples_per_s), number * size, (number + 1) * size)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["shards"], reshard_after_forward=False)
    fully_shard(module, mesh=mesh["shards"], reshard_after_forward=False)
    optimizer = fused_adamw(module.parameters(), learning_rate)
    num_samples = len(batch[0])

    def share_of_loss(logits: Tensor, targets: Tensor) -> Tensor:
        # Gradients are averaged over the ranks of a stage, and not divided by anything else.
        return loss_sum(logits, targets) * (STAGE_SIZE / num_samples)

    stage = PipelineStage(module, number, NUM_STAGES, CPU, group=mesh.get_group("stages"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=share_of_loss, scale_grads=False)
    words, targets = (each.chunk(STAGE_SIZE)[position] for each in batch)
    is_last = number == NUM_STAGES - 1

    def step() -> float:
        losses: list[Tensor] = []
        if number == 0:
            schedule.step(words)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(losses)) / STAGE_SIZE if is_last else 0.0

    return step
