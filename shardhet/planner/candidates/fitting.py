"""How many samples fit on a device, in microbatches of each size."""

from collections.abc import Sequence
from math import inf

import numpy as np

from shardhet.planner.problem.problem import Floats, Ints
from shardhet.pricing.cost import CostModel
from shardhet.records.plan import RankPlan

MOST_KEPT = 512  # answers


def fitting_batches(
    model: CostModel,
    ranks: Sequence[RankPlan],
    device_kind: str | None,
    budget_bytes: float,
    sizes: Ints,
    *,
    stored_numel: float = 0.0,
    host_bytes: float = inf,
) -> Floats:
    """[ranks, sizes] the most samples that fit in microbatches of at most these sizes, beside
    so many elements; not always whole, and negative if nothing fits.

    As ``room_for_state`` has it.  It is kept for all clusters: few devices differ in it.
    """
    device = model.profile.device(device_kind)
    peaks = tuple((each.unit_kind, each.peak_bytes) for each in device.units)
    left_bytes, of_state = budget_bytes - device.reserved_bytes, (stored_numel, host_bytes)
    doing = tuple(map(model.memory_key, ranks))
    key = (doing, left_bytes, peaks, of_state, sizes.tobytes())
    known = model.known.of_workload.fitting
    if key not in known:
        if len(known) >= MOST_KEPT:
            known.clear()
        known[key] = _on_device(model, ranks, device_kind, left_bytes, sizes, stored_numel)
        if host_bytes < inf:
            on_host = _on_host(model, ranks, *of_state)
            known[key] = np.minimum(known[key], on_host[:, None])
    return known[key]


def _on_device(
    model: CostModel,
    ranks: Sequence[RankPlan],
    device_kind: str | None,
    left_bytes: float,
    sizes: Ints,
    stored_numel: float,
) -> Floats:
    """[ranks, sizes] samples; in every moment of a rank they need what they do in it."""
    running, bytes_of, rank_of = model.moments_of_all(ranks, device_kind, int(sizes.max()))
    fixed, per_sample, per_numel = (each[:, None] for each in bytes_of)
    left = left_bytes - fixed - stored_numel * per_numel - running[:, sizes]
    samples = np.where(left < 0, -1.0, inf)
    np.divide(left, per_sample, out=samples, where=per_sample > 0)
    starts = np.flatnonzero(np.diff(rank_of, prepend=-1))
    return np.asarray(np.minimum.reduceat(samples, starts))


def _on_host(
    model: CostModel, ranks: Sequence[RankPlan], stored_numel: float, host_bytes: float
) -> Floats:
    """[ranks] samples whose inputs fit in the memory of the host, beside the state there."""
    found = np.full(len(ranks), inf)
    per_numel = model.workload.state_bytes_per_element
    for i, rank in enumerate(ranks):
        inputs = model.host_bytes_per_sample(rank)
        left = host_bytes - rank.optimizer_on_host * max(0.0, stored_numel) * per_numel
        if inputs or left < 0:
            found[i] = left / inputs if inputs else -1.0
    return found
