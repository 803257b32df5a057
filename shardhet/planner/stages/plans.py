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
from shardhet.pricing.hosts import part_of_hosts
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
    _alone: list[bool] = field(default_factory=list)  # whether it is a single device, by look
    _found: dict[tuple[object, ...], StageSolution | None] = field(default_factory=dict)
    # Of forms and rounds in flight, [looks, 1 + units, 1 + units] by first unit and stop:
    # seconds of a round at least; inf where nothing fits.
    _known_s: dict[tuple[StepForm, int], Floats] = field(default_factory=dict)
    _places: dict[tuple[object, ...], list[tuple[int, int]]] = field(default_factory=dict)

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
            round_s = inf
            if found is not None:
                round_s = (1 - COARSE.relative_gap) * found.times.round_s
            self.known_s(form, in_flight)
            for other, held in list(self._known_s):
                if held >= in_flight and other.num_rounds <= form.num_rounds:
                    least_s = float(_needed_s(round_s, self._alone[looks], form, other))
                    for place in self._alike(units) if least_s else ():
                        self._raise(self.known_s(other, held)[looks], *place, least_s)
        return self._found[key]

    @property
    def num_solved(self) -> int:
        """How many stages were planned so far."""
        return len(self._found)

    def _units(self, first: int, stop: int) -> tuple[object, ...]:
        """What distinguishes some units from others, for the planner."""
        after = self.units[stop].kind if stop < len(self.units) else None
        return tuple(unit.kind for unit in self.units[first:stop]), first > 0, after

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
            if len(known) > len(self._alone):
                self._alone.append(len(positions) == 1)
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
            unit_fqns=tuple(unit.fqn for unit in self.units[first:stop]),
            in_flight=in_flight,
            solution=solution,
            times=StageTimes.of(solution.predicted, solution.plan.num_rounds),
        )

    def known_s(self, form: StepForm, in_flight: int) -> Floats:
        """[looks, 1 + units, 1 + units] seconds of a round at least, of what was planned.

        A stage needs as many as one of fewer of its units, or with less in flight.  At an end
        where that one has messages, which take memory, the stage has them too.  What is known
        of other forms counts as well.
        """
        key, num_looks = (form, in_flight), len(self._number_by_look)
        if key not in self._known_s:
            size = 1 + len(self.units)
            found_s = np.zeros((num_looks, size, size))
            for (other, held), known_s in self._known_s.items():
                is_near = other.num_rounds == form.num_rounds or other.is_like(form)
                if is_near and held <= in_flight:
                    part_s = found_s[: len(known_s)]
                    alone = np.array(self._alone[: len(known_s)])[:, None, None]
                    needed_s = _needed_s(known_s, alone, other, form)
                    np.maximum(part_s, needed_s, out=part_s)
            self._known_s[key] = found_s
        elif (missing := num_looks - len(self._known_s[key])) > 0:
            padding = ((0, missing), (0, 0), (0, 0))
            self._known_s[key] = np.pad(self._known_s[key], padding)
        return self._known_s[key]

    def _raise(self, known_s: Floats, first: int, stop: int, round_s: float) -> None:
        """Note what some units need, which all stages need that have these and more."""
        most = stop == len(self.units)
        part_s = known_s[first > 0 : first + 1, stop : len(self.units) + most]
        np.maximum(part_s, round_s, out=part_s)


def _needed_s(
    round_s: Floats | float, alone: NDArray[np.bool_] | bool, form: StepForm, other: StepForm
) -> Floats:
    """Seconds of a round that a stage needs in another form, given those in a form.

    One device has no transfers: it takes as long in any form in which its units fit.  What
    does not fit, neither does where units stay gathered, or where rounds have more samples;
    but of one round no sums are kept.
    """
    number, gathered_later = other.num_rounds, not other.reshard_after_forward
    is_alike = np.logical_or(alone, form.reduce_each_round == other.reduce_each_round)
    if not (form.reshard_after_forward or gathered_later):
        return np.zeros_like(round_s)
    if number == form.num_rounds:
        same = np.logical_or(alone, form.is_like(other))
        never_s = np.where(np.isinf(round_s) & is_alike, inf, 0.0)
        return np.where(same, round_s, never_s)
    if 1 < number < form.num_rounds:
        return np.where(np.isinf(round_s) & is_alike, inf, 0.0)
    return np.zeros_like(round_s)
