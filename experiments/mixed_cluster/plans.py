"""What the ranks can do, measured under their quotas, and the plans that follow from it.

Nothing is told to HetFSDP: kinds of devices have names, and speeds come out of the
measurement that ``shardhet measure`` makes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from experiments.common.unlike import USABLE_FRACTION
from experiments.mixed_cluster.clusters import Case
from shardhet import Plan
from shardhet.planner import (
    Constraints,
    DeviceLimits,
    PlanError,
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
    """A plan of HetFSDP, or why there is none."""

    system: str
    plan: Plan | None
    predicted_step_time_s: float | None
    why_not: str = ""


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
    """The planner's plan and simpler planners' ones; recomputing only with capped memory."""
    cluster = replace(measurement.setting.cluster, usable_memory_fraction=USABLE_FRACTION)
    setting = replace(measurement.setting, cluster=cluster)
    demands = demands_of(case, recomputes=None if case.cluster.is_capped else False)
    makers: dict[str, Callable[..., PlanSolution]] = {
        PLANNED: solve,
        EVEN: baselines.even,
        COMPUTE_ONLY: baselines.compute_only,
        MEMORY_ONLY: baselines.memory_only,
    }
    batch = case.work.global_batch_size
    return [
        _attempt(name, partial(make, setting, global_batch_size=batch, constraints=demands))
        for name, make in makers.items()
    ]


def demands_of(case: Case, recomputes: bool | None) -> Constraints:
    """Which ranks compute, how much at a time, and whether units may be recomputed."""
    return Constraints(
        limits={
            position: DeviceLimits(
                recomputes=recomputes,
                rank_batch_size=0 if position in case.cluster.only_stores else None,
            )
            for position in range(case.cluster.world_size)
        },
        max_microbatch_size=case.max_microbatch_size,
    )


def _attempt(system: str, make: Callable[[], PlanSolution]) -> Planned:
    try:
        solution = make()
    except PlanError as error:
        return Planned(system=system, plan=None, predicted_step_time_s=None, why_not=str(error))
    return Planned(
        system=system, plan=solution.plan, predicted_step_time_s=solution.predicted.step_time_s
    )
