"""What the ranks can do, measured under their quotas, and the plans that follow from it.

Nothing is told to HetFSDP: kinds of devices have names, and speeds come out of the
measurement that ``shardhet measure`` makes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from experiments.mixed_cluster.clusters import Case
from shardhet import Plan
from shardhet.planner import (
    Constraints,
    DeviceLimits,
    PlanSolution,
    baselines,
    solve,
)
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import Measurement, MeasuringEffort, measure
from shardhet.training.emulation import EmulatedDevice

PLANNED, EVEN = "HetFSDP, planned", "HetFSDP, even"
COMPUTE_ONLY, MEMORY_ONLY = "HetFSDP, compute only", "HetFSDP, memory only"
SPARED = "HetFSDP, slowest spared"  # rows of an objective that is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan of HetFSDP."""

    system: str
    plan: Plan
    predicted_step_time_s: float


def measured(case: Case, device: EmulatedDevice, effort: MeasuringEffort) -> Measurement:
    """Cluster, workload and profile of the ranks as they are now.  Collective."""
    config = case.work.config
    tokens = torch.randint(config.vocab_size, (case.max_microbatch_size, config.seq_len))
    return measure(
        TrainedModel(module=case.work.model(), batch=ExampleBatch(args=(tokens, tokens))),
        device_spec=case.cluster.device_spec(dist.get_rank()),
        emulated=device,
        effort=replace(effort, max_microbatch_size=case.max_microbatch_size),
    )


def make_plans(case: Case, measurement: Measurement) -> list[Planned]:
    """The planner's plan and simpler planners' ones, without recomputing."""
    limits = dict.fromkeys(range(case.cluster.world_size), DeviceLimits(recomputes=False))
    constraints = Constraints(limits=limits, max_microbatch_size=case.max_microbatch_size)
    makers: dict[str, Callable[..., PlanSolution]] = {
        PLANNED: solve,
        EVEN: baselines.even,
        COMPUTE_ONLY: baselines.compute_only,
        MEMORY_ONLY: baselines.memory_only,
    }
    batch = case.work.global_batch_size
    found = {
        name: make(measurement.scenario, global_batch_size=batch, constraints=constraints)
        for name, make in makers.items()
    }
    return [
        Planned(system=name, plan=each.plan, predicted_step_time_s=each.predicted.step_time_s)
        for name, each in found.items()
    ]
