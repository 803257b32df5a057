"""``find_plan``: the fastest plan that fits, with a bound on its distance from the optimum."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from shardhet.planner.candidates.candidates import TableBuilder
from shardhet.planner.candidates.table import CandidateTable
from shardhet.planner.certificate import Certificate, certify
from shardhet.planner.misses import nearest_miss
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import NoRoomForRowsError, PlanError, PlanSolution
from shardhet.planner.receivers import Computing, depends_on_shares, who_computes
from shardhet.planner.search.search import (
    DEFAULT_EFFORT,
    Effort,
    Found,
    NothingFitsError,
    search,
)
from shardhet.planner.shares import NEAR_MARGIN, RESCORED_MARGIN, as_fast, fitting_plans
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan
from shardhet.simulator.simulation import simulated_step_s

CUT_GROWTH = 4.0  # factor on the longest compute considered, while the cut may still matter
NUM_RESCORED = 4
LEAST_GAIN = 1e-3  # of the step, for which parameters that stay gathered may take memory
NO_GAIN = 1e-6  # of the step: not worth a search, but part of the bound
# Where collectives depend on shares: searches at most, and the gap that ends them.
MAX_SEARCHES, SHARES_GAP = 48, 1e-3
COARSE = Effort(relative_gap=1e-3)
ROUNDING = 1e-9
# Parts of the room that rounding to rows may take, and what the first may cost.
ROW_PARTS, ROWS_GAP = (1.0, 0.5, 0.0), 1e-3
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
    is_bounded: bool = True,
) -> PlanSolution:
    """The fastest plan that fits every budget, with a bound on what any plan can reach.

    Up to ``num_rescored`` plans that are predicted to be within ``RESCORED_MARGIN`` of the
    fastest are simulated, and the fastest of these is taken; with 1, only the prediction
    counts.  Unless ``is_bounded``, the bound holds only for plans that meet demanded shares to
    the element, which takes a search less.  Raises ``PlanError`` with the nearest miss if
    nothing fits.
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
            bounds_s.append(min(bounds_s) - _spared_s(model))
            continue
        task = _Task(model, global_batch_size, demands, effort, num_rescored, is_bounded)
        solutions, bound_s, error = _solve_as(task)
        found += solutions
        missed = missed or error
        bounds_s.append(bound_s)
    if not found:
        assert missed is not None
        missed.lower_bound_s = min(bounds_s)
        raise missed
    best = replace(_fastest(found, setting, num_rescored), lower_bound_s=min(bounds_s))
    met = {each.plan: each for other in found for each in other.near if each.plan != best.plan}
    near = as_fast([best, *met.values()], margin=NEAR_MARGIN)
    return replace(best, near=tuple(each for each in near if each is not best))


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked, of plans of one kind of resharding."""

    model: CostModel
    global_batch_size: int
    demands: Demands
    effort: Effort
    num_rescored: int = NUM_RESCORED
    is_bounded: bool = True

    def builder(
        self,
        computing: Computing | None = None,
        *,
        row_part: float = 1.0,
        is_lenient: bool = False,
    ) -> TableBuilder:
        """Lists candidates, of all plans or of some."""
        listing = partial(
            TableBuilder,
            self.model,
            global_batch_size=self.global_batch_size,
            effort=self.effort,
            row_part=row_part,
            is_lenient=is_lenient,
        )
        if computing is None:
            return listing(demands=self.demands)
        return listing(
            demands=computing.demands,
            unevenness=computing.unevenness,
            stored=computing.stored(self.model.cluster.world_size),
        )


def _solve_as(task: _Task) -> tuple[list[PlanSolution], float, PlanError | None]:
    """The best plan if there is one, a bound on all, and why there is none.

    Where collectives depend on shares, plans are searched by which devices compute and by how
    uneven their shares are, those with the least bound first.
    """
    sets = None
    if depends_on_shares(task.model):
        sets = who_computes(task.builder(), task.demands)
    if not sets:
        every = Computing(task.demands, task.model.cluster.world_size, 1.0, 0.0)
        solution, bound_s, error = _solve_for(task, every)
        found = [] if solution is None else [solution]
        return found, bound_s - _share_dependent_s(task.model), error
    best: PlanSolution | None = None
    missed: PlanError | None = None
    order = count()
    # The first has the most devices that compute.
    waiting = [
        (0.0 if i == 0 else each.bound_s, next(order), each) for i, each in enumerate(sets)
    ]
    heapify(waiting)
    settled_s = inf
    for _ in range(MAX_SEARCHES):
        best_s = inf if best is None else best.predicted.step_time_s
        if not waiting or waiting[0][0] >= best_s / (1 + SHARES_GAP):
            break
        computing = heappop(waiting)[2]
        solution, bound_s, error = _solve_for(task, computing)
        bound_s, missed = max(bound_s, computing.bound_s), missed or error
        if solution is None:
            settled_s = min(settled_s, bound_s)
            continue
        if solution.predicted.step_time_s < best_s:
            best = solution
        most = min(computing.most_unevenness, _unevenness(task.model, solution))
        if most <= computing.unevenness * (1 + SHARES_GAP):
            settled_s = min(settled_s, bound_s)
            continue
        for half in computing.halves((computing.unevenness + most) / 2, bound_s):
            heappush(waiting, (bound_s, next(order), half))
    bound_s = min([settled_s, *(each.bound_s for _, _, each in waiting)])
    return ([] if best is None else [best]), bound_s, missed


def _unevenness(model: CostModel, solution: PlanSolution) -> float:
    """That of the plan's shares, as they are rounded to rows."""
    shares = [rank.stored_numel / model.workload.numel for rank in solution.predicted.ranks]
    computes = [rank.rank_batch_size > 0 for rank in solution.plan.ranks]
    return model.unevenness(shares, computes)


def _solve_for(
    task: _Task, computing: Computing
) -> tuple[PlanSolution | None, float, PlanError | None]:
    """The best plan of these, a bound on all of them, or why there is none."""
    solution: PlanSolution | None = None
    missed: PlanError | None = None
    try:
        solution = _best_plan(task, computing)
    except PlanError as error:
        missed, bound_s = error, error.lower_bound_s
    else:
        bound_s = solution.lower_bound_s
    demands = task.demands
    has_shares = demands.has_even_state or demands.state_shares(task.model.cluster.world_size)
    if task.is_bounded and (has_shares or demands.equal):
        bound_s = min(bound_s, _lenient_bound_s(task, computing))
    return solution, bound_s, missed


def _lenient_bound_s(task: _Task, computing: Computing) -> float:
    """A bound on plans that meet demanded shares to within rows; inf if there are none.

    The problem behind the plan leaves room for shares that are a few rows larger, and has
    equal devices store the same to the element.  So its own bound does not hold for plans
    whose shares are a few rows smaller.
    """
    builder = task.builder(computing, is_lenient=True)
    cut_s = builder.first_cut_s()
    while True:
        bound_s = inf
        try:
            cut_s = _close_cut_s(builder, cut_s)
            table = builder.table(cut_s)
        except PlanError as error:  # a device can do nothing that is demanded of it
            return error.lower_bound_s
        with suppress(NothingFitsError):
            bound_s = search(table.problem, task.effort).lower_bound_s
        if not table.is_cut or bound_s <= cut_s:
            return bound_s - builder.unequal_s
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


def _best_plan(task: _Task, computing: Computing) -> PlanSolution:
    """The best plan of these, with a bound on all of them.

    Where leaving room for rounding to rows costs time, plans with less of it are tried.
    """
    model, num_rescored = task.model, task.num_rescored
    fitting: list[PlanSolution] = []
    missed: NoRoomForRowsError | None = None
    for row_part in ROW_PARTS:
        builder = task.builder(computing, row_part=row_part)
        try:
            table, found, is_tight = _search(builder, task.effort)
        except NoRoomForRowsError as error:
            missed = missed or error
            continue
        met = (found.choices, *found.runners_up)[:num_rescored]
        plans_of = partial(
            fitting_plans, builder, computing.demands, table, is_final=num_rescored > 1
        )
        fitting += plans_of(met) or plans_of(found.runners_up)
        missed = NoRoomForRowsError(
            "plan: no share fits once it is rounded to rows. Raise a budget.",
            lower_bound_s=found.lower_bound_s,
        )
        if fitting and not is_tight:
            break
    assert missed is not None
    bound_s = missed.lower_bound_s
    if not fitting:
        raise missed
    near = tuple(fitting)
    fitting = as_fast(fitting, margin=RESCORED_MARGIN)
    if num_rescored == 1 or len(fitting) == 1:
        return replace(fitting[0], lower_bound_s=bound_s, near=near)
    simulated = [
        (simulated_step_s(each.plan, model.setting), i)
        for i, each in enumerate(fitting[:num_rescored])
    ]
    simulated_s, best = min(simulated)
    return replace(
        fitting[best], lower_bound_s=bound_s, simulated_step_time_s=simulated_s, near=near
    )


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
        task = _Task(CostModel(setting, reshards), global_batch_size, demands, effort)
        try:
            table, _, _ = _search(task.builder(), effort)
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
        task = _Task(CostModel(setting, reshards), global_batch_size, demands, effort)
        try:
            _, found, _ = _search(task.builder(), effort, at_most_s)
        except PlanError:
            continue
        at_most_s = min(at_most_s, found.value.objective_s)
    return at_most_s


def _close_cut_s(builder: TableBuilder, cut_s: float, at_most_s: float = inf) -> float:
    """A cut that leaves fewer batches where there are many; else ``cut_s`` itself.

    A plan with batches that are multiples of a stride is not faster than the best, so its step
    is a cut, and with it the batches that devices may compute are few.
    """
    builder.check_listed(cut_s, is_whole=True)
    stride = builder.stride(cut_s)
    while stride > 1:
        table = builder.table(cut_s, stride=stride)
        try:
            found = search(table.rounded, COARSE)
        except NothingFitsError:
            if not table.is_cut:
                message = nearest_miss(table.rounded, builder.model)
                raise PlanError(message, lower_bound_s=builder.least_s) from None
            cut_s = min(at_most_s, cut_s * CUT_GROWTH)
            if cut_s == at_most_s:
                return cut_s
            stride = builder.stride(cut_s)
            continue
        cut_s = min(at_most_s, found.value.objective_s * (1 + ROUNDING))
        closer = builder.stride(cut_s)
        if closer > stride / 2:
            break
        stride = closer
    return cut_s


def _search(
    builder: TableBuilder, effort: Effort, at_most_s: float = inf
) -> tuple[CandidateTable, Found, bool]:
    """Search candidates up to a cut, raised until those left out are slower than the result.

    The bound holds for shares of any size; the choices leave room to round shares to rows,
    and the last value is whether they are slower for it.  The cut is not raised beyond
    ``at_most_s``: nothing slower is asked for.
    """
    cut_s = _close_cut_s(builder, min(builder.first_cut_s(), at_most_s), at_most_s)
    while True:
        builder.check_listed(cut_s, is_whole=False)
        table = builder.table(cut_s)
        is_last = not table.is_cut or cut_s >= at_most_s
        error, bound_s, is_tight = PlanError, inf, False
        try:
            found = search(table.problem, effort)
            if table.rounded.evaluate(found.choices) is None:
                error, bound_s = NoRoomForRowsError, found.lower_bound_s
                tighter = search(table.rounded, effort)
                is_tight = tighter.value.objective_s > found.value.objective_s * (1 + ROWS_GAP)
                found = replace(tighter, lower_bound_s=bound_s)
        except NothingFitsError:
            if is_last:
                message = "nothing is as fast as demanded"
                if not table.is_cut:
                    message = nearest_miss(table.rounded, builder.model)
                raise error(message, lower_bound_s=bound_s) from None
        else:
            if is_last or found.value.objective_s <= cut_s:
                return table, found, is_tight
        cut_s *= CUT_GROWTH


def _share_dependent_s(model: CostModel) -> float:
    """How much all communication of a step could at most gain over even shares.

    With few receivers, direct messages take less time; a turn gains at most what its
    communication does, times what compute loses beside it.
    """
    if not depends_on_shares(model):
        return 0.0
    of_both = [model.turns(unevenness=each).comm_s for each in (1.0, 0.0)]
    return _most_slowed(model) * (of_both[0] - of_both[1])


def _most_slowed(model: CostModel) -> float:
    """Seconds that a turn takes at most longer per second of its collectives."""
    kinds = {device.kind for device in model.cluster.devices}
    return max(1.0, *(model.profile.device(kind).overlap_excess for kind in kinds))
