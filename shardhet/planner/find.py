"""``find_plan``: the fastest plan that fits, and how far from the optimum it can be at most."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import numpy as np

from shardhet.cluster import Cluster
from shardhet.cost import CostModel, StepCost, Turns
from shardhet.plan import Plan, PlannedUnit, RankPlan
from shardhet.planner.candidates import Candidate, CandidateTable, DeviceLimits, TableBuilder
from shardhet.planner.oracle import Oracle
from shardhet.planner.problem import Limits, Problem, fill_level
from shardhet.planner.search import DEFAULT_EFFORT, Effort, Found, NothingFitsError, search
from shardhet.planner.solution import PlanError, PlanSolution
from shardhet.profiles import Profile
from shardhet.workload import Workload

CUT_GROWTH = 4.0  # of the longest compute considered, while it may still cut something off
GIB = 2**30


def find_plan(
    cluster: Cluster,
    workload: Workload,
    profile: Profile,
    *,
    global_batch_size: int,
    limits: Mapping[int, DeviceLimits] | None = None,
    max_microbatch_size: int | None = None,
    effort: Effort = DEFAULT_EFFORT,
) -> Plan:
    """The fastest plan that fits; see ``solve`` for what is proven about it."""
    return solve(
        cluster,
        workload,
        profile,
        global_batch_size=global_batch_size,
        limits=limits,
        max_microbatch_size=max_microbatch_size,
        effort=effort,
    ).plan


def solve(
    cluster: Cluster,
    workload: Workload,
    profile: Profile,
    *,
    global_batch_size: int,
    limits: Mapping[int, DeviceLimits] | None = None,
    max_microbatch_size: int | None = None,
    has_even_state: bool = False,
    effort: Effort = DEFAULT_EFFORT,
) -> PlanSolution:
    """The fastest plan that fits every budget, with a bound on what any plan can reach.

    ``limits`` are demands on single devices, by their position in the cluster; with
    ``has_even_state`` all of them store the same.  Raises ``PlanError`` with the nearest miss
    where nothing fits.
    """
    if global_batch_size < 1:
        raise ValueError(
            f"plan: global_batch_size is {global_batch_size} but must be at least 1."
        )
    model = CostModel(cluster, workload, profile)
    turns = model.turns(unevenness=1.0)
    builder = TableBuilder(
        model,
        global_batch_size=global_batch_size,
        limits=limits or {},
        max_microbatch_size=max_microbatch_size,
        turns=turns,
        has_even_state=has_even_state,
    )
    table, found = _search(builder, effort)
    plan, predicted = best_rounding(model, table, found)
    bound_s = found.lower_bound_s - _share_dependent_s(model, turns)
    return PlanSolution(plan=plan, predicted=predicted, lower_bound_s=bound_s)


def _search(builder: TableBuilder, effort: Effort) -> tuple[CandidateTable, Found]:
    """Candidates up to a cut, raised until what was cut off is slower than what was found."""
    cut_s = builder.first_cut_s()
    while True:
        table = builder.table(cut_s)
        try:
            found = search(table.problem, effort)
        except NothingFitsError:
            if not table.is_cut:
                raise PlanError(nearest_miss(table.problem, builder.model)) from None
        else:
            if not table.is_cut or found.value.objective_s <= cut_s:
                return table, found
        cut_s *= CUT_GROWTH


def best_rounding(
    model: CostModel, table: CandidateTable, found: Found
) -> tuple[Plan, StepCost]:
    """The better of two ways to spread the state: fastest optimizer, or most even shares."""
    plans = [_plan(model, table, found, found.value.optimizer_s)]
    most_even = _plan(model, table, found, inf)
    plans += [most_even] * (most_even != plans[0])
    predictions = [model.predict(plan) for plan in plans]
    fitting = [
        (cost.step_time_s, i)
        for i, cost in enumerate(predictions)
        if all(rank.fits for rank in cost.ranks)
    ]
    if not fitting:
        raise PlanError("plan: no share fits once it is rounded to rows. Raise a budget.")
    _, i = min(fitting)
    return plans[i], predictions[i]


def _plan(model: CostModel, table: CandidateTable, found: Found, optimizer_s: float) -> Plan:
    """The plan of the choices, with shares as even as room and optimizer allow."""
    problem, devices = table.problem, model.cluster.devices
    taken: list[Candidate | None] = [None] * len(devices)
    room = np.zeros(len(devices))
    next_of_group = [iter(positions) for positions in table.positions]
    for choice in found.choices:
        candidate = table.candidate(choice.group, choice.candidate)
        left = problem.room[choice.group, choice.candidate] - problem.row_numel
        left = min(left, problem.numel_within(choice.group, optimizer_s))
        for _ in range(choice.count):
            position = next(next_of_group[choice.group])
            taken[position] = candidate
            room[position] = max(0.0, left)
    ones = np.ones(len(devices))
    demand = min(problem.state_numel, float(room.sum()))  # equal but for rounding
    level = fill_level(room, ones, ones, demand)
    stored = np.minimum(room, level if level is not None else inf)
    shares = stored / stored.sum()
    ranks = tuple(
        RankPlan(
            microbatch_sizes=candidate.microbatch_sizes,
            state_share=float(share),
            recomputed_units=candidate.recomputed_units if candidate.rank_batch_size else (),
            device=device,
        )
        for candidate, share, device in zip(taken, shares, devices, strict=True)
        if candidate is not None
    )
    return Plan(
        ranks=ranks,
        units=tuple(
            PlannedUnit(fqn=unit.fqn, numel=model.workload.kind_of(unit).numel)
            for unit in model.workload.units
        ),
    )


def _share_dependent_s(model: CostModel, turns: Turns) -> float:
    """How much faster than with even shares all communication of a step could be at most.

    The search counts even shares.  With few receivers direct messages take less; a turn
    gains no more than its communication does.
    """
    collectives = model.profile.collectives
    weights = (collectives.gather_unevenness_weight, collectives.reduce_unevenness_weight)
    if not any(weights):
        return 0.0
    return _comm_s(turns) - _comm_s(model.turns(unevenness=0.0))


def _comm_s(turns: Turns) -> float:
    beside = sum(each.forward_comm_s + each.backward_comm_s for each in turns.classes)
    return beside + turns.exposed_comm_s


def nearest_miss(problem: Problem, model: CostModel) -> str:
    """Why nothing fits and what would: the largest batch, or the memory that is missing."""
    wanted = problem.global_batch_size
    fits, misses = 0, wanted
    while misses - fits > 1:
        middle = (fits + misses) // 2
        if _fits(replace(problem, global_batch_size=middle)):
            fits = middle
        else:
            misses = middle
    if fits:
        return (
            f"plan: a global batch of {wanted} does not fit beside the state. Lower "
            f"global_batch_size to {fits}, or raise memory budgets."
        )
    per_numel = model.bytes_per_stored_numel
    room = sum(group.count * float(group.room.max()) for group in problem.groups)
    return (
        f"plan: the state of {problem.state_numel * per_numel / GIB:.2f} GiB does not fit: all "
        f"{model.cluster.world_size} devices together have room for "
        f"{room * per_numel / GIB:.2f} GiB while they compute nothing, and less beside one "
        "sample. Add devices, raise memory budgets, or train a smaller model."
    )


def _fits(problem: Problem) -> bool:
    return Oracle(problem).construct(Limits((inf,) * problem.num_phases)) is not None
