"""Predict whether a cluster is faster without some of its devices.

A collective over all devices is as slow as the slowest link that it crosses, and one kind of
device without bfloat16 forces all to float32, whatever the plan gives them to do.  The search
for a plan does not ask which devices are better left idle.  So sets of them are left out one
after the other: kinds, types of nodes, nodes, regions, the devices of a kind in a region, the
slowest kinds together, one device of those that are alike, and those that do nothing.  First,
each set is also tried alone, without all others; later, beside those that stay.  In every round
the set whose removal or return helps most goes or comes back, until none helps.

A set is searched for only if its bound allows a gain: no step is shorter than all its
communication, or than the batch divided by the sum of what the devices compute per second, and
none fits that has no room for the state.  So many sets cost little, and at most
``MAX_SEARCHES`` searches are made, those with the least bounds (``MAX_SEARCHES_IF_UNLIKE`` for
a cluster of many kinds).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.find import solve
from shardhet.planner.problem.demands import Demands
from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.residents import with_all_resident
from shardhet.planner.search.search import Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Node

LEAST_GAIN = 1.02  # smaller gains are within the error of any prediction
MAX_SEARCHES = 48
MAX_SEARCHES_IF_UNLIKE = 3
MAX_KINDS = 16  # of which each is left out alone; of more, only the slowest
MAX_SETS = 64  # of nodes, regions and others that are each left out
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
    tolerance: float | None = None,
) -> Fewer | None:
    """The fastest part of the cluster that was found; None if no part beats the whole.

    ``whole`` is the plan for all devices, and ``smaller`` creates the setting of the devices
    at some positions.  With a ``tolerance``, the plan for them is the preferred one.
    """
    if setting.cluster.world_size == 1:
        return None
    return _Trials(setting, whole, demands, smaller, effort, tolerance).run()


@dataclass
class _Trials:
    """The parts of a cluster that were tried, and the best so far."""

    setting: Setting
    whole: PlanSolution
    demands: Demands
    smaller: Callable[[Positions], Setting]
    effort: Effort
    tolerance: float | None = None
    num_searched: int = 0
    # What stays, in the order in which each was found to be faster than all before.
    found: list[tuple[float, Positions, Setting]] = field(default_factory=list)
    _seen: set[Positions] = field(default_factory=set)
    _paces: dict[tuple[str | None, str], float] = field(default_factory=dict)

    def run(self) -> Fewer | None:
        """Leave out what helps, and plan for the rest."""
        every = tuple(range(self.setting.cluster.world_size))
        self._seen.add(every)
        parts = list(self._parts(every, every))
        while self._try(parts):
            _, kept, _ = self.found[-1]
            parts = list(self._parts(kept, every))
        for _, part, setting in reversed(self.found):
            fewer = self._planned(part, setting)
            if fewer is not None:
                return fewer
        return None

    @property
    def _most_s(self) -> float:
        """Steps on a part must be shorter than this to be worth it."""
        return self.whole.predicted.step_time_s / LEAST_GAIN

    @property
    def _max_searches(self) -> int:
        num_kinds = len({device.kind for device in self.setting.cluster.devices})
        return MAX_SEARCHES_IF_UNLIKE if num_kinds > MAX_KINDS else MAX_SEARCHES

    def _try(self, parts: Sequence[Positions]) -> bool:
        """Search the most promising of these parts; returns whether one is the best yet."""
        bounded = []
        needed = {i for i, _ in enumerate(self.whole.plan.ranks) if self.demands.needs(i)}
        for part in dict.fromkeys(parts):
            if part and part not in self._seen and needed.issubset(part):
                self._seen.add(part)
                setting = self.smaller(part)
                if self._has_room(part, setting):
                    bounded.append((self._least_step_s(setting), part, setting))
        bounded.sort(key=lambda each: each[0])
        target_s = self.found[-1][0] / LEAST_GAIN if self.found else self._most_s
        faster: list[tuple[float, Positions, Setting]] = []
        for bound_s, part, setting in bounded:
            # Only those that are nearly as fast as the fastest matter.
            at_most_s = min([target_s, *(LEAST_GAIN * step_s for step_s, _, _ in faster)])
            if bound_s >= at_most_s or self.num_searched >= self._max_searches:
                break
            self.num_searched += 1
            step_s = self._step_s(part, setting, at_most_s)
            if step_s < at_most_s:
                faster.append((step_s, part, setting))
        if faster:
            # Devices that gain less than that are not left out for it.
            enough_s = LEAST_GAIN * min(step_s for step_s, _, _ in faster)
            enough = [each for each in faster if each[0] <= enough_s]
            self.found.append(max(enough, key=lambda each: (len(each[1]), -each[0])))
        return bool(faster)

    def _step_s(self, part: Positions, setting: Setting, at_most_s: float) -> float:
        """The least step on a part; ``at_most_s`` if not below it."""
        try:
            return self._solved(part, setting, at_most_s=at_most_s).predicted.step_time_s
        except ValueError:  # or the demands need the devices that are left out
            return at_most_s

    def _solved(
        self,
        part: Positions,
        setting: Setting,
        *,
        at_most_s: float = inf,
        tolerance: float | None = None,
    ) -> PlanSolution:
        return solve(
            setting,
            global_batch_size=self.whole.plan.global_batch_size,
            demands=self.demands.only(part),
            effort=self.effort,
            tolerance=tolerance,
            is_bounded=False,
            near=self.whole.plan.form,
            at_most_s=at_most_s,
        )

    def _planned(self, part: Positions, setting: Setting) -> Fewer | None:
        """The plan for a part; None if it is no better than that for all."""
        try:
            solution = self._solved(part, setting, tolerance=self.tolerance)
        except ValueError:  # nothing fits after rounding to rows
            return None
        if solution.predicted.step_time_s >= self._most_s:
            return None
        kept = set(part)
        every = range(self.setting.cluster.world_size)
        return Fewer(
            kept=part,
            left_out=tuple(i for i in every if i not in kept),
            setting=setting,
            demands=self.demands.only(part),
            solution=solution,
        )

    def _parts(self, kept: Positions, every: Positions) -> Iterator[Positions]:
        """What stays of ``kept`` without each of its sets, and with each set of ``every``.

        If all are kept, each set alone.
        """
        inside = frozenset() if kept == every else frozenset(kept)
        for members in self._sets(kept):
            yield tuple(i for i in kept if i not in members)
        for members in self._sets(every):
            yield tuple(sorted(inside | members))

    def _sets(self, kept: Positions) -> Iterator[frozenset[int]]:
        """Sets of devices that may be better left out together."""
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
        for sets in (types, nodes, regions, cells):
            if len(sets) <= MAX_SETS:
                yield from map(frozenset, sets.values())
        if len(alike) <= MAX_KINDS:
            yield from (frozenset({i}) for i in alike.values())
        ranks = self.whole.plan.ranks
        yield frozenset(i for i in kept if not ranks[i].rank_batch_size)
        yield frozenset(
            i for i in kept if not (ranks[i].rank_batch_size or ranks[i].state_share)
        )

    def _has_room(self, part: Positions, setting: Setting) -> bool:
        """Whether the state may fit on a part, unless the memory of hosts may hold it."""
        demands, cluster = self.demands.only(part), setting.cluster
        budgets = (demands.budget_bytes(cluster, i) for i in range(cluster.world_size))
        stored = CostModel(setting).bytes_per_stored_numel * setting.workload.numel
        return demands.may_keep_optimizer_on_host or sum(budgets) >= stored

    def _least_step_s(self, setting: Setting) -> float:
        """A bound on the step: all communication, or all compute spread perfectly."""
        model = CostModel(setting, reshard_after_forward=False)
        model = with_all_resident(model)
        numbers = Counter(device.kind for device in setting.cluster.devices)
        per_s = sum(number / self._pace_s(setting, kind) for kind, number in numbers.items())
        compute_s = self.whole.plan.global_batch_size / per_s
        return max(model.turns(unevenness=0.0).comm_s, compute_s) + model.overhead_s

    def _pace_s(self, setting: Setting, kind: str | None) -> float:
        """Seconds of a sample in all units on a kind of device, in its best microbatches."""
        workload, device = setting.workload, setting.profile.device(kind)
        key = (kind, workload.param_dtype)
        if key not in self._paces:
            largest = min(self.whole.plan.global_batch_size, MAX_MICROBATCH_SIZE)
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
