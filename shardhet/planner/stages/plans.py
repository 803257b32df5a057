"""The best plans of stages: of some devices for some units, each solved once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from shardhet.planner.find import solve
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.search.search import Effort
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


@dataclass(frozen=True, slots=True)
class _Part:
    """What is known of a stage of some devices: seconds of a round, inf where nothing fits."""

    first: int  # unit
    stop: int
    in_flight: int
    round_s: float


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
    _parts: dict[tuple[int, StepForm], list[_Part]] = field(default_factory=dict)

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
        kinds = tuple(unit.kind for unit in self.units[first:stop])
        looks = self.looks_of(positions)
        after = self.units[stop].kind if stop < len(self.units) else None
        key = (looks, kinds, form, in_flight, first > 0, after)
        if key not in self._found:
            found = self._found[key] = self.solved(positions, first, stop, form, in_flight)
            round_s = inf
            if found is not None:
                round_s = (1 - COARSE.relative_gap) * found.times.round_s
            part = _Part(first, stop, in_flight, round_s)
            self._parts.setdefault((looks, form), []).append(part)
        return self._found[key]

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
            unit_fqns=tuple(unit.fqn for unit in self.units[first:stop]),
            in_flight=in_flight,
            solution=solution,
            times=StageTimes.of(solution.predicted, solution.plan.num_rounds),
        )

    def least_round_s(
        self, positions: Positions, first: int, stop: int, form: StepForm, in_flight: int
    ) -> float:
        """Seconds of a round that a stage needs: as many as one of fewer of its units.

        At an end where that one has messages, which take memory, the stage has them too.
        """
        least_s, end = 0.0, len(self.units)
        for part in self._parts.get((self.looks_of(positions), form), ()):
            has_less = first <= part.first and part.stop <= stop and part.in_flight <= in_flight
            receives_less, sends_less = first or not part.first, stop < end or part.stop == end
            if has_less and receives_less and sends_less:
                least_s = max(least_s, part.round_s)
        return least_s
