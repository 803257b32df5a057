"""From choices of candidates to plans: who stores how much of the state."""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from shardhet.planner.demands import Demands
from shardhet.planner.problem import Choice, Floats, fill_level
from shardhet.planner.receivers import depends_on_shares, least_uneven_shares
from shardhet.planner.table import Candidate, CandidateTable
from shardhet.pricing.cost import CostModel
from shardhet.records.plan import Plan, PlannedUnit, RankPlan


def plans_of_choices(
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
