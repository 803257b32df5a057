"""``find_plan``: the fastest plan that fits, with a bound on its distance from the optimum."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from shardhet.planner.assignment import assign
from shardhet.planner.candidates import Candidate, CandidateTable, TableBuilder
from shardhet.planner.certificate import Certificate, certify
from shardhet.planner.demands import Demands
from shardhet.planner.misses import nearest_miss
from shardhet.planner.problem import Choice, Value, fill_level
from shardhet.planner.search import DEFAULT_EFFORT, Effort, Found, NothingFitsError, search
from shardhet.planner.solution import NoRoomForRowsError, PlanError, PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.pricing.turns import Turns
from shardhet.records.plan import Plan, PlannedUnit, RankPlan
from shardhet.simulator.simulation import simulated_step_s

CUT_GROWTH = 4.0  # factor on the longest compute considered, while the cut may still matter
NUM_RESCORED = 4
RESCORED_MARGIN = 1e-3  # plans within this margin of the best prediction are simulated
LEAST_GAIN = 1e-3  # of the step, for which parameters that stay gathered may take memory
NO_GAIN = 1e-6  # of the step: not worth a search, but part of the bound
NO_DEMANDS = Demands()


def find_plan(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
) -> Plan:
    """The fastest plan that fits; ``solve`` also returns the proof."""
    return solve(
        setting,
        global_batch_size=global_batch_size,
        demands=demands,
        effort=effort,
    ).plan


def solve(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
    num_rescored: int = NUM_RESCORED,
) -> PlanSolution:
    """The fastest plan that fits every budget, with a bound on what any plan can reach.

    Up to ``num_rescored`` plans that are predicted to be within ``RESCORED_MARGIN`` of the
    fastest are simulated, and the fastest of these is taken; with 1, only the prediction
    counts.  Raises ``PlanError`` with the nearest miss if nothing fits.
    """
    if global_batch_size < 1:
        raise ValueError(
            f"plan: global_batch_size is {global_batch_size} but must be at least 1."
        )
    demands.check(setting.cluster.world_size)
    demands.check_batches(setting.cluster.world_size, global_batch_size)
    found: list[PlanSolution] = []
    bounds_s: list[float] = []
    missed: PlanError | None = None
    for reshards in (True, False):
        model = CostModel(setting, reshards)
        if found and _spared_s(model) <= NO_GAIN * found[0].predicted.step_time_s:
            bounds_s.append(found[0].lower_bound_s - _spared_s(model))
            continue
        try:
            solution = _solve_as(model, global_batch_size, demands, effort, num_rescored)
        except PlanError as error:
            missed = missed or error
            bound_s = error.lower_bound_s
        else:
            found.append(solution)
            bound_s = solution.lower_bound_s
        if demands.has_even_state or demands.state_shares(setting.cluster.world_size):
            lenient_s = _lenient_bound_s(model, global_batch_size, demands, effort)
            bound_s = min(bound_s, lenient_s)
        bounds_s.append(bound_s)
    if not found:
        assert missed is not None
        missed.lower_bound_s = min(bounds_s)
        raise missed
    return replace(_fastest(found, setting, num_rescored), lower_bound_s=min(bounds_s))


def _lenient_bound_s(
    model: CostModel, global_batch_size: int, demands: Demands, effort: Effort
) -> float:
    """A bound on plans that meet demanded shares to within rows; inf if there are none.

    The problem behind the plan leaves room for shares that are a few rows larger, so its own
    bound does not hold for plans whose shares are a few rows smaller.
    """
    builder = TableBuilder(
        model,
        global_batch_size=global_batch_size,
        demands=demands,
        effort=effort,
        is_lenient=True,
    )
    cut_s = builder.first_cut_s()
    while True:
        bound_s = inf
        try:
            table = builder.table(cut_s)
        except PlanError:  # a device can do nothing that is demanded of it
            return inf
        with suppress(NothingFitsError):
            bound_s = search(table.problem, effort).lower_bound_s
        if not table.is_cut or bound_s <= cut_s:
            return bound_s - _share_dependent_s(model, builder.turns)
        cut_s *= CUT_GROWTH


def _spared_s(model: CostModel) -> float:
    """How much plans that do not reshard after forward are at most faster than those that do.

    Each turn gains at most the gather that it is spared, times what compute loses beside it.
    """
    resharding = replace(model, reshard_after_forward=True).turns(unevenness=1.0)
    return _most_slowed(model) * (resharding.comm_s - model.turns(unevenness=1.0).comm_s)


def _fastest(
    found: Sequence[PlanSolution], setting: Setting, num_rescored: int
) -> PlanSolution:
    """The fastest of these; by simulation if predictions are close, the first if equal."""
    best = found[0]
    for other in found[1:]:
        ratio = other.predicted.step_time_s / best.predicted.step_time_s
        if num_rescored > 1 and abs(ratio - 1) <= RESCORED_MARGIN:
            of_both = [
                each.simulated_step_time_s or simulated_step_s(each.plan, setting)
                for each in (best, other)
            ]
            ratio = of_both[1] / of_both[0]
        if ratio < 1 - LEAST_GAIN:
            best = other
    return best


def _solve_as(
    model: CostModel,
    global_batch_size: int,
    demands: Demands,
    effort: Effort,
    num_rescored: int,
) -> PlanSolution:
    """The best plan of the model's kind of resharding, with a bound on plans of this kind."""
    builder = TableBuilder(
        model, global_batch_size=global_batch_size, demands=demands, effort=effort
    )
    table, found = _search(builder, effort)
    bound_s = found.lower_bound_s - _share_dependent_s(model, builder.turns)
    met = (found.choices, *found.runners_up)[:num_rescored]
    plans_of = partial(_fitting_plans, builder, demands, table, is_final=num_rescored > 1)
    fitting = plans_of(met) or plans_of(found.runners_up)
    if not fitting:
        raise NoRoomForRowsError(
            "plan: no share fits once it is rounded to rows. Raise a budget.",
            lower_bound_s=bound_s,
        )
    if num_rescored == 1 or len(fitting) == 1:
        return replace(fitting[0], lower_bound_s=bound_s)
    simulated = [
        (simulated_step_s(each.plan, model.setting), i)
        for i, each in enumerate(fitting[:num_rescored])
    ]
    simulated_s, best = min(simulated)
    return replace(fitting[best], lower_bound_s=bound_s, simulated_step_time_s=simulated_s)


def certify_search(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
) -> tuple[Certificate, Found]:
    """What HiGHS alone says about the problem behind a plan, and what the search found.

    The problem is that of ``solve``: shares of any size, communication as with even shares.
    Raises ``PlanError`` if nothing fits.
    """
    answers: list[tuple[Certificate, Found]] = []
    missed: PlanError | None = None
    for reshards in (True, False):
        builder = TableBuilder(
            CostModel(setting, reshards),
            global_batch_size=global_batch_size,
            demands=demands,
            effort=effort,
        )
        try:
            table, _ = _search(builder, effort)
        except PlanError as error:
            missed = missed or error
        else:
            answers.append((certify(table.problem), search(table.problem, effort)))
    if not answers:
        assert missed is not None
        raise missed
    return min(answers, key=lambda each: each[1].value.objective_s)


def least_step_s(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
    at_most_s: float = inf,
) -> float:
    """The step time of the best plan before its shares are rounded to rows, without the plan.

    Communication is as with even shares.  Returns ``at_most_s`` if nothing is faster, which
    saves candidates that compute longer than that.
    """
    demands.check(setting.cluster.world_size)
    for reshards in (True, False):
        builder = TableBuilder(
            CostModel(setting, reshards),
            global_batch_size=global_batch_size,
            demands=demands,
            effort=effort,
        )
        try:
            _, found = _search(builder, effort, at_most_s)
        except PlanError:
            continue
        at_most_s = min(at_most_s, found.value.objective_s)
    return at_most_s


def _search(
    builder: TableBuilder, effort: Effort, at_most_s: float = inf
) -> tuple[CandidateTable, Found]:
    """Search candidates up to a cut, raised until those left out are slower than the result.

    The bound holds for shares of any size; the choices leave room to round shares to rows.
    The cut is not raised beyond ``at_most_s``: nothing slower is asked for.
    """
    cut_s = min(builder.first_cut_s(), at_most_s)
    while True:
        table = builder.table(cut_s)
        is_last = not table.is_cut or cut_s >= at_most_s
        error, bound_s = PlanError, inf
        try:
            found = search(table.problem, effort)
            if table.rounded.evaluate(found.choices) is None:
                error, bound_s = NoRoomForRowsError, found.lower_bound_s
                tighter = search(table.rounded, effort)
                found = replace(tighter, lower_bound_s=bound_s)
        except NothingFitsError:
            if is_last:
                message = "nothing is as fast as demanded"
                if not table.is_cut:
                    message = nearest_miss(table.rounded, builder.model)
                raise error(message, lower_bound_s=bound_s) from None
        else:
            if is_last or found.value.objective_s <= cut_s:
                return table, found
        cut_s *= CUT_GROWTH


def _fitting_plans(
    builder: TableBuilder,
    demands: Demands,
    table: CandidateTable,
    met: Sequence[tuple[Choice, ...]],
    *,
    is_final: bool,
) -> list[PlanSolution]:
    """The plans of these choices that fit after rounding to rows, fastest first.

    HiGHS reassigns the candidates within the limits of each choice; if the plan ``is_final``,
    and not only its step of interest, also those that are as fast and compute less.  The state
    of each is spread in two ways: for the fastest optimizer, and as evenly as possible.  The
    plans do not have a bound yet.
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
        # The search's own choice is tried as well, in case that of HiGHS does not fit after
        # rounding to rows.
        by_highs = assign(wider.rounded, choices, value)
        for assignment in dict.fromkeys((by_highs, by_highs.replaced_by(choices))):
            from_table = wider if assignment.is_by_highs else table
            of_both = [
                PlanSolution(
                    plan=plan,
                    predicted=model.predict(plan).within(budgets),
                    lower_bound_s=0.0,
                    assignment=assignment,
                )
                for plan in dict.fromkeys(
                    _plan(model, demands, from_table, assignment.choices, optimizer_s)
                    for optimizer_s in (value.optimizer_s, inf)
                )
            ]
            solutions |= {each.plan: each for each in of_both if each.plan not in solutions}
            if any(each.fits for each in of_both):
                break
    fitting = [each for each in solutions.values() if each.fits]
    fitting.sort(key=lambda each: each.predicted.step_time_s)  # ties keep their order
    slowest_s = (1 + RESCORED_MARGIN) * min(
        (each.predicted.step_time_s for each in fitting), default=0.0
    )
    return [each for each in fitting if each.predicted.step_time_s <= slowest_s]


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


def _plan(
    model: CostModel,
    demands: Demands,
    table: CandidateTable,
    choices: Sequence[Choice],
    optimizer_s: float,
) -> Plan:
    """The plan of the choices, with shares as even as demands, room and optimizer allow."""
    problem, devices = table.rounded, model.cluster.devices
    taken: list[Candidate | None] = [None] * len(devices)
    room = np.zeros(len(devices))
    next_of_group = [iter(bundles) for bundles in table.bundles]
    for choice in choices:
        number = problem.groups[choice.group].num_members
        candidate = table.candidate(choice.group, choice.candidate)
        left = problem.room[choice.group, choice.candidate]
        left = min(left, problem.numel_within(choice.group, optimizer_s))
        for _ in range(choice.count):
            for position in next(next_of_group[choice.group]):
                taken[position] = candidate
                room[position] = left / number
    ones = np.ones(len(devices))
    demand = min(problem.state_numel, float(room.sum()))  # equal up to rounding
    level = fill_level(room, ones, ones, demand)
    stored = np.minimum(room, level if level is not None else inf)
    demanded = demands.state_shares(len(devices))
    shares = stored / stored.sum() if stored.any() else stored
    shares *= 1 - sum(demanded.values())
    for position, share in demanded.items():
        shares[position] = share
    ranks = tuple(
        RankPlan(
            microbatch_sizes=candidate.microbatch_sizes,
            state_share=float(share),
            recomputed_units=candidate.recomputed_units,
            device=device,
        )
        for candidate, share, device in zip(taken, shares, devices, strict=True)
        if candidate is not None
    )
    return Plan(
        ranks=ranks,
        reshard_after_forward=model.reshard_after_forward,
        units=tuple(
            PlannedUnit(fqn=unit.fqn, numel=model.workload.kind_of(unit).numel)
            for unit in model.workload.units
        ),
    )


def _share_dependent_s(model: CostModel, turns: Turns) -> float:
    """How much all communication of a step could at most gain over even shares.

    The search assumes even shares.  With few receivers, direct messages take less time; a
    turn gains at most what its communication does, times what compute loses beside it.
    """
    collectives = model.profile.collectives
    weights = (collectives.gather_unevenness_weight, collectives.reduce_unevenness_weight)
    if not any(weights):
        return 0.0
    return _most_slowed(model) * (turns.comm_s - model.turns(unevenness=0.0).comm_s)


def _most_slowed(model: CostModel) -> float:
    """Seconds that a turn takes at most longer per second of its collectives."""
    kinds = {device.kind for device in model.cluster.devices}
    return max(1.0, *(model.profile.device(kind).overlap_excess for kind in kinds))
