"""Cephalo's formulation (Guo et al., ICS 2025) as a planner, for comparison.

Every device computes at least one sample in equal microbatches, with everything recomputed.
The time of the slowest device is minimised, and memory is counted for all devices together.
The state then fills the memory that is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardhet.planner.problem.problem import Floats, Ints, fill_level
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.problem.state_numels import row_numel
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import EVERY_UNIT, Plan, RankPlan

MAX_MICROBATCH_SIZE = 16
MAX_ADDITIONS = 5e8  # about a second


def cephalo(setting: Setting, *, global_batch_size: int) -> Plan:
    """Cephalo's plan; raises ``PlanError`` if there is none or it would take too long."""
    model, cluster = CostModel(setting), setting.cluster
    size = min(global_batch_size, MAX_MICROBATCH_SIZE)
    pairs = sum(global_batch_size // m for m in range(1, size + 1))
    if cluster.world_size * pairs * (global_batch_size + 1.0) ** 2 > MAX_ADDITIONS:
        raise PlanError(
            f"plan: Cephalo's programme is too slow for {cluster.world_size} devices and a "
            f"global batch of {global_batch_size}. Compare a smaller case."
        )
    seconds, nbytes = zip(
        *(_device_tables(model, i, size, global_batch_size) for i in range(cluster.world_size)),
        strict=True,
    )
    budgets = [cluster.memory_budget_bytes(i) for i in range(cluster.world_size)]
    state_bytes = setting.workload.numel * model.bytes_per_stored_numel
    choice = cephalo_choice(
        seconds,
        nbytes,
        global_batch_size=global_batch_size,
        total_bytes=sum(budgets) - state_bytes,
    )
    if choice is None:
        raise PlanError("plan: Cephalo's programme finds none. Lower global_batch_size.")
    return _filled(model, choice, budgets)


def _device_tables(
    model: CostModel, position: int, size: int, batch: int
) -> tuple[Floats, Floats]:
    """Seconds [M + 1, B + 1] and bytes [M + 1] of one device, by microbatch size and number."""
    kind = model.cluster.devices[position].kind
    seconds = np.zeros((size + 1, batch + 1))
    nbytes = np.zeros(size + 1)
    for m in range(1, size + 1):
        once = 0.0
        for unit_kind, number in model.workload.num_units_by_kind.items():
            if number:
                forward_s, backward_s = model.unit_seconds(kind, unit_kind, [m])
                once += number * (2 * forward_s + backward_s)
        seconds[m] = once * np.arange(batch + 1)
        rank = _rank(model, position, WholeMicrobatches(m, 1))
        nbytes[m] = model.memory(rank, 0).total_bytes
    return seconds, nbytes


def _rank(model: CostModel, position: int, choice: "WholeMicrobatches") -> RankPlan:
    plan = Plan.by_hand(
        microbatch_sizes=[choice.size],
        num_microbatches=[choice.number],
        state_shares=[1.0],
        recompute=[EVERY_UNIT],
        devices=[model.cluster.devices[position]],
    )
    return plan.ranks[0]


def _filled(
    model: CostModel, choice: Sequence["WholeMicrobatches"], budgets: Sequence[int]
) -> Plan:
    """The plan with the state spread as evenly as memory allows."""
    lines = [model.lines_of(_rank(model, i, each)) for i, each in enumerate(choice)]
    rooms = np.array(
        [
            ((budget - own) / per_numel).min()
            for (own, per_numel), budget in zip(lines, budgets, strict=True)
        ]
    )
    ones = np.ones(len(rooms))
    room = np.maximum(rooms - row_numel(model.workload), 0.0)
    level = fill_level(room, ones, ones, float(model.workload.numel))
    if level == np.inf or rooms.min() < 0:
        raise PlanError(
            "plan: what Cephalo's programme chooses does not fit: it counts the memory of all "
            "devices together. Lower global_batch_size."
        )
    stored = np.minimum(room, level)
    return Plan.by_hand(
        microbatch_sizes=[each.size for each in choice],
        num_microbatches=[each.number for each in choice],
        state_shares=(stored / stored.sum()).tolist(),
        recompute=True,
        devices=model.cluster.devices,
    )


@dataclass(frozen=True, slots=True)
class WholeMicrobatches:
    """A device's batch in Cephalo's form: ``number`` microbatches of ``size``."""

    size: int
    number: int


def cephalo_choice(
    seconds: Sequence[Floats],  # per device [M + 1, n]: of n microbatches of each size
    bytes_by_size: Sequence[Floats],  # per device [M + 1]: of compute, by microbatch size
    *,
    global_batch_size: int,
    total_bytes: float,  # of all devices together, less the state
) -> tuple[WholeMicrobatches, ...] | None:
    """What Cephalo's released planner chooses; None if it finds nothing.

    best_i(j, k) = min over sizes m and numbers n of max(best_{i-1}(j - m n, k - m), t_i(m, n))

    with j samples and k the sum of the microbatch sizes, which stands for memory.  The result
    is the fastest choice over all k whose memory fits the devices' total.  Every device
    computes at least one sample, and all microbatches of a device are equal.
    O(N B^3 log B), vectorised over (j, k).
    """
    batch = global_batch_size
    best = np.full((batch + 1, batch + 1), np.inf)
    best[0, 0] = 0.0
    taken = []
    for times in seconds:
        following = np.full_like(best, np.inf)
        pick = np.zeros(best.shape, dtype=np.int64)
        pairs = [
            (size, number)
            for size in range(1, len(times))
            for number in range(1, min(batch // size, times.shape[1] - 1) + 1)
        ]
        for index, (size, number) in enumerate(pairs):
            samples = size * number
            slower = np.maximum(
                best[: batch + 1 - samples, : batch + 1 - size], times[size, number]
            )
            target = following[samples:, size:]
            is_better = slower < target
            target[is_better] = slower[is_better]
            pick[samples:, size:][is_better] = index
        taken.append((pairs, pick, following))
        best = following
    for k in np.argsort(best[batch], kind="stable"):
        if not np.isfinite(best[batch, k]):
            break
        choice = _traced(taken, batch, int(k))
        used = sum(table[each.size] for table, each in zip(bytes_by_size, choice, strict=True))
        if used <= total_bytes:
            return choice
    return None


def _traced(
    taken: Sequence[tuple[list[tuple[int, int]], Ints, Floats]], j: int, k: int
) -> tuple[WholeMicrobatches, ...]:
    """The choices that lead to (j, k) after the last device."""
    choice = []
    for pairs, pick, _ in reversed(taken):
        size, number = pairs[int(pick[j, k])]
        choice.append(WholeMicrobatches(size, number))
        j, k = j - size * number, k - size
    return tuple(reversed(choice))
