"""From choices of candidates to plans that fit: who stores how much of the state."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, islice
from math import inf

import numpy as np

from shardhet.planner.candidates.table import Candidate, CandidateTable
from shardhet.planner.forms import BatchRounds
from shardhet.planner.hosts import as_evenly, within_hosts
from shardhet.planner.problem.constraints import Constraints, host_bytes
from shardhet.planner.problem.problem import Choice, Floats
from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.receivers import depends_on_shares, least_uneven_shares
from shardhet.pricing.cost import CostModel
from shardhet.records.cluster import DeviceSpec
from shardhet.records.codec import first_places
from shardhet.records.plan import Plan, RankPlan

MAX_MOVES = 8  # of rows from devices that are too full
LEVEL_BISECTIONS = 50


def fitting_plans(
    model: CostModel,
    constraints: Constraints,
    table: CandidateTable,
    pool: Sequence[tuple[Choice, ...]],
) -> list[PlanSolution]:
    """The plans of the first of these choices with any that fit after rounding to rows.

    The state is spread in several ways.  The plans do not have a bound yet.
    """
    for choices in pool:
        value = table.rounded.evaluate(choices)
        if value is None:
            continue
        spread = []
        for plan in plans_of_choices(model, constraints, table, choices, value.optimizer_s):
            spread.append(priced(plan, model, constraints))
            if spread[-1].fits and not depends_on_shares(model):
                return spread[-1:]  # the others are not faster
        if not any(each.fits for each in spread):
            spread += [
                moved for each in spread if (moved := _rows_moved(each, model, constraints))
            ]
        fitting = [each for each in spread if each.fits]
        if fitting:
            return fitting
    return []


def priced(plan: Plan, model: CostModel, constraints: Constraints) -> PlanSolution:
    """The plan with its predicted cost, without a bound."""
    predicted = model.predict(plan).within(constraints.budgets(model.cluster))
    return PlanSolution(plan=plan, predicted=predicted, lower_bound_s=0.0)


def _rows_moved(
    solution: PlanSolution, model: CostModel, constraints: Constraints
) -> PlanSolution | None:
    """The plan with less on devices that are too full by a few rows; None if none fits.

    What they may not store goes to the others, in proportion to their room.
    """
    held = {*constraints.state_shares(model.cluster.world_size), *chain(*constraints.equal)}
    if constraints.has_even_state or held:
        return None
    per_share = np.array(
        [
            [
                model.workload.numel * each
                for each in model.of_rank(solution.plan, i).bytes_per_numel_range(rank)
            ]
            for i, rank in enumerate(solution.plan.ranks)
        ]
    )
    for _ in range(MAX_MOVES):
        ranks = solution.predicted.ranks
        room = np.array([each.memory_budget_bytes - each.memory.total_bytes for each in ranks])
        over, free = np.minimum(room, 0.0), np.maximum(room, 0.0)
        if not over.any():
            return solution
        if -over.sum() >= free.sum():
            return None
        shares = np.array([each.state_share for each in solution.plan.ranks])
        too_many, lacking = over / per_share[:, 0], free / per_share[:, 1]
        shares = np.maximum(0.0, shares + too_many - too_many.sum() * lacking / lacking.sum())
        planned = zip(solution.plan.ranks, shares / shares.sum(), strict=True)
        plan = replace(
            solution.plan,
            ranks=tuple(replace(rank, state_share=float(share)) for rank, share in planned),
        )
        budgets = [each.memory_budget_bytes for each in ranks]
        solution = replace(solution, plan=plan, predicted=model.predict(plan).within(budgets))
    return solution if solution.fits else None


def plans_of_choices(
    model: CostModel,
    constraints: Constraints,
    table: CandidateTable,
    choices: Sequence[Choice],
    optimizer_s: float,
    *,
    to_one_level: bool = False,
) -> Iterator[Plan]:
    """The plans of the choices, whose state is spread in several ways.

    For an optimizer that takes ``optimizer_s``, to one level of all budgets if that is wanted,
    and as evenly as room allows.  Where collectives depend on it, also so that they take the
    least time.
    """
    number = len(model.cluster.devices)
    demanded = constraints.state_shares(number)
    if constraints.has_even_state:
        taken, _ = _taken(model, constraints, table, choices, inf)
        yield _plan(model, constraints, table.rounds, taken, np.full(number, 1 / number))
        return
    wanted = table.problem.state_numel
    ways = [(optimizer_s, True)] * to_one_level + [(optimizer_s, False), (inf, False)]
    for within_s, is_level in ways:
        taken, room = _taken(model, constraints, table, choices, within_s)
        if any(each.optimizer_on_host for each in taken):
            ranks = tuple(map(_rank_plan, taken, [0.0] * number, model.cluster.devices))
            room = within_hosts(model, constraints, ranks, room, table.problem.row_numel)
        stored = (
            _to_one_level(model, constraints, taken, room, wanted)
            if is_level
            else as_evenly(room, wanted)
        )
        shares = stored / stored.sum() if stored.any() else stored
        shares *= 1 - sum(demanded.values())
        for position, share in demanded.items():
            shares[position] = share
        yield _plan(model, constraints, table.rounds, taken, shares)
    if depends_on_shares(model):
        computes = np.array([bool(each.microbatch_sizes) for each in taken])
        part = (1 - sum(demanded.values())) / (table.problem.state_numel or 1.0)
        spread = least_uneven_shares(computes, room * part, demanded)
        if spread is not None:
            yield _plan(model, constraints, table.rounds, taken, spread)


def _to_one_level(
    model: CostModel,
    constraints: Constraints,
    taken: Sequence[Candidate],
    room: Floats,
    wanted: float,
) -> Floats:
    """Elements on each device within its room, such that all are filled to the same part."""
    roles = list(zip(map(id, constraints.roles(model.cluster)), map(id, taken), strict=True))
    first, lines = first_places(roles), []
    for i in first.values():
        own = model.of_member(constraints.member(i))
        lines.append(own.lines_of(_rank_plan(taken[i], 0.0, model.cluster.devices[i])))
    # [roles, moments], of each role as many as of that with the most
    most = max(each.shape[1] for each in lines)
    padded = [np.pad(each, ((0, 0), (0, most - each.shape[1])), "edge") for each in lines]
    beside, per_numel = np.moveaxis(np.array(padded), 1, 0)
    budgets = np.array(constraints.budgets(model.cluster), dtype=np.float64)[[*first.values()]]
    number = {role: n for n, role in enumerate(first)}
    numbers = np.array([number[role] for role in roles])
    low, high = 0.0, 1.0
    for _ in range(LEVEL_BISECTIONS):
        level = (low + high) / 2
        fits = ((level * budgets[:, None] - beside) / per_numel).min(axis=1)
        stored = np.clip(fits[numbers], 0.0, room)
        for positions in map(list, constraints.equal):
            stored[positions] = stored[positions].min()
        low, high = (level, high) if stored.sum() < wanted else (low, level)
    return stored


def _taken(
    model: CostModel,
    constraints: Constraints,
    table: CandidateTable,
    choices: Sequence[Choice],
    optimizer_s: float,
) -> tuple[list[Candidate], Floats]:
    """What each device does, and the elements that it may store within the optimizer's time."""
    problem, number = table.rounded, len(model.cluster.devices)
    taken: dict[int, Candidate] = {}
    room = np.zeros(number)
    next_of_group = [iter(equal_groups) for equal_groups in table.equal_groups]
    for choice in choices:
        members = problem.groups[choice.group].num_members
        candidate = table.candidate(choice.group, choice.candidate)
        left = problem.room[choice.group, choice.candidate]
        caps = problem.numels_within(choice.group, optimizer_s)
        left = min(left, caps[min(choice.candidate, len(caps) - 1)])
        sets = list(islice(next_of_group[choice.group], choice.count))
        positions = list(chain.from_iterable(sets))
        taken |= dict.fromkeys(positions, candidate)
        room[positions] = left / members
        for each in (
            sets if constraints.context_groups and constraints.member(sets[0][0]) else ()
        ):
            own = _rooms_of_members(model, constraints, candidate, each)
            own -= table.problem.row_numel
            room[list(each)] = own * min(1.0, left / own.sum())
    return [taken[position] for position in range(number)], room


def _rooms_of_members(
    model: CostModel, constraints: Constraints, candidate: Candidate, positions: Sequence[int]
) -> Floats:
    """Elements that fit on each member of a context group."""
    cluster, sizes = model.cluster, candidate.microbatch_sizes
    of_hosts = host_bytes(constraints, cluster)
    rooms = [
        model.of_member(constraints.member(i)).room_for_state(
            [_rank_plan(candidate, 0.0, cluster.devices[i])],
            cluster.devices[i].kind,
            constraints.budget_bytes(cluster, i),
            batches=np.array([sum(sizes)]),
            sizes=np.array([max(sizes, default=1)]),
            host_bytes=of_hosts[i],
        )
        for i in positions
    ]
    return np.concatenate(rooms, axis=None)


def _plan(
    model: CostModel,
    constraints: Constraints,
    rounds: BatchRounds,
    taken: Sequence[Candidate],
    shares: Floats,
) -> Plan:
    # Devices of one role, whose host says no more of them, are one object.
    trios = list(zip(taken, shares.tolist(), model.cluster.devices, strict=True))
    looks = [(id(candidate), share, id(device)) for candidate, share, device in trios]
    known = {look: _rank_plan(*trios[i]) for look, i in first_places(looks).items()}
    ranks = [*map(known.__getitem__, looks)]
    groups = [each for each in constraints.context_groups if taken[min(each)].microbatch_sizes]
    for i, member in (pair for each in groups for pair in each.items()):
        ranks[i] = replace(ranks[i], token_share=member.token_share)
    return Plan(
        ranks=tuple(ranks),
        context_groups=tuple(tuple(sorted(each)) for each in groups) or None,
        **asdict(model.form),
        two_level_units=model.two_level_units,
        resident_units=model.resident_units,
        last_round_size=rounds.last_size,
        units=model.workload.planned_units,
    )


def _rank_plan(candidate: Candidate, share: float, device: DeviceSpec) -> RankPlan:
    return RankPlan(
        microbatch_sizes=candidate.microbatch_sizes,
        state_share=share,
        recomputed_units=candidate.recomputed_units,
        tiled_units=candidate.tiled_units,
        inputs_on_host=candidate.inputs_on_host,
        optimizer_on_host=candidate.optimizer_on_host,
        device=device,
    )
