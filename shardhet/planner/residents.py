"""Which frozen weights may stay unsharded over steps, in the plans that are searched.

All of them, three quarters of the units, half, a quarter, or none: who computes then needs room
for fewer of them, and gathers the others in every step.
"""

from dataclasses import replace

from shardhet.pricing.cost import CostModel
from shardhet.pricing.launches import fastest_levels
from shardhet.records.plan import EVERY_UNIT

PARTS = (1.0, 0.75, 0.5, 0.25, 0.0)


def with_all_resident(model: CostModel) -> CostModel:
    """The prices of plans that send least: none sends less in a step."""
    return _with_levels(model, EVERY_UNIT if model.workload.frozen_units else ())


def with_residents(model: CostModel, *, may_stay: bool = True) -> tuple[CostModel, ...]:
    """The prices of plans that keep all frozen weights, of those that keep some, and none."""
    is_tried = may_stay and model.cluster.world_size > 1
    frozen = [unit.fqn for unit in model.workload.frozen_units] if is_tried else []
    numbers = dict.fromkeys(round(part * len(frozen)) for part in PARTS)
    return tuple(
        _with_levels(model, EVERY_UNIT if 0 < n == len(frozen) else tuple(frozen[:n]))
        for n in numbers
    )


def _with_levels(model: CostModel, resident: tuple[str, ...]) -> CostModel:
    model = replace(model, resident_units=resident)
    return replace(model, two_level_units=fastest_levels(model))
