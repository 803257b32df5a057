"""How far the figures can be trusted: published parameters, memory and times beside ours."""

from dataclasses import dataclass
from pathlib import Path

from experiments.published.blocks import KIND_BY_GPU, derived_over_published
from experiments.published.inputs import (
    MEASURED,
    PUBLISHED_CLUSTER,
    PUBLISHED_MODELS,
    Case,
    derived_beside,
    inputs_of,
    published_blocks,
    published_memory_gib,
    published_numel,
)
from shardhet.config.planning import Inputs
from shardhet.pricing.cost import CostModel
from shardhet.records.plan import EVERY_UNIT, Plan

GIB = 2**30
CHECK_HEADER = [
    "model",
    "parameters, ours / published",
    "GiB beside the state at microbatch 1, ours / published",
    "at the largest published",
    *(f"derived / published block time, {gpu.upper()}" for gpu in KIND_BY_GPU),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One published model beside the same as shardhet counts it."""

    model: str
    numel_ratio: float
    first_memory_ratio: float
    last_memory_ratio: float
    derived_time_ratios: tuple[float, ...]  # in the order of KIND_BY_GPU

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        values = (self.first_memory_ratio, self.last_memory_ratio, *self.derived_time_ratios)
        return [self.model, f"{self.numel_ratio:.3f}", *(f"{value:.2f}" for value in values)]


def checks(folder: Path) -> list[Check]:
    """One per published model."""
    return [_check(model, folder) for model in PUBLISHED_MODELS]


def _check(model: str, folder: Path) -> Check:
    case = Case(part=MEASURED, cluster=PUBLISHED_CLUSTER, model=model, global_batch_size=1)
    inputs = inputs_of(case, folder)
    published = published_memory_gib(model, folder)
    ratios = [compute_gib(inputs, i + 1) / gib for i, gib in enumerate(published)]
    times = derived_over_published(
        derived_beside(case).setting.profile, published_blocks(model, folder)
    )
    return Check(
        model=model,
        numel_ratio=inputs.setting.workload.numel / published_numel(model, folder),
        first_memory_ratio=ratios[0],
        last_memory_ratio=ratios[-1],
        derived_time_ratios=tuple(times[gpu] for gpu in KIND_BY_GPU),
    )


def compute_gib(inputs: Inputs, size: int) -> float:
    """GiB of one recomputed microbatch: no state, and nothing that is taken before tensors."""
    plan = Plan.by_hand(
        microbatch_sizes=[size],
        num_microbatches=[1],
        state_shares=[1.0],
        recompute=[EVERY_UNIT],
        devices=inputs.setting.cluster.devices[:1],
    )
    model = CostModel(inputs.setting)
    memory = model.memory(plan.ranks[0], 0)
    return (memory.total_bytes - memory.reserved_bytes) / GIB
