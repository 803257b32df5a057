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
from shardhet.planner.idle import NO_GAIN, PartSearch, Positions, active_positions, with_idle
from shardhet.planner.misses import check_size
from shardhet.planner.owners import owned_batches
from shardhet.planner.preference import Bounded, lacks, preferred
from shardhet.planner.problem.demands import TOLERANCE, Demands
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.residents import with_residents
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.planner.task import (
    TOO_SLOW,
    FormTask,
    endless_memory_bound_s,
    least_step_of_rounds_s,
    solve_form,
    spared_s,
)
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import part_of
from shardhet.pricing.setting import Setting
from shardhet.records.by_hand import whole
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm

NO_DEMANDS = Demands()


def find_plan(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
    tolerance: float = TOLERANCE,
) -> Plan:
    """The plan to prefer of those within ``tolerance`` of the fastest; ``solve`` proves it."""
    return solve(
        setting,
        global_batch_size=global_batch_size,
        demands=demands,
        effort=effort,
        tolerance=tolerance,
    ).plan


def solve(
    setting: Setting,
    *,
    global_batch_size: int,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
    tolerance: float | None = None,
    is_bounded: bool = True,
    near: StepForm | None = None,
    near_part: Positions = (),
    with_kind: str | None = None,
    at_most_s: float = inf,
) -> PlanSolution:
    """The fastest plan that fits every budget, with a bound on what any plan can reach.

    With a ``tolerance``, the plan to prefer of those that are slower by at most this part
    (``shardhet.planner.preference``).  Unless ``is_bounded``, the bound holds only for plans
    that meet demanded shares to the element, which takes a search less.  Plans of the form
    ``near`` are looked at first, as probably the best.  With ``near_part``, only few sets of
    devices are searched: this one and few near it; ``with_kind`` leaves those with one of the
    kind.  Raises ``PlanError`` with the nearest miss if nothing fits, or if no step is as
    short as ``at_most_s``, which is seen sooner.
    """
    global_batch_size = whole("global_batch_size", global_batch_size)
    if global_batch_size < 1:
        raise ValueError(
            f"plan: global_batch_size is {global_batch_size} but must be at least 1."
        )
    check_size(setting)
    demands.check(setting.cluster.world_size)
    demands.check_batches(setting.cluster.world_size, global_batch_size)
    given = (effort, is_bounded, near, at_most_s, with_kind, near_part)
    prices = _priced(setting, demands)
    asked = _Asked(prices, global_batch_size, demands, *given)
    batches = partial(_solve_rows, asked, tolerance)
    if demands.whole_matrices:
        return owned_batches(batches, prices[0], demands, at_most_s)
    if demands.may_share_samples:
        return with_groups(batches, prices[0], demands, global_batch_size)
    return batches(demands)


def _solve_rows(
    asked: "_Asked", tolerance: float | None, demands: Demands, at_most_s: float = inf
) -> PlanSolution:
    """``solve``, of demands that were checked, without whole matrices."""
    asked = replace(asked, demands=demands, at_most_s=min(at_most_s, asked.at_most_s))
    found = _of_part(asked, demands.not_idle(asked.setting.cluster.world_size), tolerance)
    return found or _of_all_or_fewer(asked, tolerance)


def _of_part(
    asked: "_Asked", positions: tuple[int, ...], tolerance: float | None
) -> PlanSolution | None:
    """The plan in which only the devices at these positions take part.

    None if these are all devices or none, or nothing fits.
    """
    setting, demands = asked.setting, asked.demands
    if not 0 < len(positions) < setting.cluster.world_size:
        return None
    try:
        found = solve(
            part_of(setting, positions),
            global_batch_size=asked.global_batch_size,
            demands=demands.only(positions),
            effort=asked.effort,
            tolerance=tolerance,
            is_bounded=asked.is_bounded,
            near=asked.near,
            at_most_s=asked.at_most_s,
        )
    except ValueError:  # nothing fits, or demands need the other devices
        return None
    return with_idle(found, positions, asked.prices[0], demands)


def _of_all_or_fewer(asked: "_Asked", tolerance: float | None) -> PlanSolution:
    """``solve``, where no device is demanded to be idle; some are, if that is faster."""
    prices, demands = asked.prices[0], asked.demands
    found: dict[Positions, _Found] = {}

    def solved(positions: Positions, setting: Setting, at_most_s: float) -> PlanSolution:
        part = asked
        if len(positions) < prices.cluster.world_size:
            of_part = demands.only(positions)
            part = replace(asked, prices=_priced(setting, of_part), demands=of_part)
        met = _of_all(replace(part, at_most_s=at_most_s), tolerance)
        # A lone device computes with the rows that it stores; beside idle ones it gathers them.
        if len(positions) == 1 and not any(
            with_idle(each, positions, prices, demands) for each in _preferred(met, tolerance)
        ):
            raise PlanError(f"plan: device {positions[0]} has no room beside idle ones.")
        found[positions] = met
        return met.best

    search = PartSearch(
        setting=asked.setting,
        global_batch_size=asked.global_batch_size,
        demands=demands,
        at_most_s=asked.at_most_s * (1 + (tolerance or 0.0)),
        tolerance=tolerance or 0.0,
        solved=solved,
        near=asked.near_part,
        with_kind=asked.with_kind,
    )
    best = search.run()
    if best is None or best.step_s > asked.at_most_s:
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
    of_all = (with_idle(plan, where, prices, demands) for where, plan in plans.items())
    chosen = min(
        filter(None, of_all),
        key=lambda each: lacks(each, demands, prices.cluster),
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


def _preferred(met: "_Found", tolerance: float | None) -> Iterator[PlanSolution]:
    """The fastest plan, and the one to prefer to it."""
    yield met.best
    if tolerance is not None:
        limit_s = (1 + tolerance) * met.best.predicted.step_time_s
        yield preferred(met.best, met.pools, limit_s)


def _of_all(asked: "_Asked", tolerance: float | None) -> "_Found":
    """``solve``, where devices are idle only by chance, and nothing is preferred.

    What is allowed on hosts is also left out: the search leaves other devices idle without it.
    Near a part that is known, it does not.
    """
    found: list[_Found] = []
    missed: PlanError | None = None
    least, *_ = asked.demands.with_less_on_hosts()  # of equally fast plans not the first
    is_left_out = least != asked.demands and not asked.near_part
    for demands in [asked.demands, *[least] * is_left_out]:
        try:
            found.append(_solve(replace(asked, demands=demands), tolerance))
        except PlanError as error:
            if missed is None or demands == asked.demands:  # which need the least memory
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


def _solve(asked: "_Asked", tolerance: float | None) -> _Found:
    """``solve``, of demands that were checked."""
    met = _Met(tolerance or 0.0, asked.at_most_s)
    least = None
    if asked.at_most_s < inf and asked.demands.form is None:
        least = asked.least(met.limit_s)
        if least[0] * (1 + NO_GAIN) >= met.limit_s:
            raise PlanError(TOO_SLOW, lower_bound_s=met.limit_s)
    for task in (*asked.of_demanded_form(), *asked.of_near()):
        met.search(task, 0.0 if task.rounds.are_equal else asked.bound_s(task))
    for i, task in enumerate(asked.of_one_round()):
        spared = spared_s(task.model)
        if i and met.best is not None and spared <= NO_GAIN * met.best_s:
            met.bounds_s.append(min(met.best_s, *met.bounds_s) - spared)
        else:
            met.search(task)
    demands = asked.demands
    has_rounds = demands.max_rounds != 1 and asked.global_batch_size > 1
    if demands.form is None and (has_rounds or len(asked.prices) > 1):
        _search_rest(asked, met, *(least or asked.least(inf)))
    if met.best is None:
        if met.missed is None:  # nothing was looked at
            assert demands.form is not None
            raise PlanError(
                f"plan: a batch of {asked.global_batch_size} cannot be cut into "
                f"{demands.form.num_rounds} rounds as demanded. Demand another number, or "
                "batches of devices that are multiples of it."
            )
        met.missed.lower_bound_s = min(met.bounds_s + met.unproven_s)
        raise met.missed
    bound_s = min(met.best_s, *(met.bounds_s or met.unproven_s))
    if met.best_s > asked.at_most_s:
        raise PlanError(TOO_SLOW)
    return _Found(replace(met.best, lower_bound_s=bound_s), (met.tasks, met.slower))


def _search_rest(asked: "_Asked", met: "_Met", least_s: float, compute: LeastCompute) -> None:
    """Search steps of several rounds, and those that keep fewer frozen weights, by bounds."""
    rest = [*asked.of_fewer_residents(), *filterfalse(asked.is_near, asked.of_several_rounds())]
    trials = [
        (max(least_s, asked.bound_s(task, compute)), order, task)
        for order, task in enumerate(rest)
    ]
    trials.sort(key=lambda each: each[:2])
    for bound_s, _, task in trials:
        if bound_s * (1 + NO_GAIN) >= met.limit_s:
            met.bounds_s.append(bound_s)  # also of those that come later
            return
        met.search(task, bound_s, at_most_s=met.limit_s)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked, of plans of any form."""

    prices: tuple[CostModel, ...]  # in any form; those that keep most frozen weights first
    global_batch_size: int
    demands: Demands
    effort: Effort
    is_bounded: bool
    near: StepForm | None = None  # of several rounds, looked at first
    at_most_s: float = inf  # slower plans are not asked for
    with_kind: str | None = None
    near_part: Positions = ()  # if not empty, only this part and few near it

    @property
    def setting(self) -> Setting:
        """What is planned for."""
        return self.prices[0].setting

    def of_demanded_form(self) -> Iterator[FormTask]:
        """Plans of the form that is demanded, if one is."""
        form = self.demands.form
        if form is not None:
            rounds = BatchRounds(form.num_rounds, self.global_batch_size)
            for prices in self.prices if rounds.has_last else ():
                yield from self._tasks(prices, rounds, form)

    def of_near(self) -> Iterator[FormTask]:
        """Plans of the form that is looked at first, if there is one of several rounds."""
        if self.near is not None:
            yield from filter(self.is_near, self.of_several_rounds())

    def is_near(self, task: FormTask) -> bool:
        """Whether it is one of ``of_near``."""
        is_like = self.near is not None and task.model.form == self.near
        return is_like and task.model.resident_units == self.prices[0].resident_units

    def of_one_round(self) -> Iterator[FormTask]:
        """Plans whose units are gathered again for backward, then those that keep them, with
        all frozen weights unsharded; none if another form is demanded.
        """
        if self.demands.form is None:
            yield from self._tasks(self.prices[0], BatchRounds(1, self.global_batch_size))

    def of_fewer_residents(self) -> Iterator[FormTask]:
        """The same where not all frozen weights stay unsharded."""
        for prices in self.prices[1:] if self.demands.form is None else ():
            yield from self._tasks(prices, BatchRounds(1, self.global_batch_size))

    def of_several_rounds(self) -> Iterator[FormTask]:
        """Plans of several rounds, few first; none if another form is demanded."""
        if self.demands.form is None:
            looked_at = rounds_of(self.global_batch_size, self.demands.max_rounds)
            for rounds, prices in product(looked_at[1:], self.prices):
                yield from self._tasks(prices, rounds)

    @property
    def deals_differ(self) -> bool:
        """Whether devices have other batches in a step of more rounds: even ones cannot be
        dealt out exactly, and the first devices get more in every round.
        """
        is_rest = self.global_batch_size % self.setting.cluster.world_size
        return self.demands.has_even_batches and bool(is_rest)

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
        least_s, compute = endless_memory_bound_s(
            replace(task, has_endless_memory=True), limit_s
        )
        return 0.0 if self.deals_differ else least_s, compute

    def _tasks(
        self, prices: CostModel, rounds: BatchRounds, form: StepForm | None = None
    ) -> Iterator[FormTask]:
        """Plans with these rounds, form by form, or of one form."""
        world_size = prices.cluster.world_size
        demands = self.demands.of_round(rounds, world_size)
        if demands is not None:
            has_links = world_size > 1 or rounds.number == 1
            for each in (form,) if form else rounds.forms(has_links=has_links):
                model = prices.in_form(each)
                yield FormTask(model, rounds, demands, self.effort, self.is_bounded)


@dataclass(slots=True)
class _Met:
    """What was found so far, and bounds on everything that was looked at."""

    tolerance: float  # a plan may be preferred to one that is faster by this part
    at_most_s: float  # slower plans are not asked for
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
        return self.at_most_s if self.best is None else self.best.predicted.step_time_s

    @property
    def limit_s(self) -> float:
        """Seconds of the slowest step that may be preferred to the best."""
        return (1 + self.tolerance) * self.best_s

    def search(
        self, task: FormTask, known_bound_s: float = 0.0, *, at_most_s: float = inf
    ) -> None:
        """Search plans of one form, of which none is slower than ``at_most_s``.

        Nothing is proven of a last round that is smaller: it is dealt by position.
        """
        if task.is_exact:
            task = replace(task, at_most_s=self.limit_s, is_only_faster=True)
        else:
            slowest_s = (1 + self.tolerance) * self.at_most_s
            task = replace(task, at_most_s=min(at_most_s, slowest_s))
        solutions, bound_s, error = solve_form(task)
        bound_s = max(bound_s, known_bound_s) if task.rounds.are_equal else known_bound_s
        (self.bounds_s if task.rounds.are_equal else self.unproven_s).append(bound_s)
        if solutions:
            # Of what is asked for: a bound may lie above plans that were found at once.
            least_s = min(each.predicted.step_time_s for each in solutions)
            self.tasks.append((min(bound_s, least_s), task))
            self.best = min(
                [*([] if self.best is None else [self.best]), *solutions],
                key=lambda each: each.predicted.step_time_s,
            )
        elif task.at_most_s < inf and not task.is_exact:
            self.slower.append((known_bound_s, task))
        if error is not None and task.spared_memory > self.missed_form:
            self.missed, self.missed_form = error, task.spared_memory


def _priced(setting: Setting, demands: Demands) -> tuple[CostModel, ...]:
    """Prices of plans whose units are in the levels that are faster, by what is resident."""
    prices = CostModel(
        setting,
        in_flight=demands.rounds_in_flight,
        receives=demands.receives,
        hands_on_bytes=demands.hands_on_bytes,
    )
    if demands.has_one_level:
        return (prices,)
    return with_residents(prices, may_stay=demands.may_keep_frozen_weights)
