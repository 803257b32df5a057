"""Explain why no plan fits, and what would fit."""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from shardhet.planner.problem.demands import NO_LIMITS, Demands
from shardhet.planner.problem.problem import Limits, Problem
from shardhet.planner.search.oracle import Oracle
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import EVERY_UNIT, RankPlan

GIB = 2**30


def nearest_miss(problem: Problem, model: CostModel, stride: int = 1) -> str:
    """Why nothing fits, and what would: the largest batch, or the memory that is missing.

    Of large batches, the problem has those that are multiples of ``stride``.
    """
    wanted = problem.global_batch_size
    fits, misses = 0, -(-wanted // stride)
    while misses - fits > 1:
        middle = (fits + misses) // 2
        if _fits(replace(problem, global_batch_size=middle * stride)):
            fits = middle
        else:
            misses = middle
    if fits or stride > 1:
        lower = f"to {fits * stride:,}" if fits else f"below {stride:,}"
        return (
            f"plan: a global batch of {wanted:,} does not fit beside the state. Lower "
            f"global_batch_size {lower}, or raise memory budgets."
        )
    per_numel = model.bytes_per_stored_numel
    room = sum(group.count * float(group.room.max()) for group in problem.groups)
    if room >= problem.state_numel:
        return _no_sample_fits(model)
    is_rest = problem.state_numel < model.workload.numel * (1 - 1e-6)
    state, who = (
        ("the rest of the state, beside what limits fix, of", "the other devices")
        if is_rest
        else ("the state of", f"all {model.cluster.world_size} devices")
    )
    return (
        f"plan: {state} {problem.state_numel * per_numel / GIB:.2f} GiB does not fit: {who} "
        f"together have room for {room * per_numel / GIB:.2f} GiB while they compute nothing, "
        "and less beside one sample. Add devices, raise memory budgets, or train a smaller "
        "model."
    )


def _no_sample_fits(model: CostModel) -> str:
    """The state fits; say what a single sample needs where it needs least."""
    every = RankPlan(microbatch_sizes=(1,), state_share=0.0, recomputed_units=EVERY_UNIT)
    one = np.array([1])
    needed = {
        i: float(model.working_bytes(device.kind, every, one, one)[0])
        for i, device in enumerate(model.cluster.devices)
    }
    roomiest = max(needed, key=lambda i: model.cluster.memory_budget_bytes(i) - needed[i])
    budget = model.cluster.memory_budget_bytes(roomiest)
    return (
        f"plan: the state fits, but no single sample beside it: device {roomiest} "
        f"({model.cluster.devices[roomiest]}) needs {needed[roomiest] / GIB:.2f} GiB for one, "
        f"with everything recomputed, of {budget / GIB:.2f} GiB. Take shorter samples "
        "(seq_len), add memory, or cut the model into smaller units."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A device on which a plan does not fit."""

    position: int
    needed_bytes: float
    budget_bytes: float


def even_shortfall(
    setting: Setting, *, global_batch_size: int, demands: Demands
) -> Shortfall | None:
    """The device that lacks most where all compute and store the same; None if all fit.

    Each computes one sample at a time and recomputes everything, which needs the least memory.
    """
    model = CostModel(setting)
    world_size = setting.cluster.world_size
    batch = np.array([global_batch_size // world_size])
    every = RankPlan(microbatch_sizes=(1,), state_share=0.0, recomputed_units=EVERY_UNIT)
    stored = model.workload.numel / world_size
    found = []
    for i, device in enumerate(setting.cluster.devices):
        one = np.array([1])
        needed = model.used_bytes(device.kind, every, batch, one, stored_numel=stored)
        budget_bytes = setting.cluster.memory_budget_bytes(i)
        demanded = demands.limits.get(i, NO_LIMITS).memory_budget_bytes
        found.append(
            Shortfall(
                position=i,
                needed_bytes=float(needed[0]),
                budget_bytes=min(budget_bytes, demanded or budget_bytes),
            )
        )
    worst = max(found, key=lambda each: each.needed_bytes - each.budget_bytes)
    return worst if worst.needed_bytes > worst.budget_bytes else None


def _fits(problem: Problem) -> bool:
    return Oracle(problem).construct(Limits((inf,) * problem.num_phases)) is not None
