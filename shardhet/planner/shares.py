"""From choices of candidates to plans that fit: who stores how much of the state."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import inf

import numpy as np

from shardhet.planner.candidates.candidates import TableBuilder
from shardhet.planner.candidates.table import Candidate, CandidateTable
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.problem import Choice, Floats, Value, fill_level
from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.receivers import depends_on_shares, least_uneven_shares
from shardhet.planner.search.assignment import assign
from shardhet.pricing.cost import CostModel
from shardhet.records.plan import Plan, PlannedUnit, RankPlan

RESCORED_MARGIN = 1e-3  # plans within this margin of the best prediction count as equal
NEAR_MARGIN = 1e-2  # plans within this margin are kept
MAX_MOVES = 8  # of rows from devices that are too full


def fitting_plans(
    builder: TableBuilder,
    demands: Demands,
    table: CandidateTable,
    met: Sequence[tuple[Choice, ...]],
    *,
    is_final: bool,
) -> list[PlanSolution]:
    """The plans of these choices that fit after rounding to rows, fastest first.

    Candidates are assigned anew within the limits of each choice; if the plan ``is_final``,
    and not only its step of interest, also those that are as fast and compute less.  The state
    of each is spread in several ways.  The plans do not have a bound yet.
    """
    model = builder.model
    budgets = [demands.budget_bytes(model.cluster, i) for i in range(model.cluster.world_size)]
    solutions: dict[Plan, PlanSolution] = {}
    worth = [(choices, table.rounded.evaluate(choices)) for choices in met]
    values = [value for _, value in worth if value is not None]
    if not values:
        return []
    wider = _wider(builder, values) if is_final else table
    for choices, value in worth:
        if value is None:
            continue
        # The search's own choice is tried as well, in case the least compute does not fit
        # after rounding to rows.
        least = assign(wider.rounded, choices, value)
        for assignment in dict.fromkeys((least, least.replaced_by(choices))):
            from_table = wider if assignment.is_by_highs else table
            spread = [
                PlanSolution(
                    plan=plan,
                    predicted=model.predict(plan).within(budgets),
                    lower_bound_s=0.0,
                    assignment=assignment,
                )
                for plan in dict.fromkeys(
                    _plans_of_choices(
                        model, demands, from_table, assignment.choices, value.optimizer_s
                    )
                )
            ]
            if not any(each.fits for each in spread):
                spread += [
                    moved for each in spread if (moved := _rows_moved(each, model, demands))
                ]
            solutions |= {each.plan: each for each in spread if each.plan not in solutions}
            if any(each.fits for each in spread):
                break
    return as_fast([each for each in solutions.values() if each.fits], margin=NEAR_MARGIN)


def _rows_moved(
    solution: PlanSolution, model: CostModel, demands: Demands
) -> PlanSolution | None:
    """The plan with less on devices that are too full by a few rows; None if none fits.

    What they may not store goes to the others, in proportion to their room.
    """
    held = {*demands.state_shares(model.cluster.world_size), *chain(*demands.equal)}
    if demands.has_even_state or held:
        return None
    bytes_per_share = model.bytes_per_stored_numel * model.workload.numel
    for _ in range(MAX_MOVES):
        ranks = solution.predicted.ranks
        room = np.array([each.memory_budget_bytes - each.memory.total_bytes for each in ranks])
        over, free = np.minimum(room, 0.0), np.maximum(room, 0.0)
        if not over.any():
            return solution
        if -over.sum() >= free.sum():
            return None
        shares = np.array([each.state_share for each in solution.plan.ranks])
        shares = np.maximum(
            0.0, shares + (over - over.sum() * free / free.sum()) / bytes_per_share
        )
        planned = zip(solution.plan.ranks, shares / shares.sum(), strict=True)
        plan = replace(
            solution.plan,
            ranks=tuple(replace(rank, state_share=float(share)) for rank, share in planned),
        )
        budgets = [each.memory_budget_bytes for each in ranks]
        solution = replace(solution, plan=plan, predicted=model.predict(plan).within(budgets))
    return solution if solution.fits else None


def as_fast(solutions: Sequence[PlanSolution], *, margin: float) -> list[PlanSolution]:
    """Those that are slower than the fastest by no more than ``margin``, in order."""
    ranked = sorted(solutions, key=lambda each: each.predicted.step_time_s)  # stable
    slowest_s = (1 + margin) * min((each.predicted.step_time_s for each in ranked), default=0.0)
    return [each for each in ranked if each.predicted.step_time_s <= slowest_s]


def _wider(builder: TableBuilder, values: Sequence[Value]) -> CandidateTable:
    """All candidates that may be as fast as these choices, with those that compute less.

    Where links hide compute, ``builder.table`` has only one of candidates that are equally
    fast, perhaps one that recomputes.
    """
    longest_s = [
        max(column) for column in zip(*(each.phases_s for each in values), strict=True)
    ]
    cut_s = 1.01 * max(each.objective_s for each in values)  # no device computes longer
    return builder.table(cut_s, within_s=longest_s)


def _plans_of_choices(
    model: CostModel,
    demands: Demands,
    table: CandidateTable,
    choices: Sequence[Choice],
    optimizer_s: float,
) -> Iterator[Plan]:
    """The plans of the choices, whose state is spread in several ways.

    For an optimizer that takes ``optimizer_s``, as evenly as room allows, and where collectives
    depend on it also so that they take the least time.
    """
    number = len(model.cluster.devices)
    demanded = demands.state_shares(number)
    if demands.has_even_state:
        taken, _ = _taken(model, table, choices, inf)
        yield _plan(model, taken, np.full(number, 1 / number))
        return
    for within_s in (optimizer_s, inf):
        taken, room = _taken(model, table, choices, within_s)
        level = fill_level(
            room,
            np.ones(number),
            np.ones(number),
            min(table.problem.state_numel, float(room.sum())),  # equal up to rounding
        )
        stored = np.minimum(room, level if level is not None else inf)
        shares = stored / stored.sum() if stored.any() else stored
        shares *= 1 - sum(demanded.values())
        for position, share in demanded.items():
            shares[position] = share
        yield _plan(model, taken, shares)
    if depends_on_shares(model):
        computes = np.array([bool(each.microbatch_sizes) for each in taken])
        part = (1 - sum(demanded.values())) / (table.problem.state_numel or 1.0)
        spread = least_uneven_shares(computes, room * part, demanded)
        if spread is not None:
            yield _plan(model, taken, spread)


def _taken(
    model: CostModel, table: CandidateTable, choices: Sequence[Choice], optimizer_s: float
) -> tuple[list[Candidate], Floats]:
    """What each device does, and the elements that it may store within the optimizer's time."""
    problem, number = table.rounded, len(model.cluster.devices)
    taken: dict[int, Candidate] = {}
    room = np.zeros(number)
    next_of_group = [iter(bundles) for bundles in table.bundles]
    for choice in choices:
        members = problem.groups[choice.group].num_members
        candidate = table.candidate(choice.group, choice.candidate)
        left = problem.room[choice.group, choice.candidate]
        left = min(left, problem.numel_within(choice.group, optimizer_s))
        for _ in range(choice.count):
            for position in next(next_of_group[choice.group]):
                taken[position] = candidate
                room[position] = left / members
    return [taken[position] for position in range(number)], room


def _plan(model: CostModel, taken: Sequence[Candidate], shares: Floats) -> Plan:
    ranks = tuple(
        RankPlan(
            microbatch_sizes=candidate.microbatch_sizes,
            state_share=float(share),
            recomputed_units=candidate.recomputed_units,
            device=device,
        )
        for candidate, share, device in zip(taken, shares, model.cluster.devices, strict=True)
    )
    return Plan(
        ranks=ranks,
        reshard_after_forward=model.reshard_after_forward,
        units=tuple(
            PlannedUnit(fqn=unit.fqn, numel=model.workload.kind_of(unit).numel)
            for unit in model.workload.units
        ),
    )
