"""Explain why no plan fits, and what would fit."""

from dataclasses import replace
from math import inf

from shardhet.planner.candidates.candidates import TableBuilder
from shardhet.planner.problem.constraints import Constraints, host_bytes
from shardhet.planner.problem.problem import Limits, Problem
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.search.oracle import Oracle
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.records.plan import EVERY_UNIT, RankPlan

GIB = 2**30
MAX_DEVICES, MAX_UNITS = 2**16, 2**14


def nearest_miss(problem: Problem, builder: TableBuilder, *, stride: int = 1) -> str:
    """Why nothing fits, and what would: the largest batch, or the memory that is missing.

    The problem is that of one round.  Of large batches, it has those that are multiples of
    ``stride``.
    """
    model, rounds = builder.model, builder.rounds
    fits, misses = 0, -(-problem.global_batch_size // stride)
    while misses - fits > 1:
        middle = (fits + misses) // 2
        if _fits(replace(problem, global_batch_size=middle * stride)):
            fits = middle
        else:
            misses = middle
    if fits or stride > 1:
        step = rounds.number * stride
        lower = f"to {fits * step:,}" if fits else f"below {step:,}"
        return (
            f"plan: a global batch of {rounds.global_batch_size:,} does not fit beside the "
            f"state. Lower global_batch_size {lower}, or raise memory budgets."
        )
    per_numel = model.bytes_per_stored_numel
    room = sum(group.count * float(group.room.max()) for group in problem.groups)
    if room >= problem.state_numel:
        if min(host_bytes(builder.constraints, model.cluster)) < inf:
            return hosts_too_small(model)
        return _no_sample_fits(
            model, builder.constraints, problem.state_numel, room * per_numel
        )
    is_rest = problem.state_numel < model.workload.numel * (1 - 1e-6)
    state, who = (
        ("the rest of the state, beside what limits fix, of", "the other devices")
        if is_rest
        else ("the state of", f"all {model.cluster.world_size} devices")
    )
    return (
        f"plan: {state} {_state(model, problem.state_numel)} does not fit: {who} "
        f"together have room for {_gib(room * per_numel)} while they compute nothing, "
        "and less beside one sample. Add devices, raise memory budgets, or train a smaller "
        "model."
    )


def hosts_too_small(model: CostModel) -> str:
    """Why nothing fits that would if devices need not share the memory of their hosts."""
    memory = [(node.host_memory_bytes, node.host) for node in model.cluster.nodes]
    stated = " and ".join(f"{_gib(nbytes)} on {host}" for nbytes, host in memory if nbytes)
    return (
        f"plan: the state of {_state(model, model.workload.numel)} does not fit beside a "
        f"sample: the memory of hosts is the limit, {stated} (host_memory_bytes). Raise it or "
        "memory budgets, or add devices."
    )


def _no_sample_fits(
    model: CostModel, constraints: Constraints, state_numel: float, room_bytes: float
) -> str:
    """The state fits in the room of idle devices; say what a single sample needs at best."""
    every = RankPlan(
        microbatch_sizes=(1,),
        state_share=0.0,
        recomputed_units=EVERY_UNIT,
        tiled_units=EVERY_UNIT if model.may_tile else (),
    )
    budgets = constraints.budgets(model.cluster)
    needed, taken = dict[int, float](), dict[int, float]()  # also by the idle; for the sample
    for i, device in enumerate(model.cluster.devices):
        if constraints.rank_batch_size(i) != 0:
            needed[i] = float(model.lines_of(replace(every, device=device))[0].max())
            taken[i] = needed[i] - model.profile.device(device.kind).reserved_bytes
    enough = [i for i in needed if needed[i] <= budgets[i]]
    i = max(needed, key=lambda i: budgets[i] - needed[i])
    left = ""
    if enough:
        i = min(enough, key=taken.__getitem__)
        left_bytes = room_bytes - taken[i]
        if left_bytes < state_numel * model.bytes_per_stored_numel:
            left = (
                f", which leaves room on all devices for {_gib(left_bytes)} of the state of "
                f"{_state(model, state_numel)}"
            )
    return (
        f"plan: the state fits, but no single sample beside it: device {i} "
        f"({model.cluster.devices[i]}) needs {_gib(needed[i])} for one, with everything "
        f"recomputed, of {_gib(budgets[i])}{left}. Take shorter samples (seq_len), add "
        "memory, or cut the model into smaller units."
    )


def _state(model: CostModel, numel: float) -> str:
    """How much the state takes, by itself and with the copies that collectives make of it."""
    alone = _gib(numel * model.workload.state_bytes_per_element)
    whole = _gib(numel * model.bytes_per_stored_numel)
    return whole if whole == alone else f"{whole} ({alone}, and copies that collectives make)"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / GIB:.3g} GiB"


def _fits(problem: Problem) -> bool:
    return Oracle(problem).construct(Limits((inf,) * problem.num_phases)) is not None


def check_size(scenario: Scenario) -> None:
    """Refuse what would take minutes or more: ``PlanError``."""
    for number, most, what in (
        (scenario.cluster.world_size, MAX_DEVICES, "devices"),
        (len(scenario.workload.units), MAX_UNITS, "units of the model"),
    ):
        if number > most:
            raise PlanError(
                f"plan: {number:,} {what} but plans are searched for up to {most:,}. Plan for "
                "a part of them."
            )
