"""Rebalancer: notices when a device stays slower than its profile, and plans anew.

Every rank adds up how long its device computes in a step.  Every ``WINDOW`` steps the ranks
exchange their medians; all reach the same verdict from the same numbers.  If another plan is
worth it, rank zero makes it, and all ranks move their rows (``redistribute``).  Stages keep
their devices and units: samples and rows move inside of them.

Computing is timed as ``shardhet.fsdp.step.around`` says: on an accelerator between two
events, which are read once the device has passed them, so that the host waits for nothing.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardhet.checkpoint import redistribute
from shardhet.comm.channel import may_take_long
from shardhet.fsdp.step.around import COMPUTING, Observed
from shardhet.planner import Constraints, PlanError, solve
from shardhet.planner.problem.constraints import TOLERANCE
from shardhet.planner.stages.again import planned_again
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm
from shardhet.training.hooks.hooks import Hook, Hooks
from shardhet.training.slow_devices import (
    SLOW,
    at_speeds,
    compute_seconds,
    of_devices,
    places_of,
    rounded,
    slownesses,
    step_seconds,
)

WINDOW = 5  # steps; a device that slows down is found out after three to seven of them
# First steps under a plan, which are not counted: they probe the model and touch new memory.
NUM_WARM_UP_STEPS = 2
LEAST_GAIN = 0.03  # of the step time, that is worth moving rows for


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlan:
    """What replaced the plan."""

    plan: Plan
    slowness: Mapping[int, float]  # that it was made for, by position
    expected_s: tuple[float, ...]  # of computing in a step, by position
    predicted_before_s: float  # of a step under the plan before, at the speeds that were found
    predicted_s: float
    moved_in_s: float = 0.0  # planning, and moving parameters and optimizer states


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Devices that compute at other speeds than the plan was made for; the same on all ranks.

    By position of the plan; a slowness is relative to the other devices, None for a device
    that does not compute.
    """

    slowness: tuple[float | None, ...]
    measured_s: tuple[float, ...]  # of computing in a step, the median of the last steps
    expected_s: tuple[float, ...]  # by the profile, at the speeds that were found before
    new_plan: NewPlan | None
    why_not: str | None = None  # there is no new plan

    @property
    def slow(self) -> tuple[int, ...]:
        """The devices that are slow."""
        return _beyond(self.slowness)[0]

    def text(self, devices: Sequence[str]) -> str:
        """What was found and done, in words; ``devices`` are the names of all."""
        slow, fast = _beyond(self.slowness)
        parts = [
            f"device {i} ({devices[i]}) computes {self.slowness[i]:.2f} times as long as "
            f"planned, beside the others: {self.measured_s[i]:.3f} s a step instead of "
            f"{self.expected_s[i]:.3f} s"
            for i in (slow or fast)
        ]
        if self.new_plan is not None:
            new = self.new_plan
            batches = ", ".join(str(rank.rank_batch_size) for rank in new.plan.ranks)
            parts.append(
                f"planned anew: batches of {batches}; a step is predicted to take "
                f"{new.predicted_s:.3f} s instead of {new.predicted_before_s:.3f} s; planned "
                f"and moved in {new.moved_in_s:.2f} s"
            )
        elif self.why_not is not None:
            parts.append(self.why_not)
        return "; ".join(parts)


class Rebalancer(Hook):
    """Watches the speeds of a model's devices while it trains, and says which are slow.

        with Hooks(model, optimizer, [Rebalancer("measured")]) as hooks:
            for batch in hooks.steps(loader):  # dealt by model.plan
                ...
                optimizer.step()
                optimizer.zero_grad()  # model.plan may be another one after it

    Only computations in training mode count.  Between steps there may be no gradients.
    """

    def __init__(
        self,
        scenario: Scenario | str | Path,
        *,
        replans: bool = True,
        constraints: Constraints | None = None,
        devices: Sequence[DeviceSpec] = (),
        then: "Callable[[int, Plan, Rebalancer], None]" = lambda step, plan, self: None,
    ) -> None:
        """Begin with ``Hooks``, which raises ``ValueError`` for a scenario of another model.

        Args:
            scenario: what the plan was made from, or the folder of ``shardhet measure``.
            replans: whether to follow another plan where that is faster.
            constraints: what new plans have to respect besides budgets of memory.
            devices: to be named by position; none: those of the plan.
            then: is called once a new plan is followed, after a step.
        """
        self._scenario = scenario if isinstance(scenario, Scenario) else Scenario.load(scenario)
        self.replans, self._then = replans, then
        self._constraints, self._devices = constraints or Constraints(), devices
        self.found: Imbalance | None = None  # after the last step

    def begin(self, run: Hooks) -> None:
        """Watch from now on; the model is trained under a plan of the scenario."""
        self._run, self._model, scenario = run, run.model, self._scenario
        model = run.model
        devices = self._devices or [each.device for each in model.plan.ranks]
        self._names = [str(each) for each in devices]
        self._places = places_of(model.plan, scenario)  # in the cluster, by position
        constraints = replace(self._constraints, whole_matrices=model.plan.whole_matrices or ())
        self._placed_constraints = _of_places(constraints, self._places)
        self._placed_constraints.check(scenario.cluster.world_size)
        self._slowness: Mapping[int, float] = {}  # by position, found so far
        scenario.check_plan(model.plan, name="scenario")
        expected_s = compute_seconds(model.plan, scenario, self._places)
        self._expected_s = self._of_rank_zero(expected_s)
        self._num_steps = -NUM_WARM_UP_STEPS
        self._events: list[Observed] = []  # of the step in progress
        self._unread: deque[list[Observed]] = deque()  # of steps that the device may still run
        self._times_s: deque[float] = deque(maxlen=WINDOW)
        self._said: tuple[tuple[int, ...], ...] = ((), ())
        self._tried: dict[int, float] = {}
        self._stop_observing = model.add_observer(self._observe, times_device=True)

    def end(self, error: BaseException | None) -> None:
        self._stop_observing()

    def after_step(self, step: int, loss: float | None) -> None:
        """Say what was found out and not said before, and follow a new plan if there is one."""
        self.found = self._look()
        if self.found is None:
            return
        said = f"after step {step}: {self.found.text(self._names)}"
        pairs = enumerate(self.found.slowness)
        values = {f"device{i}/slowness": each for i, each in pairs if each is not None}
        if self.found.new_plan is not None:
            values["planned_anew"] = 1.0
            self._then(step, self._model.plan, self)
            self._run.forget_peak_memory()
        elif not self.replans:
            said += "; rebalance=true (Rebalancer(replans=True)) would plan anew"
        self._run.log(step, values)
        self._run.say(said, logging.WARNING)

    def _look(self) -> Imbalance | None:
        self._unread.append(self._events)
        self._events = []
        self._num_steps += 1
        if self._num_steps <= 0:
            self._unread.clear()
            return None
        self._read_times()
        if self._num_steps % WINDOW:
            return None
        mine_s = median(self._times_s) if self._times_s else 0.0
        measured_s = tuple(row[0] for row in self._model.exchange([mine_s]))
        return self._judge(measured_s)

    @property
    def scenario(self) -> Scenario:
        """The scenario, at the speeds that the present plan was made for."""
        return self._at(self._slowness)

    def in_scenario(self, plan: Plan) -> Plan:
        """The plan as one for the devices of ``scenario``."""
        return of_devices(plan, self.scenario, self._places)

    def _at(self, slowness_by_position: Mapping[int, float]) -> Scenario:
        slowness = {self._places[i]: each for i, each in slowness_by_position.items()}
        return at_speeds(self._scenario, slowness)

    def _of_rank_zero(self, value: Any) -> Any:
        by_position = self._model.exchange_objects((self._model.rank, value))
        return next(theirs for rank, theirs in by_position if rank == 0)

    def _observe(self, event: Observed) -> None:
        if event.activity in COMPUTING and self._model.training:
            self._events.append(event)

    def _read_times(self) -> None:
        """Add up the steps that the device has completed."""
        while self._unread:
            try:
                seconds = sum(event.seconds for event in self._unread[0])
            except RuntimeError:  # it has not
                return
            self._unread.popleft()
            self._times_s.append(seconds)

    def _judge(self, measured_s: tuple[float, ...]) -> Imbalance | None:
        expected_s = self._expected_s
        found = slownesses(measured_s, expected_s)
        beyond = _beyond(found)
        new_plan, why_not = None, None
        if self.replans and any(beyond):
            new_plan, why_not = self._plan_anew(found)
        is_news = bool(beyond[0]) and beyond != self._said
        self._said = beyond if new_plan is None else ((), ())
        if new_plan is None and not is_news:
            return None
        return Imbalance(
            slowness=found,
            measured_s=measured_s,
            expected_s=expected_s,
            new_plan=new_plan,
            why_not=why_not,
        )

    def _plan_anew(self, found: tuple[float | None, ...]) -> tuple[NewPlan | None, str | None]:
        """Follow another plan if it is faster; else why not.  Collective."""
        start_s = time.perf_counter()
        model = self._model
        with may_take_long("planning anew"), model.fail_together("planning anew"):
            mine = self._decide(found) if model.rank == 0 else None
        # Rank zero alone decides: sums of floats might differ between kinds of processors.
        decision: NewPlan | str | None = self._of_rank_zero(mine)
        if not isinstance(decision, NewPlan):
            return None, decision
        for optimizer in self._run.optimizers:
            optimizer.zero_grad()  # of the step that is over
        redistribute(model, self._run.optimizers, decision.plan)
        self._slowness = decision.slowness
        self._expected_s = decision.expected_s
        self._num_steps = -NUM_WARM_UP_STEPS
        self._unread.clear()
        self._times_s.clear()
        return replace(decision, moved_in_s=time.perf_counter() - start_s), None

    def _decide(self, found: tuple[float | None, ...]) -> NewPlan | str | None:
        """On rank zero: the best plan at these speeds, or why there is none; None: no news."""
        before = self._model.plan
        slowness = dict(self._slowness)  # of devices that do not compute now, too
        for i, each in enumerate(found):
            if each is not None:
                slowness[i] = rounded(slowness.get(i, 1.0) * each)
        slowness = {i: each for i, each in slowness.items() if each != 1.0}
        if slowness == self._tried:
            return None
        self._tried = slowness
        scenario = self._at(slowness)
        try:
            plan = self._best(slowness, scenario)
        except PlanError as error:
            return f"no plan was found: {error}"
        before_s, after_s = (step_seconds(p, scenario, self._places) for p in (before, plan))
        if after_s > (1 - LEAST_GAIN) * before_s:
            kept = "" if before.stages is None else ", if stages keep their units"
            return f"no plan is predicted to be {LEAST_GAIN:.0%} faster{kept}"
        return NewPlan(
            plan=plan,
            slowness=slowness,
            expected_s=compute_seconds(plan, scenario, self._places),
            predicted_before_s=before_s,
            predicted_s=after_s,
        )

    def _best(self, slowness: Mapping[int, float], scenario: Scenario) -> Plan:
        """The best plan at these speeds. In a pipeline, stages whose speeds did not change
        keep their plan.
        """
        before = self._model.plan
        if before.stages is not None:
            if before.resident_units:
                raise PlanError("stages that keep frozen weights are not planned anew")
            is_news = [
                slowness.get(i) != self._slowness.get(i) for i in range(before.world_size)
            ]
            return planned_again(
                before,
                scenario,
                self._places,
                stages=[
                    s for s, group in enumerate(before.groups) if any(is_news[i] for i in group)
                ],
                constraints=self._placed_constraints,
                tolerance=TOLERANCE,
            )
        solution = solve(
            scenario,
            global_batch_size=before.global_batch_size,
            constraints=replace(self._placed_constraints, form=StepForm.of(before)),
            tolerance=TOLERANCE,
        )
        ranks = tuple(
            replace(new, device=old.device, optimizer_on_host=old.optimizer_on_host)
            for new, old in zip(solution.plan.ranks, before.ranks, strict=True)
        )
        return replace(solution.plan, ranks=ranks, units=before.units)


def _of_places(constraints: Constraints, places: Sequence[int]) -> Constraints:
    """Demands on positions of a plan, as on those of its cluster."""
    return replace(
        constraints,
        limits={places[i]: each for i, each in constraints.limits.items()},
        equal=tuple(tuple(places[i] for i in each) for each in constraints.equal),
    )


def _beyond(slowness: Sequence[float | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The devices that are slow, and those that are fast."""
    known = [(i, each) for i, each in enumerate(slowness) if each is not None]
    slow = tuple(i for i, each in known if each >= SLOW)
    return slow, tuple(i for i, each in known if each <= 1 / SLOW)


NUM_FIRST_STEPS = 3  # which predictions do not cover


def beside(predicted_s: float, step_times_s: Sequence[float]) -> str:
    """One line that compares step times with the prediction.

    It is their median, without the first steps unless there are no others.
    """
    measured_s = median(step_times_s[NUM_FIRST_STEPS:] or step_times_s)
    return (
        f"a step was predicted to take {1000 * predicted_s:.0f} ms and took "
        f"{1000 * measured_s:.0f} ms (median of {len(step_times_s)}): "
        f"{measured_s / predicted_s - 1:+.1%}"
    )


class Predicted(Hook):
    """Says in the end how long a step took, beside what was predicted of it."""

    def __init__(self, scenario: Scenario | str | Path) -> None:
        """``scenario`` is what the plan was made from, or the folder it was measured in."""
        self._scenario = scenario if isinstance(scenario, Scenario) else Scenario.load(scenario)

    def begin(self, run: Hooks) -> None:
        self._run, self._plan = run, run.model.plan
        self._step_times_s: list[float] = []  # under this plan
        self._scenario.check_plan(self._plan, name="scenario")

    def before_step(self, step: int) -> None:
        self._began_s = time.perf_counter()

    def after_step(self, step: int, loss: float | None) -> None:
        if self._run.model.plan is not self._plan:
            self._plan, self._step_times_s = self._run.model.plan, []
        self._step_times_s.append(time.perf_counter() - self._began_s)

    def end(self, error: BaseException | None) -> None:
        if error is None and self._step_times_s:
            found = self._run.find(Rebalancer)  # knows at which speeds
            scenario = self._scenario if found is None else found.scenario
            places = places_of(self._plan, self._scenario)
            predicted_s = step_seconds(self._plan, scenario, places)
            self._run.say(beside(predicted_s, self._step_times_s))
