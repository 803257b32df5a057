"""Predict whether a cluster is faster without some of its devices.

A collective over all devices is as slow as the slowest link that it crosses, and one kind of
device without bfloat16 forces all to float32, whatever the plan gives them to do.  So sets of
devices are left out one after the other: kinds, types of nodes, nodes, regions, the slowest
kinds together, one device of those that are alike, and those that do nothing.  First, each set
is also tried alone, without all others.  In every round the set whose removal helps most goes,
until none helps.

A set is planned for only if its bound allows a gain: no step is shorter than all its
communication, or than the batch divided by the sum of what the devices compute per second.  So
many sets cost little, and at most ``MAX_SOLVES`` plans are made, those with the least bounds
(``MAX_SOLVES_IF_LARGE`` for a cluster of many devices or kinds).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardhet.planner.candidates import (
    LEAST_MAX_MICROBATCH_SIZE,
    MICROBATCHES_BEYOND_MEASURED,
)
from shardhet.planner.demands import Demands
from shardhet.planner.find import solve
from shardhet.planner.search import Effort
from shardhet.planner.solution import PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, Node

LEAST_GAIN = 1.02  # smaller gains are within the error of any prediction
MAX_SOLVES = 12
MAX_SOLVES_IF_LARGE = 3
LARGE = 512  # devices
MAX_KINDS = 16  # of which each is left out alone; of more, only the slowest
MAX_NODES = 16  # likewise
Positions = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """A part of a cluster on which the step is shorter than on the whole."""

    kept: Positions
    left_out: Positions
    setting: Setting  # of the devices that stay
    demands: Demands  # likewise
    solution: PlanSolution  # within the effort of the comparison


def faster_on_fewer(
    setting: Setting,
    whole: PlanSolution,
    *,
    demands: Demands,
    smaller: Callable[[Positions], Setting],
    effort: Effort,
) -> Fewer | None:
    """The fastest part of the cluster that was found; None if no part beats the whole.

    ``whole`` is the plan for all devices, and ``smaller`` creates the setting of the devices
    at some positions.
    """
    if setting.cluster.world_size == 1:
        return None
    return _Trials(setting, whole, demands, smaller, effort).run()


@dataclass
class _Trials:
    """The parts of a cluster that were tried, and the best so far."""

    setting: Setting
    whole: PlanSolution
    demands: Demands
    smaller: Callable[[Positions], Setting]
    effort: Effort
    num_solved: int = 0
    best: Fewer | None = None
    _seen: set[Positions] = field(default_factory=set)
    _paces: dict[tuple[str | None, str], float] = field(default_factory=dict)

    def run(self) -> Fewer | None:
        every = tuple(range(self.setting.cluster.world_size))
        kept, is_first = every, True
        while True:
            parts = list(self._parts(kept, is_first=is_first))
            if not self._try(parts):
                return self.best
            assert self.best is not None
            kept, is_first = self.best.kept, False

    @property
    def _target_s(self) -> float:
        """Steps must be shorter than this."""
        if self.best is None:
            return self.whole.predicted.step_time_s / LEAST_GAIN
        return self.best.solution.predicted.step_time_s

    @property
    def _max_solves(self) -> int:
        cluster = self.setting.cluster
        num_kinds = len({device.kind for device in cluster.devices})
        is_large = cluster.world_size > LARGE or num_kinds > MAX_KINDS
        return MAX_SOLVES_IF_LARGE if is_large else MAX_SOLVES

    def _try(self, parts: Sequence[Positions]) -> bool:
        """Plan for the most promising of these parts; returns whether one is the best yet."""
        bounded = []
        for part in dict.fromkeys(parts):
            if part and part not in self._seen:
                self._seen.add(part)
                setting = self.smaller(part)
                bounded.append((self._least_step_s(setting), part, setting))
        bounded.sort(key=lambda each: each[0])
        before = self.best
        for bound_s, part, setting in bounded:
            if bound_s >= self._target_s or self.num_solved >= self._max_solves:
                break
            self._solve(part, setting)
        return self.best is not before

    def _solve(self, part: Positions, setting: Setting) -> None:
        self.num_solved += 1
        demands = self.demands.only(part)
        batch = self.whole.plan.global_batch_size
        try:
            found = solve(
                setting,
                global_batch_size=batch,
                demands=demands,
                effort=self.effort,
                num_rescored=1,
            )
        except ValueError:  # nothing fits, or the demands need the devices that are left out
            return
        if found.predicted.step_time_s < self._target_s:
            every = range(self.setting.cluster.world_size)
            self.best = Fewer(
                kept=part,
                left_out=tuple(i for i in every if i not in set(part)),
                setting=setting,
                demands=demands,
                solution=found,
            )

    def _parts(self, kept: Positions, *, is_first: bool) -> Iterator[Positions]:
        """What stays of ``kept`` without each of its sets, and each set alone."""
        needed = {i for i in kept if self.demands.needs(i)}
        for members in self._sets(kept):
            if not needed & members:
                yield tuple(i for i in kept if i not in members)
            if is_first and needed <= members:
                yield tuple(sorted(members))

    def _sets(self, kept: Positions) -> Iterator[frozenset[int]]:
        """Sets of devices that may be better left out together."""
        cluster = self.setting.cluster
        kinds: dict[str, set[int]] = {}
        types: dict[str, set[int]] = {}
        nodes: dict[str, set[int]] = {}
        regions: dict[str, set[int]] = {}
        alike: dict[tuple[str, str | None], int] = {}
        inside = set(kept)
        for i, node in _devices(cluster):
            if i in inside:
                kind = cluster.devices[i].kind
                kinds.setdefault(str(kind), set()).add(i)
                types.setdefault(node_type(node), set()).add(i)
                nodes.setdefault(node.host, set()).add(i)
                regions.setdefault(node.region, set()).add(i)
                alike[node_type(node), kind] = i
        slowest = sorted(kinds, key=lambda kind: -self._pace_s(self.setting, kind))
        together: set[int] = set()
        for number, kind in enumerate(slowest, 1):
            together |= kinds[kind]
            if number <= MAX_KINDS:
                yield frozenset(kinds[kind])
            if number & (number - 1) == 0:  # 1, 2, 4, ... kinds
                yield frozenset(together)
        for sets in (types, nodes, regions):
            if len(sets) <= MAX_NODES:
                yield from map(frozenset, sets.values())
        if len(alike) <= MAX_KINDS:
            yield from (frozenset({i}) for i in alike.values())
        ranks = self.whole.plan.ranks
        yield frozenset(i for i in kept if not ranks[i].rank_batch_size)
        yield frozenset(
            i for i in kept if not (ranks[i].rank_batch_size or ranks[i].state_share)
        )

    def _least_step_s(self, setting: Setting) -> float:
        """A bound on the step: all communication, or all compute spread perfectly."""
        model = CostModel(setting, reshard_after_forward=False)
        numbers = Counter(device.kind for device in setting.cluster.devices)
        per_s = sum(number / self._pace_s(setting, kind) for kind, number in numbers.items())
        compute_s = self.whole.plan.global_batch_size / per_s
        return max(model.turns(unevenness=0.0).comm_s, compute_s) + model.overhead_s

    def _pace_s(self, setting: Setting, kind: str | None) -> float:
        """Seconds of a sample in all units on a kind of device, in its best microbatches."""
        workload, device = setting.workload, setting.profile.device(kind)
        key = (kind, workload.param_dtype)
        if key not in self._paces:
            units = [
                (number, unit)
                for name, number in workload.num_units_by_kind.items()
                if (unit := device.unit_by_kind.get(name)) is not None
            ]
            measured = max(unit.points[-1].microbatch_size for _, unit in units)
            largest = max(LEAST_MAX_MICROBATCH_SIZE, MICROBATCHES_BEYOND_MEASURED * measured)
            self._paces[key] = min(
                sum(
                    number * (unit.forward_s.at(size) + unit.backward_s.at(size))
                    for number, unit in units
                )
                / size
                for size in range(1, 1 + largest)
            )
        return self._paces[key]


def _devices(cluster: Cluster) -> Iterator[tuple[int, Node]]:
    """Every position, and the node that the device is in."""
    first = 0
    for node in cluster.nodes:
        for i in range(len(node.devices)):
            yield first + i, node
        first += len(node.devices)


def node_type(node: Node) -> str:
    """The name that counted nodes of a description share: "a" for "a-0" and "a-1"."""
    name, _, number = node.host.rpartition("-")
    return name if name and number.isdecimal() else node.host
