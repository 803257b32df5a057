"""The best plan of one form of a step, with a bound on all of them."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

import numpy as np

from shardhet.planner.candidates.candidates import LeastCompute, TableBuilder
from shardhet.planner.candidates.table import CandidateTable
from shardhet.planner.forms import BatchRounds
from shardhet.planner.hosts import divisions, step_s
from shardhet.planner.infeasible import hosts_too_small, nearest_miss
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.problem import Limits, Problem
from shardhet.planner.problem.solution import NoRoomForRowsError, PlanError, PlanSolution
from shardhet.planner.receivers import Computing, depends_on_shares, who_computes
from shardhet.planner.search.oracle import Oracle
from shardhet.planner.search.search import Effort, Found, NothingFitsError, search
from shardhet.planner.shares import fitting_plans
from shardhet.pricing.cost import CostModel
from shardhet.records.plan import EVERY_UNIT

CUT_GROWTH = 4.0  # factor on the longest compute considered, while the cut may still matter
# Where collectives depend on shares: searches at most, and the gap that ends them.
MAX_SEARCHES, SHARES_GAP = 48, 1e-3
COARSE = Effort(relative_gap=1e-3)
HOSTS_GAP = 1e-5  # that ends the search for parts of the memory of hosts
ROUNDING = 1e-9
TOO_SLOW = "nothing is as fast as demanded"
# Parts of the room that rounding to rows may take, and what the first may cost.
ROW_PARTS, ROWS_GAP = (1.0, 0.5, 0.0), 1e-3


@dataclass(frozen=True, slots=True)
class FormTask:
    """What is asked, of plans of one form."""

    model: CostModel  # in the form
    rounds: BatchRounds
    constraints: Constraints  # of one round
    effort: Effort
    is_bounded: bool = True  # else the bound holds for plans that meet shares to the element
    cutoff_s: float = inf  # slower plans are not asked for
    is_only_faster: bool = False  # nor is how much slower the best of the form is
    has_endless_memory: bool = False  # plans need not fit: for a bound

    @property
    def memory_frugality(self) -> tuple[float, ...]:
        """More for forms whose plans need less memory."""
        form, resident = self.model.form, self.model.resident_units
        num_resident = inf if resident == EVERY_UNIT else len(resident)
        gathers = form.reshard_after_forward, form.reshard_after_backward
        return self.rounds.number, -num_resident, *gathers, form.reduce_each_round

    @property
    def has_shares(self) -> bool:
        """Whether shares are demanded, which the problem makes room for with some rows more."""
        constraints = self.constraints
        shares = constraints.state_shares(self.model.cluster.world_size)
        return bool(constraints.has_even_state or shares)

    @property
    def is_satisfied_to_rows(self) -> bool:
        """Whether plans may be faster by some rows than what meets the constraints exactly."""
        return self.has_shares or bool(self.constraints.equal)

    @property
    def is_exact(self) -> bool:
        """Whether no plan is faster than the search says of its candidates.

        With hosts, they are priced as if all devices of a host copied at once.
        """
        constraints, is_even = self.constraints, self.rounds.are_equal
        on_hosts = constraints.may_keep_inputs_on_host or constraints.may_keep_optimizer_on_host
        return is_even and not on_hosts and not depends_on_shares(self.model)

    def builder(
        self,
        computing: Computing | None = None,
        *,
        row_part: float = 1.0,
        is_relaxed: bool = False,
    ) -> TableBuilder:
        """Lists candidates, of all plans or of some."""
        listing = partial(
            TableBuilder,
            self.model,
            rounds=self.rounds,
            has_endless_memory=self.has_endless_memory,
            effort=self.effort,
            row_part=row_part,
            is_relaxed=is_relaxed,
        )
        if computing is None:
            return listing(constraints=self.constraints)
        return listing(
            constraints=computing.constraints,
            unevenness=computing.unevenness,
            stored=computing.stored(self.model.cluster.world_size),
        )


def solve_form(task: FormTask) -> tuple[list[PlanSolution], float, PlanError | None]:
    """The best plan if there is one, a bound on all, and why there is none.

    Where collectives depend on shares, plans are searched by which devices compute and by how
    uneven their shares are, those with the least bound first.
    """
    sets = None
    if depends_on_shares(task.model):
        sets = who_computes(task.builder(), task.constraints)
    if not sets:
        every = Computing.every(task.constraints, task.model.cluster.world_size)
        solution, bound_s, error = _solve_for(task, every)
        found = [] if solution is None else [solution]
        return found, bound_s - _share_dependent_s(task.model), error
    best: PlanSolution | None = None
    why_none: PlanError | None = None
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
        bound_s, why_none = max(bound_s, computing.bound_s), why_none or error
        if solution is None:
            settled_s = min(settled_s, bound_s)
            continue
        if solution.predicted.step_time_s < best_s:
            best = solution
        most = min(computing.most_unevenness, unevenness_of(task.model, solution))
        if most <= computing.unevenness * (1 + SHARES_GAP):
            settled_s = min(settled_s, bound_s)
            continue
        for half in computing.halves((computing.unevenness + most) / 2, bound_s):
            heappush(waiting, (bound_s, next(order), half))
    bound_s = min([settled_s, *(each.bound_s for _, _, each in waiting)])
    return ([] if best is None else [best]), bound_s, why_none


def unevenness_of(model: CostModel, solution: PlanSolution) -> float:
    """That of the plan's shares, as they are rounded to rows."""
    stored = [rank.stored_numel for rank in solution.predicted.ranks]
    return model.unevenness_of(solution.plan.ranks, stored, range(len(stored)))


def _solve_for(
    task: FormTask, computing: Computing
) -> tuple[PlanSolution | None, float, PlanError | None]:
    """The best plan of these, a bound on all of them, or why there is none."""
    solution: PlanSolution | None = None
    why_none: PlanError | None = None
    try:
        solution = _best_plan(task, computing)
    except PlanError as error:
        why_none, bound_s = error, error.lower_bound_s
    else:
        bound_s = solution.lower_bound_s
    if task.is_bounded and task.is_satisfied_to_rows:
        bound_s = min(bound_s, _lenient_bound_s(task, computing))
    return solution, bound_s, why_none


def _lenient_bound_s(task: FormTask, computing: Computing) -> float:
    """A bound on plans that meet demanded shares to within rows; inf if none is asked for.

    The problem behind the plan leaves room for shares that are a few rows larger, and has
    equal devices store the same to the element.  So its own bound does not hold for plans
    whose shares are a few rows smaller.
    """
    builder = task.builder(computing, is_relaxed=True)
    most_s = task.cutoff_s + builder.unequal_s
    cut_s = min(builder.first_cut_s(), most_s)
    while True:
        bound_s = inf
        try:
            cut_s = _close_cut_s(builder, cut_s, most_s)
            table = builder.table(cut_s)
        except PlanError as error:  # a device can do nothing that is demanded of it
            return error.lower_bound_s
        is_last = not table.is_cut or cut_s >= most_s
        if most_s < inf and is_last and not _may_be_within(table.problem, most_s):
            return inf
        with suppress(NothingFitsError):
            bound_s = search(table.problem, task.effort).lower_bound_s
        if is_last or bound_s <= cut_s:
            return bound_s - builder.unequal_s
        cut_s = min(cut_s * CUT_GROWTH, most_s)


def _best_plan(task: FormTask, computing: Computing) -> PlanSolution:
    """The best plan of these, with a bound on all of them.

    Where devices share the memory of hosts, divisions of it are tried until none is faster.
    """
    fitting, why_none = _fitting(task, computing)
    constraints, parts = computing.constraints, None
    for parts in divisions(constraints, task.model.cluster, fitting):
        best_s = min(map(step_s, fitting), default=inf)
        if best_s <= why_none.lower_bound_s * (1 + HOSTS_GAP):
            break
        within = replace(computing, constraints=constraints.with_budgets(parts, "host_bytes"))
        faster = replace(task, cutoff_s=min(task.cutoff_s, best_s))
        with suppress(PlanError):
            fitting += _fitting(faster, within)[0]
    if not fitting and parts is not None:
        message = hosts_too_small(task.model)
        raise PlanError(message, lower_bound_s=why_none.lower_bound_s)
    if not fitting:
        raise why_none
    best = min(fitting, key=step_s)
    return replace(best, lower_bound_s=why_none.lower_bound_s)


def _fitting(task: FormTask, computing: Computing) -> tuple[list[PlanSolution], PlanError]:
    """Plans among which is the best of these, and why, if there are none, with a
    bound on all.

    Where leaving room for rounding to rows costs time, plans with less of it are tried.
    """
    fitting: list[PlanSolution] = []
    why_none: NoRoomForRowsError | None = None
    # A plan may store some rows less, and be faster, than what makes room for demanded shares.
    most_s = task.cutoff_s * (1 + ROUNDING) if task.has_shares else inf
    limit_s = task.cutoff_s * (1 + ROWS_GAP * task.has_shares)
    for row_part in ROW_PARTS:
        builder = task.builder(computing, row_part=row_part)
        try:
            table, found, is_tight = search_table(
                builder, task.effort, limit_s, is_only_faster=task.is_only_faster
            )
        except NoRoomForRowsError as error:
            why_none = why_none or error
            continue
        choices = (found.choices, *found.runners_up)
        plans = fitting_plans(task.model, computing.constraints, table, choices)
        fitting += [each for each in plans if step_s(each) <= most_s]
        why_none = NoRoomForRowsError(
            "plan: no share fits once it is rounded to rows. Raise a budget.",
            lower_bound_s=found.lower_bound_s,
        )
        if fitting and not is_tight:
            break
    assert why_none is not None
    return fitting, why_none


def _close_cut_s(builder: TableBuilder, cut_s: float, cutoff_s: float = inf) -> float:
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
                every = builder.table(cut_s, stride=stride, has_less=True).rounded
                message = nearest_miss(every, builder, stride=stride)
                raise PlanError(message, lower_bound_s=builder.min_s) from None
            cut_s = min(cutoff_s, cut_s * CUT_GROWTH)
            if cut_s == cutoff_s:
                return cut_s
            stride = builder.stride(cut_s)
            continue
        cut_s = min(cutoff_s, found.value.objective_s * (1 + ROUNDING))
        closer = builder.stride(cut_s)
        if closer > stride / 2:
            break
        stride = closer
    return cut_s


def search_table(
    builder: TableBuilder,
    effort: Effort,
    cutoff_s: float = inf,
    *,
    is_only_faster: bool = False,
) -> tuple[CandidateTable, Found, bool]:
    """Search candidates up to a cut, raised until those left out are slower than the result.

    The bound holds for shares of any size; the choices leave room to round shares to rows,
    and the last value is whether they are slower for it.  The cut is not raised beyond
    ``cutoff_s``: nothing slower is asked for.  With ``is_only_faster``, the search ends once
    nothing can be that fast.
    """
    if cutoff_s < inf and not builder.may_be_within(cutoff_s * (1 + ROUNDING)):
        raise PlanError(TOO_SLOW)
    limit_s = cutoff_s * (1 + effort.relative_gap) if is_only_faster else inf
    cut_s = _close_cut_s(builder, min(builder.first_cut_s(), cutoff_s), cutoff_s)
    while True:
        builder.check_listed(cut_s, is_whole=False)
        table = builder.table(cut_s)
        is_last = not table.is_cut or cut_s >= cutoff_s
        error, bound_s, is_tight = PlanError, inf, False
        if cutoff_s < inf and is_last and not _may_be_within(table.problem, cutoff_s):
            raise PlanError(TOO_SLOW)
        try:
            found = search(table.problem, effort, cutoff_s=limit_s)
            if table.rounded.evaluate(found.choices) is None:
                error, bound_s = NoRoomForRowsError, found.lower_bound_s
                tighter = search(table.rounded, effort, cutoff_s=limit_s)
                is_tight = tighter.value.objective_s > found.value.objective_s * (1 + ROWS_GAP)
                found = replace(tighter, lower_bound_s=bound_s)
        except NothingFitsError:
            if is_last:
                message = TOO_SLOW
                if not table.is_cut and limit_s == inf:
                    every = builder.table(cut_s, has_less=True).rounded
                    message = nearest_miss(every, builder)
                raise error(message, lower_bound_s=bound_s) from None
        else:
            if is_last or found.value.objective_s <= cut_s:
                return table, found, is_tight
        cut_s = min(cut_s * CUT_GROWTH, cutoff_s)


def _may_be_within(problem: Problem, cutoff_s: float) -> bool:
    """Whether a step of at most ``cutoff_s`` may exist; false proves that none does.

    A device whose own phases, each at least as long as in any plan, take longer is in no such
    step.
    """
    if not problem.batch.any():
        return False
    min_s = problem.least_phases_s()
    left_s = cutoff_s * (1 + ROUNDING) - problem.fixed_s - problem.least_optimizer_s
    limits = Limits(
        (inf,) * problem.num_phases, totals_s=problem.totals_above(min_s), total_s=left_s
    )
    return Oracle(problem).is_feasible(limits)


def endless_memory_bound_s(task: FormTask, limit_s: float) -> tuple[float, LeastCompute]:
    """A lower bound on the step of every plan, of one round or of several (or ``limit_s``, if
    that is lower), and a bound on compute alone.

    Put together into one round, the rounds of a plan compute as much on every device, in the
    same microbatches, and communicate no less; only memory forbids it.  One round would cut
    the batch in another way, so each phase is taken to be as short as in any cut.  The second
    is a bound on the compute of the batch alone.
    """
    builder = task.builder(is_relaxed=task.is_satisfied_to_rows)
    unsure_s = _share_dependent_s(task.model) + builder.unequal_s * task.is_satisfied_to_rows
    cutoff_s = limit_s + unsure_s
    try:
        _, found, _ = search_table(builder, task.effort, cutoff_s, is_only_faster=True)
        min_s = found.lower_bound_s
    except PlanError as error:  # else one round has too many samples
        min_s = cutoff_s if str(error) == TOO_SLOW else unsure_s
    return min_s - unsure_s, builder.least_compute()


def least_step_of_rounds_s(
    model: CostModel, rounds: BatchRounds, compute: LeastCompute
) -> float:
    """No step of the form is shorter if the compute of the batch takes so long at least.

    Each round takes as long as its part of the compute and what communication slows it by, or
    its communication: all turns together, and those of each class in each phase.
    """
    beside = model.beside(unevenness=0.0)
    unit_s = np.array([n * compute.unit_s[kind] for kind, n in model.kinds_of_classes()])
    together_s = by_phase_s = 0.0
    last = len(beside.num_rounds) - 1
    for i, (number, comm_s) in enumerate(zip(beside.num_rounds, beside.comm_s, strict=True)):
        size = rounds.last_size if i == last and rounds.last_size else rounds.round_size
        part = number * size / rounds.global_batch_size
        excess_s = compute.overlap_slowdown * comm_s * (unit_s > 0)  # [classes, 2]
        by_phase_s += float(np.maximum(part * unit_s + excess_s, comm_s).sum())
        together_s += max(part * compute.whole_s + float(excess_s.sum()), float(comm_s.sum()))
    return beside.exposed_s + model.overhead_s + max(together_s, by_phase_s)


def _share_dependent_s(model: CostModel) -> float:
    """How much all communication of a step could at most gain over even shares.

    With few receivers, direct messages take less time; a turn gains at most what its
    communication does, times what compute loses beside it.
    """
    if not depends_on_shares(model):
        return 0.0
    of_both = [model.turns(unevenness=each).comm_s for each in (1.0, 0.0)]
    return _most_slowed(model) * (of_both[0] - of_both[1])


def max_saving_s(model: CostModel) -> float:
    """How much plans that do not reshard after forward are at most faster than those that do.

    Each turn gains at most the gather that it is spared, times what compute loses beside it.
    """
    resharding = replace(model, reshard_after_forward=True).turns(unevenness=1.0)
    return _most_slowed(model) * (resharding.comm_s - model.turns(unevenness=1.0).comm_s)


def _most_slowed(model: CostModel) -> float:
    """Seconds that a turn takes at most longer per second of its collectives."""
    kinds = model.cluster.number_by_kind
    return max(1.0, *(model.profile.device(kind).overlap_slowdown for kind in kinds))
