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

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.problem import Bools, Floats, Ints
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.residents import with_all_resident
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import slowest_of
from shardhet.pricing.part import links_of, part_of
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.turns import taking_part
from shardhet.records.cluster import Cluster, Node
from shardhet.records.plan import RankPlan
from shardhet.records.profiles import Source

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
    solution: PlanSolution,
    positions: Sequence[int],
    prices: CostModel,
    constraints: Constraints,
) -> PlanSolution | None:
    """A plan of the devices at some positions as a plan of all; None if it does not fit.

    ``prices`` and ``constraints`` are those of all devices.
    """
    cluster = prices.cluster
    if len(positions) == cluster.world_size:
        return solution
    taken = dict(zip(positions, solution.plan.ranks, strict=True))
    idle = {
        id(device): RankPlan(microbatch_sizes=(), state_share=0.0, device=device)
        for device in {id(each): each for each in cluster.devices}.values()
    }
    ranks = tuple(taken.get(i) or idle[id(each)] for i, each in enumerate(cluster.devices))
    groups = solution.plan.context_groups
    if groups is not None:
        groups = tuple(tuple(positions[i] for i in each) for each in groups)
    plan = replace(solution.plan, ranks=ranks, context_groups=groups)
    predicted = prices.predict(plan).within(constraints.budgets(cluster))
    found = replace(solution, plan=plan, predicted=predicted)
    return found if found.fits else None


@dataclass(frozen=True, slots=True)
class SubsetPlan:
    """Some devices of a cluster, and their plan."""

    positions: Positions
    scenario: Scenario
    solution: PlanSolution

    @property
    def step_s(self) -> float:
        """Seconds of the step of the fastest plan."""
        return self.solution.fastest_s or self.solution.predicted.step_time_s


@dataclass(kw_only=True)
class SubsetSearch:
    """The parts of a cluster that were tried, and those that were faster than all before."""

    scenario: Scenario
    global_batch_size: int
    constraints: Constraints
    cutoff_s: float  # slower plans are not asked for
    tolerance: float  # parts of more devices are searched for if they are as much slower
    # The plan for a part, of at most so many seconds; ValueError if there is none.
    solved: Callable[[Positions, Scenario, float], PlanSolution]
    near: Positions = ()  # only this part and few that are next to it are searched
    whole: PlanSolution | None = None  # the plan of all devices, once it is found
    with_kind: str | None = None  # only parts with such a device are searched
    why_none: PlanError | None = None  # why there is none
    least_missed_s: dict[Positions, float] = field(default_factory=dict)  # of no plan
    num_searched: int = 0
    found: list[SubsetPlan] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)
    _paces: dict[str | None, float] = field(default_factory=dict)

    @cached_property
    def _devices(self) -> "_Devices":
        profile, constraints = self.scenario.profile, self.constraints
        told = (constraints.limits, constraints.equal, constraints.context_groups)
        are_told = any(map(bool, (*told, profile.pairs)))
        return _Devices(self.scenario.cluster, are_told)

    def run(self) -> SubsetPlan | None:
        """The fastest part that was found, which may be the whole; None if there is none."""
        constraints = self.constraints
        first = self._devices.mask(self.near) if self.near else self._devices.every
        parts = [first]
        if not (constraints.has_even_state or constraints.has_even_batches):
            parts += self._parts(first)
            if self.near:
                parts += self._sets(self._devices.every)
        while self._try(parts, first) and len(parts) > 1 and not self.near:
            parts = list(self._parts(self._devices.mask(self.found[-1].positions)))
        return self.found[-1] if self.found else None

    def _most_s(self, number: int, found: Sequence[SubsetPlan]) -> float:
        """Steps on so many devices must be shorter than this to be worth it."""
        known = [(len(e.positions), e.step_s) for e in (*self.found[-1:], *found)]
        # Devices that gain next to nothing are not left out for it.
        slack, gain = 1 + max(self.tolerance, NO_GAIN), 1 + NO_GAIN
        limits_s = (s * (slack if number > n else 1 / gain) for n, s in known)
        return min(limits_s, default=inf)

    @property
    def _max_searches(self) -> int:
        are_unlike = len(self.scenario.cluster.number_by_kind) > MAX_KINDS
        if self.near:
            return 1 if are_unlike else MAX_SEARCHES_IF_NEAR
        return MAX_SEARCHES_IF_UNLIKE if are_unlike else MAX_SEARCHES

    def _try(self, parts: Iterable[Bools], first: Bools) -> bool:
        """Search the most promising of these parts; returns whether one is the best yet."""
        kept = self._devices.mask(self.found[-1].positions) if self.found else first
        fine = FINE * len(kept)
        # The whole goes first unless others may be far faster: parts are then soon ruled out.
        far = inf if self.near else FAR
        bounded: list[tuple[tuple[bool, float], float, Positions]] = []
        for part in parts:
            if (key := part.tobytes()) in self._seen or not self._meets_constraints(part):
                continue
            self._seen.add(key)
            most_s = min(self.cutoff_s, self._most_s(int(part.sum()), ()))
            compute_s = self._compute_s(part)
            if compute_s >= most_s:
                continue
            positions = tuple(np.flatnonzero(part).tolist())
            links = links_of(self.scenario, positions)
            if self._has_room(part, links):
                bound_s = _least_step_s(links, compute_s)
                is_first = bool((part == first).all())
                is_fine = not is_first and int((kept ^ part).sum()) < fine
                order = (is_fine, bound_s / (far if is_first else 1))
                bounded.append((order, bound_s, positions))
        bounded.sort(key=lambda each: each[0])
        faster: list[SubsetPlan] = []
        for (is_fine, _), bound_s, positions in bounded:
            if is_fine and (faster or self.near):
                break  # such sets are looked at beside what is faster
            cutoff_s = min(self.cutoff_s, self._most_s(len(positions), faster))
            is_whole = len(positions) == len(kept)
            if bound_s >= cutoff_s or (
                self.num_searched >= self._max_searches and not is_whole
            ):
                continue
            self.num_searched += 1
            try:
                scenario = part_of(self.scenario, positions)
                solution = self.solved(positions, scenario, cutoff_s)
            except ValueError as error:  # or constraints need the devices that are left out
                if isinstance(error, PlanError):
                    self.why_none = self.why_none if self.why_none and not is_whole else error
                    self.least_missed_s[positions] = error.lower_bound_s
                continue
            if is_whole:
                self.whole = solution
            found = SubsetPlan(positions, scenario, solution)
            if found.step_s < cutoff_s:
                faster.append(found)
        enough_s = (1 + NO_GAIN) * min((each.step_s for each in faster), default=inf)
        enough = [each for each in faster if each.step_s <= enough_s]
        best = max(enough, key=lambda each: (len(each.positions), -each.step_s), default=None)
        if best is None or (self.found and best.step_s >= self.found[-1].step_s):
            return False
        self.found.append(best)
        return True

    def _parts(self, kept: Bools) -> Iterator[Bools]:
        """What stays of ``kept`` without each of its sets, and with each set of all devices.

        If all are kept, each set alone.
        """
        inside = kept & ~kept.all()
        for members in self._sets(kept):
            yield kept & ~members
        if self.constraints.form is None:
            for members in self._sets(self._devices.every):
                yield inside | members

    def _sets(self, kept: Bools) -> Iterator[Bools]:
        """Sets of devices that may be better left idle together.

        If a form is demanded, only those that do nothing in the plan of all.
        """
        if self.whole is not None:
            yield kept & ~self._devices.mask(active_positions(self.whole))
            if self.constraints.form is None:
                ranks = self.whole.plan.ranks
                yield kept & [not rank.microbatch_sizes for rank in ranks]
        if self.constraints.form is None:
            yield from self._devices.sets(kept, self._pace_s)

    def _meets_constraints(self, part: Bools) -> bool:
        """Whether all devices are in the part that must do something, and of those that must do
        alike all or none.
        """
        alike = (part[each].sum() in (0, len(each)) for each in self._alike)
        has_kind = self.with_kind is None or any(
            kind == self.with_kind for kind in self._devices.numbers(part)
        )
        return bool(
            part.any() and has_kind and part[self.constraints.needed].all() and all(alike)
        )

    @cached_property
    def _alike(self) -> list[Ints]:
        """The positions of each set of devices that must do alike."""
        sets = (*self.constraints.equal, *self.constraints.context_groups)
        return [np.array(sorted(set(each)), dtype=np.int64) for each in sets]

    def _compute_s(self, part: Bools) -> float:
        """Seconds of the batch if it were spread perfectly over a part."""
        profile, numbers = self.scenario.profile, self._devices.numbers(part)
        # Fewer devices wait less for the slowest of them.
        pace = slowest_of(int(part.sum())) / slowest_of(len(part))
        per_s = sum(
            number
            / self._pace_s(kind)
            / (pace if profile.device(kind).source is Source.DERIVED else 1.0)
            for kind, number in numbers.items()
        )
        return self.global_batch_size / per_s

    def _has_room(self, part: Bools, scenario: Scenario) -> bool:
        """Whether the state may fit on a part; of the whole it is said what is missing."""
        if part.all() or self.constraints.may_keep_optimizer_on_host:
            return True
        stored = CostModel(scenario).bytes_per_stored_numel * scenario.workload.numel
        return bool(self._budgets[part].sum() >= stored)

    @cached_property
    def _budgets(self) -> Floats:
        return np.array(self.constraints.budgets(self.scenario.cluster), dtype=np.float64)

    def _pace_s(self, kind: str | None) -> float:
        """Seconds of a sample in all units on a kind of device, in its best microbatches."""
        if kind not in self._paces:
            device = self.scenario.profile.device(kind)
            largest = min(self.global_batch_size, MAX_MICROBATCH_SIZE)
            whole = np.zeros(1 + largest)
            for name, number in self.scenario.workload.num_units_by_kind.items():
                if (unit := device.unit_by_kind.get(name)) is not None:
                    curves = (unit.forward_s, unit.backward_s)
                    whole += number * sum(at_sizes(curve, largest) for curve in curves)
            self._paces[kind] = float((whole[1:] / np.arange(1, 1 + largest)).min())
        return self._paces[kind]


def _least_step_s(scenario: Scenario, compute_s: float) -> float:
    """A bound on the step: all communication, or all compute spread perfectly."""
    model = with_all_resident(CostModel(scenario, reshard_after_forward=False))
    return max(model.turns(unevenness=0.0).comm_s, compute_s) + model.overhead_s


@dataclass(frozen=True)
class _Devices:
    """Devices and what they have in common: [devices] numbers, in the order of the first ones.

    Sets of devices are [devices] masks, which take little time if there are many devices.
    """

    cluster: Cluster
    are_told: bool  # apart, even if they are alike

    @cached_property
    def every(self) -> Bools:
        """All of them."""
        return np.ones(self.cluster.world_size, dtype=bool)

    def mask(self, positions: Sequence[int]) -> Bools:
        """Those at these positions."""
        found = np.zeros(self.cluster.world_size, dtype=bool)
        found[list(positions)] = True
        return found

    def numbers(self, part: Bools) -> dict[str | None, int]:
        """How many devices of each kind are in a part."""
        names = list(self.cluster.number_by_kind)
        numbers = np.bincount(self._kinds[part], minlength=len(names)).tolist()
        return {kind: n for kind, n in zip(names, numbers, strict=True) if n}

    def sets(self, kept: Bools, pace_s: Callable[[str | None], float]) -> Iterator[Bools]:
        """Those of ``kept`` of each kind, slow kinds together, of each type of node, and so on;
        ``pace_s`` are seconds of a kind.
        """
        names, together = list(self.cluster.number_by_kind), np.zeros_like(kept)
        kinds = np.unique(self._kinds[kept]).tolist()
        for number, kind in enumerate(sorted(kinds, key=lambda k: -pace_s(names[k])), 1):
            members = kept & (self._kinds == kind)
            together = together | members
            if number <= MAX_KINDS:
                yield members
            if number & (number - 1) == 0:  # 1, 2, 4, ... kinds
                yield together
        cells = self._regions * len(names) + self._kinds
        for numbers in (self._types, self._unlike_nodes(kept), self._regions, cells):
            of_sets = np.unique(numbers[kept & (numbers >= 0)])
            if len(of_sets) <= MAX_SETS:
                yield from (kept & (numbers == each) for each in of_sets)
        alike, inside = self._types * len(names) + self._kinds, np.flatnonzero(kept)[::-1]
        last = inside[np.unique(alike[inside], return_index=True)[1]]
        if len(last) <= MAX_KINDS:
            yield from (self.mask([i]) for i in sorted(last))

    @cached_property
    def _kinds(self) -> Ints:
        return _numbered(device.kind for device in self.cluster.devices)

    @cached_property
    def _types(self) -> Ints:
        return self._of_nodes(_numbered(map(node_type, self.cluster.nodes)))

    @cached_property
    def _regions(self) -> Ints:
        return self._of_nodes(_numbered(node.region for node in self.cluster.nodes))

    @cached_property
    def _sorts(self) -> list[int]:
        """By node, a number that alike ones share."""
        sorts: list[int] = _numbered(
            (
                (node_type(node), node.link and id(node.link), node.region),
                (node.host_memory_bytes, node.host_bytes_per_s, node.library_bytes),
                *((device.kind, device.memory_capacity_bytes) for device in node.devices),
            )
            for node in self.cluster.nodes
        ).tolist()
        return sorts

    def _unlike_nodes(self, kept: Bools) -> Ints:
        """Numbers of nodes, of one of those whose kept devices are alike; -1 for the others."""
        here = self.cluster.positions_by_node
        if self.are_told:
            return self._of_nodes(np.arange(len(here)))
        parts = [kept[each.start : each.stop].tobytes() for each in here]
        alike = _numbered(zip(self._sorts, parts, strict=True))
        _, first = np.unique(alike, return_index=True)
        return self._of_nodes(np.where(np.isin(np.arange(len(here)), first), alike, -1))

    def _of_nodes(self, numbers: Ints) -> Ints:
        return np.repeat(numbers, [len(node.devices) for node in self.cluster.nodes])


def node_type(node: Node) -> str:
    """The name that counted nodes of a description share: "a" for "a-0" and "a-1"."""
    name, _, number = node.host.rpartition("-")
    return name if name and number.isdecimal() else node.host


def _numbered(names: Iterable[Hashable]) -> Ints:
    """[n] a number for each name, in the order of the first ones."""
    known: dict[Hashable, int] = {}
    found: Ints = np.array([known.setdefault(name, len(known)) for name in names])
    return found
