"""The best plans of stages: of some devices for some units, each solved once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from shardhet.planner.find import solve
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.search.search import Effort
from shardhet.planner.stages.bound import Floats
from shardhet.planner.stages.groups import Positions
from shardhet.planner.stages.solution import StageSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.hosts import HostPart, part_of_hosts
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import StageTimes, handed_on_bytes
from shardhet.simulator.stages import with_units

COARSE = Effort(relative_gap=1e-3)


@dataclass(frozen=True)
class StagePlans:
    """What is known of the stages of one problem."""

    whole: Cluster
    smaller: Callable[[Positions], Setting]
    units: tuple[Unit, ...]  # that compute
    global_batch_size: int
    demands: Demands
    _settings: dict[Positions, Setting] = field(default_factory=dict)
    _looks: dict[Positions, int] = field(default_factory=dict)
    _number_by_look: dict[object, int] = field(default_factory=dict)
    _found: dict[tuple[object, ...], StageSolution | None] = field(default_factory=dict)
    # Of forms and rounds in flight, [looks, 1 + units, 1 + units] by first unit and stop:
    # seconds of a round at least; inf where nothing fits; None where nothing is known.
    _known_s: dict[tuple[StepForm, int], Floats | None] = field(default_factory=dict)
    _places: dict[tuple[object, ...], list[tuple[int, int]]] = field(default_factory=dict)
    _wider: dict[tuple[object, ...], NDArray[np.bool_]] = field(default_factory=dict)

    def setting_of(self, positions: Positions) -> Setting:
        """The setting of some devices."""
        if positions not in self._settings:
            setting = self.smaller(positions)
            self._settings[positions] = part_of_hosts(setting, self.whole, positions)
        return self._settings[positions]

    def of(
        self, positions: Positions, first: int, stop: int, form: StepForm, in_flight: int
    ) -> StageSolution | None:
        """The best plan of such devices for such units: as good as that of these."""
        if len(positions) == 1:  # it reduces nothing
            form = replace(form, reduce_each_round=False)
        looks, units = self.looks_of(positions), self._units(first, stop)
        key = (looks, units, form, in_flight)
        if key not in self._found:
            found = self._found[key] = self.solved(positions, first, stop, form, in_flight)
            if self._is_proven(positions):
                round_s = inf
                if found is not None:
                    round_s = self._least_round_s(found, first, stop, form)
                self._note(positions, units, form, in_flight, round_s)
        return self._found[key]

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
        nodes = self.setting_of(positions).cluster.nodes
        states_memory = any(node.host_memory_bytes is not None for node in nodes)
        demands = self.demands
        on_hosts = demands.may_keep_inputs_on_host or demands.may_keep_optimizer_on_host
        return not (demands.whole_matrices or (on_hosts and states_memory))

    def _least_round_s(
        self, found: StageSolution, first: int, stop: int, form: StepForm
    ) -> float:
        """Seconds of a round of any plan for a stage of which the best was found.

        No step is shorter, but less of one may be rounds: the rest is at most the optimizer of
        a device that stores everything, and transfers that it sends to all others.
        """
        setting = self.setting_of(found.positions)
        part = with_units(setting, self.units[first:stop])
        prices, cluster = CostModel(part).in_form(form), setting.cluster
        most_s = prices.beside(unevenness=float(cluster.world_size)).exposed_s
        per_element_s = [
            setting.profile.device(each.kind).optimizer_seconds_per_element
            for each in cluster.devices
        ]
        if self.demands.may_keep_optimizer_on_host:
            per_element_s += [
                prices.most_host_seconds_per_numel(HostPart.of(node, len(node.devices)))
                for node in cluster.nodes
            ]
        most_s += max(per_element_s) * part.workload.numel
        times, number = found.times, form.num_rounds
        step_s = number * times.round_s + times.once_s
        return max(0.0, ((1 - COARSE.relative_gap) * step_s - most_s) / number)

    def _note(
        self,
        positions: Positions,
        units: tuple[object, ...],
        form: StepForm,
        in_flight: int,
        round_s: float,
    ) -> None:
        """Note what such a stage needs, which all need that hold its units and more."""
        looks, wider = self.looks_of(positions), self._wider_than(positions, units)
        self.known_s(form, in_flight)
        for other, held in self._known_s:
            if other == form and held >= in_flight:
                known_s = self.known_s(form, held)
                if self._known_s[form, held] is None:
                    known_s = self._known_s[form, held] = known_s.copy()
                known_s[looks][wider] = np.maximum(known_s[looks][wider], round_s)

    def _wider_than(self, positions: Positions, units: tuple[object, ...]) -> NDArray[np.bool_]:
        """[1 + units, 1 + units] the stages that hold as much as one of such units, or more.

        At an end where that one has messages, which take memory, they have no smaller ones.
        """
        if units not in self._wider:
            workload, number = self.setting_of(positions).workload, len(self.units)
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

    def looks_of(self, positions: Positions) -> int:
        """A number for what distinguishes a set of devices from others, for the planner."""
        if positions not in self._looks:
            cluster = self.setting_of(positions).cluster
            nodes = [
                (node.region, replace(node, host="", region="", devices=devices))
                for node in cluster.nodes
                for devices in [tuple(replace(e, host=None) for e in node.devices)]
            ]
            on_nodes = tuple(nodes) if len(nodes) > 1 else nodes[0][1:]
            look = on_nodes, tuple(self.demands.of_device(i) for i in positions)
            known = self._number_by_look
            self._looks[positions] = known.setdefault(look, len(known))
        return self._looks[positions]

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
        setting = self.setting_of(positions)
        after = self.units[stop] if stop < len(self.units) else None
        try:
            solution = solve(
                with_units(setting, self.units[first:stop]),
                global_batch_size=self.global_batch_size,
                demands=replace(
                    self.demands.only(positions),
                    form=form,
                    has_one_level=True,
                    rounds_in_flight=in_flight,
                    receives=first > 0,
                    hands_on_bytes=handed_on_bytes(setting.workload, after),
                ),
                effort=effort,
                tolerance=tolerance,
                is_bounded=False,
            )
        except PlanError:
            return None
        return StageSolution(
            positions=positions,
            solution=solution,
            times=StageTimes.of(solution.predicted, solution.plan.num_rounds),
        )

    def known_s(self, form: StepForm, in_flight: int) -> Floats:
        """[looks, 1 + units, 1 + units] seconds of a round at least, of what was planned.

        A stage needs as many as one of fewer of its units, or with less in flight.
        """
        key, num_looks = (form, in_flight), len(self._number_by_look)
        if key not in self._known_s:
            fewer = range(1, in_flight)
            held = [n for n in fewer if self._known_s.get((form, n)) is not None]
            known = [self.known_s(form, n) for n in held]
            self._known_s[key] = np.maximum.reduce(known) if known else None
        found_s = self._known_s[key]
        if found_s is None:
            size = 1 + len(self.units)
            return np.broadcast_to(0.0, (num_looks, size, size))
        if (missing := num_looks - len(found_s)) > 0:
            found_s = self._known_s[key] = np.pad(found_s, ((0, missing), (0, 0), (0, 0)))
        return found_s
