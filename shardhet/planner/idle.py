"""Plans in which some devices take no part, which are planned for the others alone.

A device without samples and rows takes part in no collective, so a plan is priced as that of
the cluster without it.  But a search prices all plans as if all devices took part, and a
collective over all devices is as slow as the slowest link that it crosses.  So sets of devices
are left idle one after the other: kinds, types of nodes, nodes, regions, the devices of a kind
in a region, the slowest kinds together, one device of those that are alike, those that only
store, and those that do nothing.  First, each set is also tried alone, without all others;
later, beside those that take part.  In every round the set whose removal or return helps most
goes or comes back, until none helps.  Of nodes that are alike one is tried, and sets of few of
many devices only where no larger set helps.

What a change would give is asked once, of a part that is known to be fast and few near it.

A set is searched for only if its bound allows a gain: no step is shorter than all its
communication, or than the batch divided by the sum of what the devices compute per second, and
none fits that has no room for the state.  So many sets cost little.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.residents import with_all_resident
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import slowest_of
from shardhet.pricing.part import part_of
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.setting import Setting
from shardhet.pricing.turns import taking_part
from shardhet.records.cluster import Node
from shardhet.records.plan import RankPlan

NO_GAIN = 1e-6  # of the step: devices are not left idle for it
MAX_SEARCHES, MAX_SEARCHES_IF_UNLIKE = 16, 3  # those with the least bounds
MAX_SEARCHES_IF_NEAR = 3  # of which the first is the part itself
FAR = 2.0
FINE = 1 / 64  # of all devices: sets of fewer come after larger ones
MAX_KINDS = 16  # of which each is left out alone; of more, only the slowest
MAX_SETS = 64  # of nodes, regions and others that are each left out
Positions = tuple[int, ...]


def active_positions(solution: PlanSolution) -> Positions:
    """The positions that take part."""
    stored = [rank.stored_numel for rank in solution.predicted.ranks]
    return taking_part(solution.plan.ranks, stored)


def with_idle(
    solution: PlanSolution, positions: Sequence[int], prices: CostModel, demands: Demands
) -> PlanSolution | None:
    """A plan of the devices at some positions as a plan of all; None if it does not fit.

    ``prices`` and ``demands`` are those of all devices.
    """
    cluster = prices.cluster
    if len(positions) == cluster.world_size:
        return solution
    taken = dict(zip(positions, solution.plan.ranks, strict=True))
    idle = RankPlan(microbatch_sizes=(), state_share=0.0)
    ranks = tuple(
        taken[i] if i in taken else replace(idle, device=device)
        for i, device in enumerate(cluster.devices)
    )
    groups = solution.plan.context_groups
    if groups is not None:
        groups = tuple(tuple(positions[i] for i in each) for each in groups)
    plan = replace(solution.plan, ranks=ranks, context_groups=groups)
    predicted = prices.predict(plan).within(demands.budgets(cluster))
    found = replace(solution, plan=plan, predicted=predicted)
    return found if found.fits else None


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Some devices of a cluster, and their plan."""

    positions: Positions
    setting: Setting
    solution: PlanSolution

    @property
    def step_s(self) -> float:
        """Seconds of the step of the fastest plan."""
        return self.solution.fastest_s or self.solution.predicted.step_time_s


@dataclass(kw_only=True)
class PartSearch:
    """The parts of a cluster that were tried, and those that were faster than all before."""

    setting: Setting
    global_batch_size: int
    demands: Demands
    at_most_s: float  # slower plans are not asked for
    tolerance: float  # parts of more devices are searched for if they are as much slower
    # The plan for a part, of at most so many seconds; ValueError if there is none.
    solved: Callable[[Positions, Setting, float], PlanSolution]
    near: Positions = ()  # only this part and few that are next to it are searched
    whole: PlanSolution | None = None  # the plan of all devices, once it is found
    with_kind: str | None = None  # only parts with such a device are searched
    missed: PlanError | None = None  # why there is none
    missed_s: dict[Positions, float] = field(default_factory=dict)  # bounds on what was missed
    num_searched: int = 0
    found: list[PartPlan] = field(default_factory=list)
    _seen: set[Positions] = field(default_factory=set)
    _paces: dict[tuple[str | None, str, int], float] = field(default_factory=dict)

    def run(self) -> PartPlan | None:
        """The fastest part that was found, which may be the whole; None if there is none."""
        every, demands = self._every, self.demands
        first = self.near or every
        parts = [first]
        if not (demands.has_even_state or demands.has_even_batches):
            parts += self._parts(first, every)
            if self.near:
                parts += map(tuple, map(sorted, self._sets(every)))
        while self._try(parts) and len(parts) > 1 and not self.near:
            parts = list(self._parts(self.found[-1].positions, every))
        return self.found[-1] if self.found else None

    @cached_property
    def _every(self) -> Positions:
        return tuple(range(self.setting.cluster.world_size))

    def _most_s(self, number: int, found: Sequence[PartPlan]) -> float:
        """Steps on so many devices must be shorter than this to be worth it."""
        known = [(len(e.positions), e.step_s) for e in (*self.found[-1:], *found)]
        # Devices that gain next to nothing are not left out for it.
        slack, gain = 1 + max(self.tolerance, NO_GAIN), 1 + NO_GAIN
        limits_s = (s * (slack if number > n else 1 / gain) for n, s in known)
        return min(limits_s, default=inf)

    @property
    def _max_searches(self) -> int:
        if self.near:
            return MAX_SEARCHES_IF_NEAR
        num_kinds = len({device.kind for device in self.setting.cluster.devices})
        return MAX_SEARCHES_IF_UNLIKE if num_kinds > MAX_KINDS else MAX_SEARCHES

    def _try(self, parts: Sequence[Positions]) -> bool:
        """Search the most promising of these parts; returns whether one is the best yet."""
        bounded: list[tuple[float, Positions, Setting]] = []
        for positions in dict.fromkeys(parts):
            if positions in self._seen or not self._meets_demands(positions):
                continue
            self._seen.add(positions)
            most_s = min(self.at_most_s, self._most_s(len(positions), ()))
            if self._compute_s(positions) >= most_s:
                continue
            setting = part_of(self.setting, positions)
            if self._has_room(positions, setting):
                bounded.append((self._least_step_s(setting), positions, setting))
        # The whole goes first unless others may be far faster: parts are then soon ruled out.
        first = self.near or self._every
        kept = set(self.found[-1].positions if self.found else first)
        fine = FINE * len(self._every)

        def is_fine(part: Positions) -> bool:
            return part != first and len(kept.symmetric_difference(part)) < fine

        far = inf if self.near else FAR
        bounded.sort(key=lambda e: (is_fine(e[1]), e[0] / (far if e[1] == first else 1)))
        faster: list[PartPlan] = []
        for bound_s, positions, setting in bounded:
            if faster and is_fine(positions):
                break  # such sets are looked at beside what is faster
            at_most_s = min(self.at_most_s, self._most_s(len(positions), faster))
            is_whole = positions == self._every
            if bound_s >= at_most_s or (
                self.num_searched >= self._max_searches and not is_whole
            ):
                continue
            self.num_searched += 1
            try:
                solution = self.solved(positions, setting, at_most_s)
            except ValueError as error:  # or demands need the devices that are left out
                if isinstance(error, PlanError):
                    self.missed = self.missed if self.missed and not is_whole else error
                    self.missed_s[positions] = error.lower_bound_s
                continue
            if is_whole:
                self.whole = solution
            part = PartPlan(positions, setting, solution)
            if part.step_s < at_most_s:
                faster.append(part)
        enough_s = (1 + NO_GAIN) * min((each.step_s for each in faster), default=inf)
        enough = [each for each in faster if each.step_s <= enough_s]
        best = max(enough, key=lambda each: (len(each.positions), -each.step_s), default=None)
        if best is None or (self.found and best.step_s >= self.found[-1].step_s):
            return False
        self.found.append(best)
        return True

    def _parts(self, kept: Positions, every: Positions) -> Iterator[Positions]:
        """What stays of ``kept`` without each of its sets, and with each set of ``every``.

        If all are kept, each set alone.
        """
        inside = frozenset() if kept == every else frozenset(kept)
        for members in self._sets(kept):
            yield tuple(i for i in kept if i not in members)
        if self.demands.form is None:
            for members in self._sets(every):
                yield tuple(sorted(inside | members))

    def _sets(self, kept: Positions) -> Iterator[frozenset[int]]:
        """Sets of devices that may be better left idle together.

        If a form is demanded, only those that do nothing in the plan of all.
        """
        if self.whole is not None:
            active = active_positions(self.whole)
            yield frozenset(i for i in kept if i not in active)
            if self.demands.form is None:
                ranks = self.whole.plan.ranks
                yield frozenset(i for i in kept if not ranks[i].rank_batch_size)
        if self.demands.form is not None:
            return
        cluster = self.setting.cluster
        kinds: dict[str, set[int]] = {}
        types: dict[str, set[int]] = {}
        nodes: dict[str, set[int]] = {}
        regions: dict[str, set[int]] = {}
        cells: dict[tuple[str, str], set[int]] = {}
        alike: dict[tuple[str, str | None], int] = {}
        inside = set(kept)
        for i, node in enumerate(cluster.node_of):
            if i in inside:
                kind = cluster.devices[i].kind
                kinds.setdefault(str(kind), set()).add(i)
                types.setdefault(node_type(node), set()).add(i)
                nodes.setdefault(node.host, set()).add(i)
                regions.setdefault(node.region, set()).add(i)
                cells.setdefault((node.region, str(kind)), set()).add(i)
                alike[node_type(node), kind] = i
        slowest = sorted(kinds, key=lambda kind: -self._pace_s(self.setting, kind))
        together: set[int] = set()
        for number, kind in enumerate(slowest, 1):
            together |= kinds[kind]
            if number <= MAX_KINDS:
                yield frozenset(kinds[kind])
            if number & (number - 1) == 0:  # 1, 2, 4, ... kinds
                yield frozenset(together)
        for sets in (types, self._unlike(nodes), regions, cells):
            if len(sets) <= MAX_SETS:
                yield from map(frozenset, sets.values())
        if len(alike) <= MAX_KINDS:
            yield from (frozenset({i}) for i in alike.values())

    def _unlike(self, nodes: dict[str, set[int]]) -> Mapping[Any, set[int]]:
        """The devices of nodes by host, of those that are alike on one only."""
        profile, demands, cluster = self.setting.profile, self.demands, self.setting.cluster
        are_told = demands.limits or demands.equal or demands.context_groups
        if are_told or profile.groups or profile.pairs:
            return nodes  # each may be told from the others
        first: dict[Any, set[int]] = {}
        for members in nodes.values():
            node, devices = (
                cluster.node_of[min(members)],
                map(cluster.devices.__getitem__, members),
            )
            doing = sorted(
                (str(each.kind), each.memory_capacity_bytes or 0) for each in devices
            )
            alike = replace(node, host=node_type(node), devices=())
            first.setdefault((alike, len(node.devices), tuple(doing)), members)
        return first

    def _meets_demands(self, part: Positions) -> bool:
        """Whether all devices are in the part that must do something, and of those that must do
        alike all or none.
        """
        inside, devices = set(part), self.setting.cluster.devices
        sets = (*self.demands.equal, *self.demands.context_groups)
        alike = (len(inside.intersection(e)) in (0, len(set(e))) for e in sets)
        has_kind = self.with_kind is None or any(
            devices[i].kind == self.with_kind for i in part
        )
        return bool(part) and has_kind and self._needed <= inside and all(alike)

    @cached_property
    def _needed(self) -> frozenset[int]:
        """The devices that must do something."""
        return frozenset(filter(self.demands.needs, self._every))

    def _compute_s(self, part: Positions) -> float:
        """A bound on the compute of a part, in the times of the whole."""
        devices = self.setting.cluster.devices
        numbers = Counter(devices[i].kind for i in part)
        # Fewer devices wait less for the slowest of them.
        return self._spread_s(self.setting, numbers) / slowest_of(len(devices))

    def _has_room(self, part: Positions, setting: Setting) -> bool:
        """Whether the state may fit on a part; of the whole it is said what is missing."""
        if part == self._every or self.demands.may_keep_optimizer_on_host:
            return True
        demands, cluster = self.demands.only(part), setting.cluster
        stored = CostModel(setting).bytes_per_stored_numel * setting.workload.numel
        return sum(demands.budgets(cluster)) >= stored

    def _least_step_s(self, setting: Setting) -> float:
        """A bound on the step: all communication, or all compute spread perfectly."""
        model = with_all_resident(CostModel(setting, reshard_after_forward=False))
        numbers = Counter(device.kind for device in setting.cluster.devices)
        compute_s = self._spread_s(setting, numbers)
        return max(model.turns(unevenness=0.0).comm_s, compute_s) + model.overhead_s

    def _spread_s(self, setting: Setting, numbers: Counter[str | None]) -> float:
        """Seconds of the batch if it were spread perfectly over so many of each kind."""
        per_s = sum(number / self._pace_s(setting, kind) for kind, number in numbers.items())
        return self.global_batch_size / per_s

    def _pace_s(self, setting: Setting, kind: str | None) -> float:
        """Seconds of a sample in all units on a kind of device, in its best microbatches."""
        workload = setting.workload
        key = (kind, workload.param_dtype, setting.cluster.world_size)
        if key not in self._paces:
            device = setting.profile.device(kind)
            largest = min(self.global_batch_size, MAX_MICROBATCH_SIZE)
            whole = np.zeros(1 + largest)
            for name, number in workload.num_units_by_kind.items():
                if (unit := device.unit_by_kind.get(name)) is not None:
                    curves = (unit.forward_s, unit.backward_s)
                    whole += number * sum(at_sizes(curve, largest) for curve in curves)
            self._paces[key] = float((whole[1:] / np.arange(1, 1 + largest)).min())
        return self._paces[key]


def node_type(node: Node) -> str:
    """The name that counted nodes of a description share: "a" for "a-0" and "a-1"."""
    name, _, number = node.host.rpartition("-")
    return name if name and number.isdecimal() else node.host
