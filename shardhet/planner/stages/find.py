"""``find_pipeline``: stages of unlike devices, cuts between units, rounds and rounds in flight.

Stages, their order and the devices left out come from ``groups``.  The orders that are
expected to be fastest (``likely``) are improved one at a time, in cuts, rounds, form and rounds
in flight, until no neighbour is better; what a stage takes is the best plan of its devices for
its units (``solve``).  Of what is left (``rest``), everything is priced that no bound on its
compute, transfers and messages shows to be slower.  Of up to six devices all orders are looked
at, so that, unless so much is left that the search stops, no pipeline of the same cuts, rounds
and forms is faster.

``lower_bound_s`` is that of the compute of all devices (``bound``).
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from shardhet.planner.find import NO_CONSTRAINTS
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.search.search import DEFAULT_EFFORT
from shardhet.planner.stages.bound import Speeds, even_cuts
from shardhet.planner.stages.groups import MAX_STAGES, Positions, Stages, orders_of_stages
from shardhet.planner.stages.likely import (
    FORMS,
    MORE_IN_FLIGHT,
    Expected,
    Trial,
    first_stride,
    moved_cuts,
)
from shardhet.planner.stages.plans import COARSE, StagePlans
from shardhet.planner.stages.rest import best_of_rest
from shardhet.planner.stages.solution import PipelineSolution, StageSolution
from shardhet.planner.stages.tables import Tables, pipelines_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.schedule import StepForm
from shardhet.records.stages import Stage
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import (
    Hop,
    StageTimes,
    hop_of,
    least_step_s,
    pipeline_s,
    seconds_of_hops,
)
from shardhet.simulator.stages import price_of

MAX_ROUNDS = 512
LEAST_GAIN = 1e-3
MAX_SEARCHED = 16  # orders of stages, without a look at all that is left
FAR = 1.3  # times what is to be beaten: such starts are not improved
NEAR = 1.1  # times the best start of all: nor are slower ones
FAR_BEHIND = 2.0  # times the best so far: given up


@dataclass
class PipelineSearch:
    """What is known of the stages of one problem."""

    scenario: Scenario
    smaller: Callable[[Positions], Scenario]
    global_batch_size: int
    constraints: Constraints
    units: tuple[Unit, ...] = field(init=False)  # that compute
    rounds: tuple[int, ...] = field(init=False)  # numbers that divide the batch
    speeds: Speeds = field(init=False)
    tables: Tables = field(init=False)
    expected: Expected = field(init=False)
    plans: StagePlans = field(init=False)

    def __post_init__(self) -> None:
        self.units = tuple(unit for unit in self.scenario.workload.units if unit.fqn)
        most = min(
            self.global_batch_size, self.constraints.max_rounds or MAX_ROUNDS, MAX_ROUNDS
        )
        numbers = range(1, most + 1)
        self.rounds = tuple(n for n in numbers if not self.global_batch_size % n)
        self.plans = StagePlans(
            self.scenario.cluster,
            self.smaller,
            self.units,
            self.global_batch_size,
            self.constraints,
        )
        scenario_of = self.plans.scenario_of
        self.speeds = Speeds(self.scenario, scenario_of, self.units, self.global_batch_size)
        self._expect()

    def _expect(self) -> None:
        self.tables = Tables(self.speeds, self._room_of)
        self.expected = Expected(self.tables, self.rounds)

    def _room_of(self, positions: Positions) -> float:
        """Elements whose state fits on these devices, with nothing besides."""
        if self.constraints.may_keep_optimizer_on_host:
            return inf
        cluster, room = self.scenario.cluster, 0
        for i in positions:
            reserved = self.scenario.profile.device(cluster.devices[i].kind).reserved_bytes
            room += max(0, self.constraints.budget_bytes(cluster, i) - reserved)
        return room / self.scenario.workload.state_bytes_per_element

    def allowing(self, constraints: Constraints) -> "PipelineSearch":
        """The search with other constraints, for which stages are planned anew."""
        found = copy(self)
        found.constraints = constraints
        found.plans = replace(
            self.plans, constraints=constraints, _found={}, _notes={}, _known_s={}
        )
        found._expect()
        return found

    # A pipeline

    def seconds_of(self, stages: Stages, trial: Trial, cutoff_s: float = inf) -> float:
        """Seconds of a step; inf where a stage does not fit.

        Where they are no less than ``cutoff_s``, a bound on them may stand for them.
        """
        hops_s = seconds_of_hops(self.hops(stages, trial))
        number, in_flight = trial.form.num_rounds, trial.in_flight(len(stages))
        bounds = pairwise((0, *trial.cuts, len(self.units)))
        parts = list(zip(stages, bounds, in_flight, strict=True))
        times = [
            StageTimes(self._least_round_s(each, trial.form, *part, held), 0.0)
            for each, part, held in parts
        ]
        for i in sorted(range(len(stages)), key=lambda i: -times[i].round_s):
            rounds_s, per_step_s = zip(*((e.round_s, e.once_s) for e in times), strict=True)
            min_s = least_step_s(rounds_s, per_step_s, hops_s, number, in_flight, max)
            if min_s >= cutoff_s:
                return min_s
            positions, (first, stop), held = parts[i]
            found = self.plans.of(positions, first, stop, trial.form, held)
            if found is None:
                return inf
            times[i] = found.times
        return pipeline_s(times, hops_s, in_flight=in_flight, num_rounds=number)

    def tried_s(self, stages: Stages, trial: Trial, cutoff_s: float) -> float:
        """``seconds_of`` pipelines in whose stages all devices take part.

        With fewer, transfers may take less time; those are stages of their own.
        """
        min_s = self.expected.min_s(stages, trial)
        return min_s if min_s >= cutoff_s else self.seconds_of(stages, trial, cutoff_s)

    def _least_round_s(
        self, positions: Positions, form: StepForm, first: int, stop: int, in_flight: int
    ) -> float:
        """Seconds of a round that a stage needs: of compute, and of fewer of its units."""
        size = self.global_batch_size // form.num_rounds
        compute_s = self.speeds.rounds_s(positions, size)[first, stop]
        return float(
            max(compute_s, self.plans.known_s(positions, form, in_flight)[first, stop])
        )

    def hops(self, stages: Stages, trial: Trial) -> list[Hop]:
        """What is handed over from each stage to the next."""
        size = self.global_batch_size // trial.form.num_rounds
        workload = self.scenario.workload
        return [
            hop_of(self.speeds.link(*each), workload, self.units[cut], size)
            for each, cut in zip(pairwise(stages), trial.cuts, strict=True)
        ]

    # The best pipeline of given stages

    def start(self, stages: Stages, cutoff_s: float) -> tuple[float, Trial] | None:
        """Seconds and cuts to begin with, in the first form with such below ``cutoff_s``.

        The forms that are expected to be fastest come first.
        """
        budgets = self.scenario.cluster.memory_budget_bytes
        memory = [float(sum(budgets(i) for i in positions)) for positions in stages]
        sizes = [float(self.scenario.workload.kind_of(unit).numel) for unit in self.units]
        by_memory = even_cuts(memory, sizes)
        likely_by_number = {
            number: self.expected.likely_cuts(stages, number)
            for number in self.expected.start_rounds(len(stages))
        }
        forms = sorted(
            self._forms(len(stages)),
            key=lambda form: self.expected.min_s(
                stages, Trial(likely_by_number[form.num_rounds], form, MORE_IN_FLIGHT)
            ),
        )
        for form in forms:
            likely = likely_by_number[form.num_rounds]
            between = tuple((a + b) // 2 for a, b in zip(likely, by_memory, strict=True))
            best: tuple[float, Trial] | None = None
            for cuts in dict.fromkeys((likely, between, by_memory)):
                fits = False
                for more in self.expected.more_in_flight(stages, Trial(cuts, form)):
                    trial = Trial(cuts, form, more)
                    limit_s = cutoff_s if best is None else best[0]
                    seconds = self.tried_s(stages, trial, limit_s)
                    fits |= seconds < inf
                    if seconds < limit_s:
                        best = seconds, trial
                if fits:
                    break  # cuts by memory are for where no other fits
            if best is not None:
                return best
        return None

    def _forms(self, num_stages: int) -> Iterator[StepForm]:
        """Forms to begin with."""
        for number in self.expected.start_rounds(num_stages):
            yield from (replace(form, num_rounds=number) for form in FORMS)

    def improved(
        self, stages: Stages, trial: Trial, seconds: float, cutoff_s: float
    ) -> tuple[float, Trial]:
        """The best that is found from this trial of so many ``seconds``."""
        stride = first_stride(len(self.units))
        while True:
            for other in self._neighbours(stages, trial, stride):
                limit_s = seconds * (1 - LEAST_GAIN)
                found_s = self.tried_s(stages, other, limit_s)
                if found_s < limit_s:
                    trial, seconds = other, found_s
                    break
            else:
                # Cuts gain most, and the rest a little: far behind, it does not win.
                if stride == 1 or seconds > FAR_BEHIND * cutoff_s:
                    return seconds, trial
                stride //= 2

    def _neighbours(self, stages: Stages, trial: Trial, stride: int) -> Iterator[Trial]:
        """Trials that differ from this one in form, or in cuts, rounds and rounds in flight."""
        moves = [trial.cuts, *moved_cuts(trial.cuts, stride, len(self.units))]
        # Fewer samples in a round or fewer in flight take less memory, which other cuts use.
        place = self.rounds.index(trial.form.num_rounds)
        numbers = self.rounds[max(0, place - 1) : place + 2]
        # With another cut, messages may need several rounds more in flight to be hidden.
        for number in numbers:
            form = replace(trial.form, num_rounds=number)
            near = {trial.more - 1, trial.more, trial.more + 1}
            hidden = self.expected.more_in_flight(stages, Trial(trial.cuts, form))
            for more in sorted(near | hidden):
                if 0 <= more <= MORE_IN_FLIGHT:
                    yield from (Trial(cuts, form, more) for cuts in moves)
        for each in FORMS:
            if not each.is_like(trial.form):
                yield replace(trial, form=replace(each, num_rounds=trial.form.num_rounds))


_Start = tuple[Trial, Stages]


@dataclass(frozen=True, slots=True)
class _Extent:
    """How many orders of stages are looked at."""

    searched: int  # and more until so many fit as are improved
    listed: int
    improved: int


FEW = _Extent(searched=3, listed=8, improved=1)
MANY = _Extent(searched=MAX_SEARCHED, listed=128, improved=6)


def find_pipeline(
    scenario: Scenario,
    *,
    global_batch_size: int,
    smaller: Callable[[Positions], Scenario],
    max_stages: int = MAX_STAGES,
    constraints: Constraints = NO_CONSTRAINTS,
    tolerance: float | None = None,
    cutoff_s: float = inf,
    needs_all: bool = False,
) -> PipelineSolution | None:
    """The best pipeline of 2 to ``max_stages`` stages that was found; None if none fits.

    ``smaller`` creates the scenario of the devices at some positions, in the precision of the
    whole.  Pipelines with nothing on hosts are looked at first, so that what may be there makes
    none slower.  Those that start far above ``cutoff_s`` are not looked at, and with
    ``needs_all`` none that leaves devices out.  Raises ``ValueError`` if a link between stages
    is not stated.
    """
    search = PipelineSearch(scenario, smaller, global_batch_size, constraints)
    demanded = [constraints.of_device(i) for i in range(scenario.cluster.world_size)]
    orders = [
        stages
        for stages in orders_of_stages(scenario.cluster, max_stages, demanded)
        if len(stages) <= len(search.units)
        and (not needs_all or sum(map(len, stages)) == scenario.cluster.world_size)
    ]
    best: PipelineSolution | None = None
    start: _Start | None = None
    least, *_ = constraints.with_less_on_hosts()
    for each in (least, constraints) if least != constraints else (constraints,):
        allowed = search.allowing(each)
        pipelines = pipelines_of(allowed.tables, orders)
        likeliest = allowed.expected.likeliest(pipelines)
        found = _improved_of(allowed, likeliest, start, cutoff_s, FEW)
        limit_s = min(cutoff_s, inf if found is None else found[0] * (1 - LEAST_GAIN))
        rest = best_of_rest(allowed, pipelines, limit_s, LEAST_GAIN)
        found = rest.best or found
        if not rest.is_all:
            known = start if found is None else found[1:]
            found = _improved_of(allowed, likeliest, known, cutoff_s, MANY) or found
        if found is None:
            continue
        seconds, trial, stages = found
        if best is None or seconds < best.step_time_s:
            start = trial, stages
            solution = _finished(allowed, stages, trial, tolerance)
            if best is None or solution.step_time_s < best.step_time_s:
                best = solution
                cutoff_s = min(cutoff_s, best.step_time_s)
    return best


def _improved_of(
    search: PipelineSearch,
    orders: Sequence[tuple[float, Stages]],
    start: _Start | None,
    cutoff_s: float,
    extent: _Extent,
) -> tuple[float, Trial, Stages] | None:
    """The best of pipelines in these orders of stages, and of those near a ``start``."""
    started: list[tuple[float, int, Stages, Trial]] = []
    for order, (expected_s, stages) in enumerate(orders):
        best_s = min((each[0] for each in started), default=inf)
        # Where memory binds, those that are expected to be fastest may not fit.
        has_enough = len(started) >= extent.improved
        is_enough = order >= (extent.searched if has_enough else extent.listed)
        limit_s = min(FAR * cutoff_s, NEAR * best_s)
        if is_enough or expected_s >= limit_s:
            break
        if found := search.start(stages, limit_s):
            seconds, trial = found
            started.append((seconds, order, stages, trial))
    started.sort(key=lambda each: each[:2])
    if start is not None:
        trial, stages = start
        started.insert(0, (search.seconds_of(stages, trial), -1, stages, trial))
    best: tuple[float, Trial, Stages] | None = None
    for seconds, _, stages, trial in started[: extent.improved]:
        if seconds > min(FAR * cutoff_s, NEAR * started[0][0]):
            break
        found = search.improved(stages, trial, seconds, cutoff_s)
        if best is None or found[0] < best[0]:
            best = (*found, stages)
            cutoff_s = min(cutoff_s, found[0])
    return best


def _finished(
    search: PipelineSearch, stages: Stages, trial: Trial, tolerance: float | None
) -> PipelineSolution:
    """The pipeline with every stage's plan preferred of those nearly as fast."""
    bounds = list(pairwise((0, *trial.cuts, len(search.units))))
    parts = list(zip(stages, bounds, trial.in_flight(len(stages)), strict=True))

    def solved(plans: StagePlans, i: int, *, is_coarse: bool = False) -> StageSolution | None:
        positions, (first, stop), held = parts[i]
        effort, part = (COARSE, None) if is_coarse else (DEFAULT_EFFORT, tolerance)
        return plans.solved(
            positions, first, stop, trial.form, held, effort=effort, tolerance=part
        )

    def solution_of(found: Sequence[StageSolution]) -> PipelineSolution:
        plans = [each.solution.plan for each in found]
        plan = replace(
            plans[0],
            ranks=tuple(rank for each in plans for rank in each.ranks),
            units=search.scenario.workload.planned_units,
            stages=tuple(
                Stage(
                    units=tuple(unit.fqn for unit in search.units[first:stop]),
                    num_ranks=len(positions),
                    in_flight=held,
                )
                for positions, (first, stop), held in parts
            ),
        )
        costs = [cost for each in found for cost in each.solution.predicted.ranks]
        price = price_of(plan, search.scenario, search.smaller)
        return PipelineSolution(
            plan=plan,
            predicted=price.within([cost.memory_budget_bytes for cost in costs]),
            places=sum(stages, ()),
            lower_bound_s=search.speeds.least_of_any_s(),
        )

    chosen, fine = (
        [
            each
            for i in range(len(stages))
            if (each := solved(search.plans, i, is_coarse=coarse))
        ]
        for coarse in (True, False)
    )
    best, other = solution_of(chosen), solution_of(fine)
    if other.step_time_s <= best.step_time_s * (1 + (tolerance or 0.0)):
        chosen, best = fine, other
    for i, group in enumerate(best.plan.groups):
        for less in search.constraints.with_less_on_hosts()[:-1]:
            if not any(best.plan.ranks[k].is_on_host for k in group):
                break
            if (stage := solved(search.allowing(less).plans, i)) is not None:
                tried = [*chosen[:i], stage, *chosen[i + 1 :]]
                if (found := solution_of(tried)).step_time_s <= best.step_time_s:
                    chosen, best = tried, found
                    break
    return best
