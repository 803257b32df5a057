"""The best plans of stages: of some devices for some units, each solved once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from shardhet.planner.find import solve
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.search.search import Effort
from shardhet.planner.shares import priced
from shardhet.planner.stages.bound import Floats
from shardhet.planner.stages.groups import Positions
from shardhet.planner.stages.solution import StageSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.hosts import HostPart, part_of_hosts
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import handed_on_bytes
from shardhet.simulator.stages import with_units

COARSE = Effort(relative_gap=1e-3)


@dataclass(frozen=True, slots=True)
class _Known:
    """What every stage needs that holds what one does, or more, as was found of that one."""

    form: StepForm
    in_flight: int
    wider: NDArray[np.bool_]  # [1 + units, 1 + units] such stages, by first unit and stop
    round_s: float  # inf where nothing fits


@dataclass(frozen=True)
class StagePlans:
    """What is known of the stages of one problem."""

    whole: Cluster
    smaller: Callable[[Positions], Scenario]
    units: tuple[Unit, ...]  # that compute
    global_batch_size: int
    constraints: Constraints
    _settings: dict[Positions, Scenario] = field(default_factory=dict)
    _cost_keys: dict[Positions, int] = field(default_factory=dict)
    _number_by_key: dict[object, int] = field(default_factory=dict)
    _found: dict[tuple[object, ...], StageSolution | None] = field(default_factory=dict)
    # By look.
    _notes: dict[int, list[_Known]] = field(default_factory=dict)
    # By look, form and rounds in flight: what the first so many notes say.
    _known_s: dict[tuple[int, StepForm, int], tuple[int, Floats]] = field(default_factory=dict)
    _places: dict[tuple[object, ...], list[tuple[int, int]]] = field(default_factory=dict)
    _wider: dict[tuple[object, ...], NDArray[np.bool_]] = field(default_factory=dict)

    def scenario_of(self, positions: Positions) -> Scenario:
        """The scenario of some devices."""
        if positions not in self._settings:
            scenario = self.smaller(positions)
            self._settings[positions] = part_of_hosts(scenario, self.whole, positions)
        return self._settings[positions]

    def of(
        self, positions: Positions, first: int, stop: int, form: StepForm, in_flight: int
    ) -> StageSolution | None:
        """The best plan of such devices for such units: as good as that of these."""
        form, least = _own_and_least(positions, form)
        looks, units = self.cost_keys_of(positions), self._units(first, stop)
        key = (looks, units, form, in_flight)
        if key not in self._found:
            known = None
            if form != least:
                known = self.of(positions, first, stop, least, in_flight)
                known = known and self._in_form(known, form, in_flight)
            self._found[key] = known or self._noted(positions, first, stop, form, in_flight)
        return self._found[key]

    def _noted(
        self, positions: Positions, first: int, stop: int, form: StepForm, in_flight: int
    ) -> StageSolution | None:
        """``solved``, of which it is noted what others need that hold as much, or more."""
        found = self.solved(positions, first, stop, form, in_flight)
        if self._is_proven(positions):
            round_s = inf
            if found is not None:
                round_s = self._least_round_s(found, first, stop, form)
            wider = self._wider_than(positions, self._units(first, stop))
            note = _Known(form, in_flight, wider, round_s)
            self._notes.setdefault(self.cost_keys_of(positions), []).append(note)
        return found

    @property
    def num_solved(self) -> int:
        """How many stages were planned so far."""
        return len(self._found)

    def _units(self, first: int, stop: int) -> tuple[object, ...]:
        """What distinguishes some units from others, for the planner."""
        after = self.units[stop].kind if stop < len(self.units) else None
        return tuple(unit.kind for unit in self.units[first:stop]), first > 0, after

    def _is_proven(self, positions: Positions) -> bool:
        """Whether no plan is better than the one found: not where devices share the memory of
        hosts, of which few divisions are tried, or matrices have owners beside given batches.
        """
        nodes = self.scenario_of(positions).cluster.nodes
        states_memory = any(node.host_memory_bytes is not None for node in nodes)
        constraints = self.constraints
        on_hosts = constraints.may_keep_inputs_on_host or constraints.may_keep_optimizer_on_host
        return not (constraints.whole_matrices or (on_hosts and states_memory))

    def _least_round_s(
        self, found: StageSolution, first: int, stop: int, form: StepForm
    ) -> float:
        """Seconds of a round of any plan for a stage of which the best was found.

        No step is shorter, but less of one may be rounds: the rest is at most the optimizer of
        a device that stores everything, and transfers that it sends to all others.
        """
        scenario = self.scenario_of(found.positions)
        part = with_units(scenario, self.units[first:stop])
        prices, cluster = CostModel(part).in_form(form), scenario.cluster
        most_s = prices.beside(unevenness=float(cluster.world_size)).exposed_s
        per_element_s = [
            scenario.profile.device(each.kind).optimizer_seconds_per_element
            for each in cluster.devices
        ]
        if self.constraints.may_keep_optimizer_on_host:
            per_element_s += [
                prices.most_host_seconds_per_numel(HostPart.of(node, len(node.devices)))
                for node in cluster.nodes
            ]
        most_s += max(per_element_s) * part.workload.numel
        times, number = found.times, form.num_rounds
        step_s = number * times.round_s + times.once_s
        return max(0.0, ((1 - COARSE.relative_gap) * step_s - most_s) / number)

    def _wider_than(self, positions: Positions, units: tuple[object, ...]) -> NDArray[np.bool_]:
        """[1 + units, 1 + units] the stages that hold as much as one of such units, or more.

        Where the given stage sends or receives, these must send or receive at least as many
        bytes, since messages take memory.
        """
        if units not in self._wider:
            workload, number = self.scenario_of(positions).workload, len(self.units)
            sent = [handed_on_bytes(workload, unit) for unit in (*self.units, None)]
            found = self._wider[units] = np.zeros((1 + number, 1 + number), dtype=bool)
            for first, stop in self._alike(units):
                firsts = [i for i in range(first > 0, first + 1) if sent[i] >= sent[first]]
                stops = [i for i in range(stop, max(number, stop + 1)) if sent[i] >= sent[stop]]
                found[np.ix_(firsts, stops)] = True
        return self._wider[units]

    def _alike(self, units: tuple[object, ...]) -> list[tuple[int, int]]:
        """First unit and stop of all such units."""
        if not self._places:
            for first, stop in combinations(range(1 + len(self.units)), 2):
                self._places.setdefault(self._units(first, stop), []).append((first, stop))
        return self._places[units]

    def cost_keys_of(self, positions: Positions) -> int:
        """A number for what distinguishes a set of devices from others, for the planner."""
        if positions not in self._cost_keys:
            cluster = self.scenario_of(positions).cluster
            nodes = [
                (node.region, replace(node, host="", region="", devices=devices))
                for node in cluster.nodes
                for devices in [tuple(replace(e, host=None) for e in node.devices)]
            ]
            on_nodes = tuple(nodes) if len(nodes) > 1 else nodes[0][1:]
            look = on_nodes, tuple(self.constraints.of_device(i) for i in positions)
            known = self._number_by_key
            self._cost_keys[positions] = known.setdefault(look, len(known))
        return self._cost_keys[positions]

    def solved(
        self,
        positions: Positions,
        first: int,
        stop: int,
        form: StepForm,
        in_flight: int,
        *,
        effort: Effort = COARSE,
        tolerance: float | None = None,
    ) -> StageSolution | None:
        """The best plan of some devices for some units; None if nothing fits."""
        try:
            solution = solve(
                self._part(positions, first, stop),
                global_batch_size=self.global_batch_size,
                constraints=self._constraints_of(positions, first, stop, form, in_flight),
                effort=effort,
                tolerance=tolerance,
                is_bounded=False,
            )
        except PlanError:
            return None
        return StageSolution.of(positions, first, stop, solution)

    def _in_form(
        self, found: StageSolution, form: StepForm, in_flight: int
    ) -> StageSolution | None:
        """The same in another form; None if it does not fit."""
        stage = found.positions, *found.units
        constraints = self._constraints_of(*stage, form, in_flight)
        plan = replace(
            found.solution.plan,
            reshard_after_forward=form.reshard_after_forward,
            reshard_after_backward=form.reshard_after_backward,
        )
        prices = CostModel(
            self._part(*stage),
            in_flight=in_flight,
            receives=constraints.receives,
            hands_on_bytes=constraints.hands_on_bytes,
        )
        solution = priced(plan, prices, constraints)
        return StageSolution.of(*stage, solution) if solution.fits else None

    def _part(self, positions: Positions, first: int, stop: int) -> Scenario:
        return with_units(self.scenario_of(positions), self.units[first:stop])

    def _constraints_of(
        self, positions: Positions, first: int, stop: int, form: StepForm, in_flight: int
    ) -> Constraints:
        after = self.units[stop] if stop < len(self.units) else None
        workload = self.scenario_of(positions).workload
        return replace(
            self.constraints.only(positions),
            form=form,
            has_one_level=True,
            rounds_in_flight=in_flight,
            receives=first > 0,
            hands_on_bytes=handed_on_bytes(workload, after),
        )

    def known_s(self, positions: Positions, form: StepForm, in_flight: int) -> Floats:
        """[1 + units, 1 + units] seconds of a round at least, of what was planned, by first
        unit and stop.

        A stage needs as many as one of fewer of its units, or with less in flight.
        """
        forms, looks = _own_and_least(positions, form), self.cost_keys_of(positions)
        key, notes = (looks, forms[0], in_flight), self._notes.get(looks, ())
        size = 1 + len(self.units)
        number, known_s = self._known_s.get(key, (0, np.broadcast_to(0.0, (size, size))))
        for note in notes[number:]:
            if note.form in forms and note.in_flight <= in_flight:
                known_s = np.maximum(known_s, np.where(note.wider, note.round_s, 0.0))
        self._known_s[key] = len(notes), known_s
        return known_s


def _own_and_least(positions: Positions, form: StepForm) -> tuple[StepForm, StepForm]:
    """The form as it is of some devices, and the one in which they need no more.

    One device transfers nothing, so that it reduces once and may gather for every use.
    """
    if len(positions) > 1:
        return form, form
    least = StepForm(num_rounds=form.num_rounds, reduce_each_round=False)
    return replace(form, reduce_each_round=False), least
