"""One device, measured as ``shardhet measure`` does it, and models trained under plans."""

import torch

from experiments.common.systems import System
from experiments.decoders import CPU
from experiments.gpu import systems
from experiments.gpu.scale import PARAM_DTYPE, RECOMPUTED, REDUCE_DTYPE, Job
from shardhet import Plan
from shardhet.models.decoder import Decoder
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import Measurement, MeasuringEffort, measure
from shardhet.training.optim import OptimizerSpec

OPTIMIZER = OptimizerSpec(learning_rate=1e-4)


def measure_here(job: Job, *, seconds: float) -> Measurement:
    """Cluster, workload and profile; the model itself is on the meta device."""
    config = job.scale.config
    with torch.device("meta"):
        model = Decoder(config)
    # Its own shapes on the CPU: the profiler takes it where it is needed.
    tokens, targets = systems.random_batch(config, 2, CPU)
    return measure(
        TrainedModel(
            module=model,
            batch=ExampleBatch(args=(tokens, targets)),
            param_dtype=PARAM_DTYPE,
            reduce_dtype=REDUCE_DTYPE,
        ),
        device=job.device,
        optimizer=OPTIMIZER,
        effort=MeasuringEffort(
            max_microbatch_size=job.scale.microbatch_size,
            num_repeats=job.pick(full=10, short=3),
            time_limit_s=seconds,
        ),
    )


def plans_by_hand(job: Job) -> dict[str, Plan]:
    """One microbatch and several, everything kept, blocks recomputed, and half of them."""
    size = job.scale.microbatch_size
    part = max(1, size // 4)
    first_half = [f"blocks.{i}" for i in range(job.scale.config.num_layers // 2)]
    plan = systems.one_rank_plan
    return {
        f"1 x {size}, everything kept": plan(size),
        f"{size // part} x {part}, everything kept": plan(part, size // part),
        f"1 x {size}, half of the blocks recomputed": plan(size, recompute=first_half),
        f"2 x {size}, blocks recomputed": plan(size, 2, recompute=RECOMPUTED),
    }


def in_training(job: Job, plan: Plan) -> System:
    """HetFSDP under ``plan`` with the optimizer that was measured."""
    return systems.het_fsdp(job.scale.config, plan, job.device, OPTIMIZER.build)
