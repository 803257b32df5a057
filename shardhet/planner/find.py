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
from shardhet.planner.misses import check_size
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
from shardhet.pricing.setting import Setting
from shardhet.records.by_hand import whole
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm

NO_CONSTRAINTS = Constraints()
EXACT = 1e-12  # the last digits of a bound


def find_plan(
    setting: Setting,
    *,
    global_batch_size: int,
    constraints: Constraints = NO_CONSTRAINTS,
    effort: Effort = DEFAULT_EFFORT,
    tolerance: float = TOLERANCE,
) -> Plan:
    """The plan to prefer of those within ``tolerance`` of the fastest; ``solve`` proves it."""
    return solve(
        setting,
        global_batch_size=global_batch_size,
        constraints=constraints,
        effort=effort,
        tolerance=tolerance,
    ).plan


def solve(
    setting: Setting,
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
    check_size(setting)
    constraints.check(setting.cluster.world_size)
    constraints.check_batches(setting.cluster.world_size, global_batch_size)
    given = (effort, is_bounded, near, cutoff_s, with_kind, subset_hint)
    prices = _priced(setting, constraints)
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
    active = constraints.not_idle(request.setting.cluster.world_size)
    found = _of_part(request, active, tolerance)
    return found or _of_all_or_fewer(request, tolerance)


def _of_part(
    request: "_Request", positions: tuple[int, ...], tolerance: float | None
) -> PlanSolution | None:
    """The plan in which only the devices at these positions take part.

    None if these are all devices or none, or nothing fits.
    """
    setting, constraints = request.setting, request.constraints
    if not 0 < len(positions) < setting.cluster.world_size:
        return None
    part = request.of_part(positions, part_of(setting, positions))
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

    def solved(positions: Positions, setting: Setting, cutoff_s: float) -> PlanSolution:
        part = request
        if len(positions) < prices.cluster.world_size:
            part = request.of_part(positions, setting)
        met = _of_all(replace(part, cutoff_s=cutoff_s), tolerance)
        found[positions] = met
        return met.best

    search = SubsetSearch(
        setting=request.setting,
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
        missed = search.missed or PlanError(TOO_SLOW)
        missed.lower_bound_s = min(search.missed_s.values(), default=inf)
        raise missed
    plans = {best.positions: best.solution}
    if tolerance is not None:
        fastest_s = min(each.best.predicted.step_time_s for each in found.values())
        limit_s = (1 + tolerance) * fastest_s
        plans = {
            positions: preferred(met.best, met.pools, limit_s)
            for positions, met in found.items()
            if met.best.predicted.step_time_s <= limit_s
        }
    of_all = (with_idle(plan, where, prices, constraints) for where, plan in plans.items())
    chosen = min(
        filter(None, of_all),
        key=lambda each: unmet_preferences(each, constraints, prices.cluster),
        default=None,
    )
    if chosen is None:  # those that are idle have no room for their processes
        raise search.missed or PlanError(TOO_SLOW)
    if tolerance is not None:
        fastest_s = min(fastest_s, chosen.predicted.step_time_s)
        chosen = replace(chosen, fastest_s=fastest_s)
    whole_s = search.whole.lower_bound_s if search.whole is not None else inf
    missed_s = search.missed_s.get(active_positions(chosen), inf)
    return replace(chosen, lower_bound_s=min(chosen.lower_bound_s, whole_s, missed_s))


def _of_all(request: "_Request", tolerance: float | None) -> "_Found":
    """``solve``, where devices are idle only by chance, and nothing is preferred.

    What is allowed on hosts is also left out: the search leaves other devices idle without it.
    Near a part that is known, it does not.
    """
    found: list[_Found] = []
    missed: PlanError | None = None
    least, *_ = request.constraints.with_less_on_hosts()  # of equally fast plans not the first
    is_left_out = least != request.constraints and not request.subset_hint
    for constraints in [request.constraints, *[least] * is_left_out]:
        try:
            found.append(_solve(replace(request, constraints=constraints), tolerance))
        except PlanError as error:
            if missed is None or constraints == request.constraints:  # the least memory
                missed = error
    if not found:
        assert missed is not None
        raise missed
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
    met = _Met(tolerance or 0.0, request.cutoff_s)
    least = None
    if request.cutoff_s < inf and request.constraints.form is None:
        least = request.least(met.limit_s)
        if least[0] >= met.limit_s * (1 - EXACT):
            raise PlanError(TOO_SLOW, lower_bound_s=met.limit_s)
    for task in (*request.of_demanded_form(), *request.of_hinted_form()):
        met.search(task, 0.0 if task.rounds.are_equal else request.bound_s(task))
    for i, task in enumerate(request.of_one_round()):
        max_saving = max_saving_s(task.model)
        if i and met.best is not None and max_saving <= NO_GAIN * met.best_s:
            met.bounds_s.append(min(met.best_s, *met.bounds_s) - max_saving)
        else:
            met.search(task)
    constraints = request.constraints
    has_rounds = constraints.max_rounds != 1 and request.global_batch_size > 1
    if constraints.form is None and (has_rounds or len(request.prices) > 1):
        _search_rest(request, met, *(least or request.least(inf)))
    if met.best is None:
        if met.missed is None:  # nothing was looked at
            assert constraints.form is not None
            raise PlanError(
                f"plan: a batch of {request.global_batch_size} cannot be cut into "
                f"{constraints.form.num_rounds} rounds as demanded. Demand another number, or "
                "batches of devices that are multiples of it."
            )
        met.missed.lower_bound_s = min(met.bounds_s + met.unproven_s)
        raise met.missed
    bound_s = min(met.best_s, *(met.bounds_s or met.unproven_s))
    if met.best_s > request.cutoff_s:
        raise PlanError(TOO_SLOW)
    return _Found(replace(met.best, lower_bound_s=bound_s), (met.tasks, met.slower))


def _search_rest(request: "_Request", met: "_Met", min_s: float, compute: LeastCompute) -> None:
    """Search steps of several rounds, and those that keep fewer frozen weights, by bounds."""
    several = filterfalse(request.has_hinted_form, request.of_several_rounds())
    rest = [*request.of_fewer_residents(), *several]
    trials = [
        (max(min_s, request.bound_s(task, compute)), order, task)
        for order, task in enumerate(rest)
    ]
    trials.sort(key=lambda each: each[:2])
    for bound_s, _, task in trials:
        if bound_s * (1 + NO_GAIN) >= met.limit_s:
            met.bounds_s.append(bound_s)  # also of those that come later
            return
        met.search(task, bound_s, cutoff_s=met.limit_s)


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
    def setting(self) -> Setting:
        """What is planned for."""
        return self.prices[0].setting

    def of_part(self, positions: Positions, setting: Setting) -> "_Request":
        """What is asked where only the devices at these positions take part."""
        constraints = self.constraints.only(positions)
        prices = _priced(setting, constraints, beside_idle=True)
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
        is_rest = self.global_batch_size % self.setting.cluster.world_size
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
class _Met:
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
    missed: PlanError | None = None  # why nothing fits, of the form that needs least memory
    missed_form: tuple[float, ...] = ()

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
        if error is not None and task.memory_frugality > self.missed_form:
            self.missed, self.missed_form = error, task.memory_frugality


def _priced(
    setting: Setting, constraints: Constraints, *, beside_idle: bool = False
) -> tuple[CostModel, ...]:
    """Prices of plans whose units are in the levels that are faster, by what is resident."""
    prices = CostModel(
        setting,
        in_flight=constraints.rounds_in_flight,
        receives=constraints.receives,
        hands_on_bytes=constraints.hands_on_bytes,
        beside_idle=beside_idle,
    )
    if constraints.has_one_level:
        return (prices,)
    return with_residents(prices, may_stay=constraints.may_keep_frozen_weights)
