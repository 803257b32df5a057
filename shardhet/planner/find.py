"""``find_plan``: the plan to prefer of the fastest that fit, with a bound on any plan.

The package's docstring has the steps of the proof that no other plan of the candidates is
faster than the bound: oracle, boxes, cut, rounding to rows; here the bound over all forms and
rounds becomes the least of theirs.  It holds for plans in which all devices take part, and for
those in which the devices take part that do so in the plan that was found.  Which others may be
left idle is searched for by ``shardhet.planner.idle``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import filterfalse, product
from math import inf

from shardhet.planner.candidates.candidates import LeastCompute
from shardhet.planner.candidates.groupings import with_groups
from shardhet.planner.forms import BatchRounds, rounds_of
from shardhet.planner.idle import NO_GAIN, Positions, SubsetSearch, active_positions, with_idle
from shardhet.planner.infeasible import check_size
from shardhet.planner.owners import owned_batches
from shardhet.planner.preference import Bounded, preferred, unmet_preferences
from shardhet.planner.problem.constraints import TOLERANCE, Constraints
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.residents import with_residents
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.planner.task import (
    TOO_SLOW,
    FormTask,
    endless_memory_bound_s,
    least_step_of_rounds_s,
    max_saving_s,
    solve_form,
)
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.by_hand import whole
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm

NO_CONSTRAINTS = Constraints()
EXACT = 1e-12  # the last digits of a bound


def find_plan(
    scenario: Scenario,
    *,
    global_batch_size: int,
    constraints: Constraints = NO_CONSTRAINTS,
    effort: Effort = DEFAULT_EFFORT,
    tolerance: float = TOLERANCE,
) -> Plan:
    """The plan to prefer of those within ``tolerance`` of the fastest; ``solve`` proves it."""
    return solve(
        scenario,
        global_batch_size=global_batch_size,
        constraints=constraints,
        effort=effort,
        tolerance=tolerance,
    ).plan


def solve(
    scenario: Scenario,
    *,
    global_batch_size: int,
    constraints: Constraints = NO_CONSTRAINTS,
    effort: Effort = DEFAULT_EFFORT,
    tolerance: float | None = None,
    is_bounded: bool = True,
    near: StepForm | None = None,
    subset_hint: Positions = (),
    with_kind: str | None = None,
    cutoff_s: float = inf,
) -> PlanSolution:
    """The fastest plan that fits every budget, with a bound on what any plan can reach.

    With a ``tolerance``, the plan to prefer of those that are slower by at most this part
    (``shardhet.planner.preference``).  Unless ``is_bounded``, the bound holds only for plans
    that meet demanded shares to the element, which takes a search less.  Plans of the form
    ``near`` are looked at first, as probably the best.  With ``subset_hint``, only few sets of
    devices are searched: this one and few near it; ``with_kind`` leaves those with one of the
    kind.  Raises ``PlanError``: with the nearest miss if nothing fits; or if no step takes at
    most ``cutoff_s``, which the search finds out earlier.
    """
    global_batch_size = whole("global_batch_size", global_batch_size)
    if global_batch_size < 1:
        raise ValueError(
            f"plan: global_batch_size is {global_batch_size} but must be at least 1."
        )
    check_size(scenario)
    constraints.check(scenario.cluster.world_size)
    constraints.check_batches(scenario.cluster.world_size, global_batch_size)
    given = (effort, is_bounded, near, cutoff_s, with_kind, subset_hint)
    prices = _priced(scenario, constraints)
    request = _Request(prices, global_batch_size, constraints, *given)
    batches = partial(_solve_rows, request, tolerance)
    if constraints.whole_matrices:
        return owned_batches(batches, prices[0], constraints, cutoff_s)
    if constraints.may_share_samples:
        return with_groups(batches, prices[0], constraints, global_batch_size)
    return batches(constraints)


def _solve_rows(
    request: "_Request", tolerance: float | None, of: Constraints, cutoff_s: float = inf
) -> PlanSolution:
    """``solve``, of constraints that were checked, without whole matrices."""
    cutoff_s = min(cutoff_s, request.cutoff_s)
    request, constraints = replace(request, constraints=of, cutoff_s=cutoff_s), of
    active = constraints.not_idle(request.scenario.cluster.world_size)
    found = _of_part(request, active, tolerance)
    return found or _of_all_or_fewer(request, tolerance)


def _of_part(
    request: "_Request", positions: tuple[int, ...], tolerance: float | None
) -> PlanSolution | None:
    """The plan in which only the devices at these positions take part.

    None if these are all devices or none, or nothing fits.
    """
    scenario, constraints = request.scenario, request.constraints
    if not 0 < len(positions) < scenario.cluster.world_size:
        return None
    part = request.of_part(positions, part_of(scenario, positions))
    try:
        part.constraints.check(len(positions))
        part.constraints.check_batches(len(positions), request.global_batch_size)
        found = _of_all_or_fewer(replace(part, subset_hint=(), with_kind=None), tolerance)
    except ValueError:  # nothing fits, or constraints need the other devices
        return None
    return with_idle(found, positions, request.prices[0], constraints)


def _of_all_or_fewer(request: "_Request", tolerance: float | None) -> PlanSolution:
    """``solve``, where no device is demanded to be idle; some are, if that is faster."""
    prices, constraints = request.prices[0], request.constraints
    found: dict[Positions, _Found] = {}

    def solved(positions: Positions, scenario: Scenario, cutoff_s: float) -> PlanSolution:
        part = request
        if len(positions) < prices.cluster.world_size:
            part = request.of_part(positions, scenario)
        seen = _of_all(replace(part, cutoff_s=cutoff_s), tolerance)
        found[positions] = seen
        return seen.best

    search = SubsetSearch(
        scenario=request.scenario,
        global_batch_size=request.global_batch_size,
        constraints=constraints,
        cutoff_s=request.cutoff_s * (1 + (tolerance or 0.0)),
        tolerance=tolerance or 0.0,
        solved=solved,
        near=request.subset_hint,
        with_kind=request.with_kind,
    )
    best = search.run()
    if best is None or best.step_s > request.cutoff_s:
        why_none = search.why_none or PlanError(TOO_SLOW)
        why_none.lower_bound_s = min(search.least_missed_s.values(), default=inf)
        raise why_none
    plans = {best.positions: best.solution}
    if tolerance is not None:
        fastest_s = min(each.best.predicted.step_time_s for each in found.values())
        limit_s = (1 + tolerance) * fastest_s
        plans = {
            positions: preferred(seen.best, seen.pools, limit_s)
            for positions, seen in found.items()
            if seen.best.predicted.step_time_s <= limit_s
        }
    of_all = (with_idle(plan, where, prices, constraints) for where, plan in plans.items())
    chosen = min(
        filter(None, of_all),
        key=lambda each: unmet_preferences(each, constraints, prices.cluster),
        default=None,
    )
    if chosen is None:  # those that are idle have no room for their processes
        raise search.why_none or PlanError(TOO_SLOW)
    if tolerance is not None:
        fastest_s = min(fastest_s, chosen.predicted.step_time_s)
        chosen = replace(chosen, fastest_s=fastest_s)
    whole_s = search.whole.lower_bound_s if search.whole is not None else inf
    least_missed_s = search.least_missed_s.get(active_positions(chosen), inf)
    return replace(chosen, lower_bound_s=min(chosen.lower_bound_s, whole_s, least_missed_s))


def _of_all(request: "_Request", tolerance: float | None) -> "_Found":
    """``solve``, where devices are idle only by chance, and nothing is preferred.

    What is allowed on hosts is also left out: the search leaves other devices idle without it.
    Near a part that is known, it does not.
    """
    found: list[_Found] = []
    why_none: PlanError | None = None
    least, *_ = request.constraints.with_less_on_hosts()  # of equally fast plans not the first
    is_left_out = least != request.constraints and not request.subset_hint
    for constraints in [request.constraints, *[least] * is_left_out]:
        try:
            found.append(_solve(replace(request, constraints=constraints), tolerance))
        except PlanError as error:
            if why_none is None or constraints == request.constraints:  # the least memory
                why_none = error
    if not found:
        assert why_none is not None
        raise why_none
    bound_s = min(each.best.lower_bound_s for each in found)
    best = min(found, key=lambda each: each.best.predicted.step_time_s)
    return replace(best, best=replace(best.best, lower_bound_s=bound_s))


@dataclass(frozen=True, slots=True)
class _Found:
    """The fastest plan, and the forms among which another may be preferred."""

    best: PlanSolution
    pools: Sequence[Bounded]


def _solve(request: "_Request", tolerance: float | None) -> _Found:
    """``solve``, of constraints that were checked."""
    seen = _SearchState(tolerance or 0.0, request.cutoff_s)
    least = None
    if request.cutoff_s < inf and request.constraints.form is None:
        least = request.least(seen.limit_s)
        if least[0] >= seen.limit_s * (1 - EXACT):
            raise PlanError(TOO_SLOW, lower_bound_s=seen.limit_s)
    for task in (*request.of_demanded_form(), *request.of_hinted_form()):
        seen.search(task, 0.0 if task.rounds.are_equal else request.bound_s(task))
    for i, task in enumerate(request.of_one_round()):
        max_saving = max_saving_s(task.model)
        if i and seen.best is not None and max_saving <= NO_GAIN * seen.best_s:
            seen.bounds_s.append(min(seen.best_s, *seen.bounds_s) - max_saving)
        else:
            seen.search(task)
    constraints = request.constraints
    has_rounds = constraints.max_rounds != 1 and request.global_batch_size > 1
    if constraints.form is None and (has_rounds or len(request.prices) > 1):
        _search_rest(request, seen, *(least or request.least(inf)))
    if seen.best is None:
        if seen.why_none is None:  # nothing was looked at
            assert constraints.form is not None
            raise PlanError(
                f"plan: a batch of {request.global_batch_size} cannot be cut into "
                f"{constraints.form.num_rounds} rounds as demanded. Demand another number, or "
                "batches of devices that are multiples of it."
            )
        seen.why_none.lower_bound_s = min(seen.bounds_s + seen.unproven_s)
        raise seen.why_none
    bound_s = min(seen.best_s, *(seen.bounds_s or seen.unproven_s))
    if seen.best_s > request.cutoff_s:
        raise PlanError(TOO_SLOW)
    return _Found(replace(seen.best, lower_bound_s=bound_s), (seen.tasks, seen.slower))


def _search_rest(
    request: "_Request", seen: "_SearchState", min_s: float, compute: LeastCompute
) -> None:
    """Search steps of several rounds, and those that keep fewer frozen weights, by bounds."""
    several = filterfalse(request.has_hinted_form, request.of_several_rounds())
    rest = [*request.of_fewer_residents(), *several]
    trials = [
        (max(min_s, request.bound_s(task, compute)), order, task)
        for order, task in enumerate(rest)
    ]
    trials.sort(key=lambda each: each[:2])
    for bound_s, _, task in trials:
        if bound_s * (1 + NO_GAIN) >= seen.limit_s:
            seen.bounds_s.append(bound_s)  # also of those that come later
            return
        seen.search(task, bound_s, cutoff_s=seen.limit_s)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked, of plans of any form."""

    prices: tuple[CostModel, ...]  # in any form; those that keep most frozen weights first
    global_batch_size: int
    constraints: Constraints
    effort: Effort
    is_bounded: bool
    near: StepForm | None = None  # of several rounds, looked at first
    cutoff_s: float = inf  # slower plans are not asked for
    with_kind: str | None = None
    subset_hint: Positions = ()  # if not empty, only this part and few near it

    @property
    def scenario(self) -> Scenario:
        """What is planned for."""
        return self.prices[0].scenario

    def of_part(self, positions: Positions, scenario: Scenario) -> "_Request":
        """What is asked where only the devices at these positions take part."""
        constraints = self.constraints.only(positions)
        prices = _priced(scenario, constraints, beside_idle=True)
        return replace(self, prices=prices, constraints=constraints)

    def of_demanded_form(self) -> Iterator[FormTask]:
        """Plans of the form that is demanded, if one is."""
        form = self.constraints.form
        if form is not None:
            rounds = BatchRounds(form.num_rounds, self.global_batch_size)
            for prices in self.prices if rounds.has_last else ():
                yield from self._tasks(prices, rounds, form)

    def of_hinted_form(self) -> Iterator[FormTask]:
        """Plans of the form that is looked at first, if there is one of several rounds."""
        if self.near is not None:
            yield from filter(self.has_hinted_form, self.of_several_rounds())

    def has_hinted_form(self, task: FormTask) -> bool:
        """Whether it is one of ``of_hinted_form``."""
        is_like = self.near is not None and task.model.form == self.near
        return is_like and task.model.resident_units == self.prices[0].resident_units

    def of_one_round(self) -> Iterator[FormTask]:
        """Plans whose units are gathered again for backward, then those that keep them, with
        all frozen weights unsharded; none if another form is demanded.
        """
        if self.constraints.form is None:
            yield from self._tasks(self.prices[0], BatchRounds(1, self.global_batch_size))

    def of_fewer_residents(self) -> Iterator[FormTask]:
        """The same where not all frozen weights stay unsharded."""
        for prices in self.prices[1:] if self.constraints.form is None else ():
            yield from self._tasks(prices, BatchRounds(1, self.global_batch_size))

    def of_several_rounds(self) -> Iterator[FormTask]:
        """Plans of several rounds, few first; none if another form is demanded."""
        if self.constraints.form is None:
            looked_at = rounds_of(self.global_batch_size, self.constraints.max_rounds)
            for rounds, prices in product(looked_at[1:], self.prices):
                yield from self._tasks(prices, rounds)

    @property
    def deals_differ(self) -> bool:
        """Whether devices have other batches in a step of more rounds: even ones cannot be
        dealt out exactly, and the first devices get more in every round.
        """
        is_rest = self.global_batch_size % self.scenario.cluster.world_size
        return self.constraints.has_even_batches and bool(is_rest)

    def bound_s(self, task: FormTask, compute: LeastCompute | None = None) -> float:
        """No step of the task is shorter; ``compute`` is that of plans of one round."""
        if compute is None or self.deals_differ:
            compute = task.builder().least_compute()
        return least_step_of_rounds_s(task.model, task.rounds, compute)

    def least(self, limit_s: float) -> tuple[float, LeastCompute]:
        """No step is shorter than the first, or than a limit if that is less; what the batch
        takes in one round.
        """
        *_, task = self.of_one_round()
        min_s, compute = endless_memory_bound_s(replace(task, has_endless_memory=True), limit_s)
        return 0.0 if self.deals_differ else min_s, compute

    def _tasks(
        self, prices: CostModel, rounds: BatchRounds, form: StepForm | None = None
    ) -> Iterator[FormTask]:
        """Plans with these rounds, form by form, or of one form."""
        world_size = prices.cluster.world_size
        constraints = self.constraints.of_round(rounds, world_size)
        if constraints is not None:
            has_links = world_size > 1 or rounds.number == 1
            for each in (form,) if form else rounds.forms(has_links=has_links):
                model = prices.in_form(each)
                yield FormTask(model, rounds, constraints, self.effort, self.is_bounded)


@dataclass(slots=True)
class _SearchState:
    """What was found so far, and bounds on everything that was looked at."""

    tolerance: float  # a plan may be preferred to one that is faster by this part
    cutoff_s: float  # slower plans are not asked for
    best: PlanSolution | None = None
    # In which plans were found, with bounds on them.
    tasks: list[tuple[float, FormTask]] = field(default_factory=list)
    # In which nothing was fast enough, with bounds on them, though not proven of all plans.
    slower: list[tuple[float, FormTask]] = field(default_factory=list)
    bounds_s: list[float] = field(default_factory=list)
    unproven_s: list[float] = field(default_factory=list)  # weak ones, of unequal rounds
    why_none: PlanError | None = None  # why nothing fits, of the form that needs least memory
    why_none_of: tuple[float, ...] = ()

    @property
    def best_s(self) -> float:
        """Seconds of the step of the best plan, or of the slowest that is asked for."""
        return self.cutoff_s if self.best is None else self.best.predicted.step_time_s

    @property
    def limit_s(self) -> float:
        """Seconds of the slowest step that may be preferred to the best."""
        return (1 + self.tolerance) * self.best_s

    def search(
        self, task: FormTask, known_bound_s: float = 0.0, *, cutoff_s: float = inf
    ) -> None:
        """Search plans of one form, of which none is slower than ``cutoff_s``.

        Nothing is proven of a last round that is smaller: it is dealt by position.
        """
        if task.is_exact:
            task = replace(task, cutoff_s=self.limit_s, is_only_faster=True)
        else:
            slowest_s = (1 + self.tolerance) * self.cutoff_s
            task = replace(task, cutoff_s=min(cutoff_s, slowest_s))
        solutions, bound_s, error = solve_form(task)
        bound_s = max(bound_s, known_bound_s) if task.rounds.are_equal else known_bound_s
        (self.bounds_s if task.rounds.are_equal else self.unproven_s).append(bound_s)
        if solutions:
            # Of what is asked for: a bound may lie above plans that were found at once.
            min_s = min(each.predicted.step_time_s for each in solutions)
            self.tasks.append((min(bound_s, min_s), task))
            self.best = min(
                [*([] if self.best is None else [self.best]), *solutions],
                key=lambda each: each.predicted.step_time_s,
            )
        elif task.cutoff_s < inf and not task.is_exact:
            self.slower.append((known_bound_s, task))
        if error is not None and task.memory_frugality > self.why_none_of:
            self.why_none, self.why_none_of = error, task.memory_frugality


def _priced(
    scenario: Scenario, constraints: Constraints, *, beside_idle: bool = False
) -> tuple[CostModel, ...]:
    """Prices of plans whose units are in the levels that are faster, by what is resident."""
    prices = CostModel(
        scenario,
        in_flight=constraints.rounds_in_flight,
        receives=constraints.receives,
        hands_on_bytes=constraints.hands_on_bytes,
        beside_idle=beside_idle,
    )
    if constraints.has_one_level:
        return (prices,)
    return with_residents(prices, may_stay=constraints.may_keep_frozen_weights)
