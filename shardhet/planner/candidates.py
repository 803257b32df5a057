"""From a cluster, a workload and a profile to the assignment problem: what each device may do.

A candidate is a batch b in microbatches of size m (the last may be smaller) and a choice of
what is recomputed.  Its costs are the compute of each class of turns, forward and backward;
its room is what the budget leaves for state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from shardhet.cost import CostModel, Turns
from shardhet.plan import EVERY_UNIT, RankPlan
from shardhet.planner.problem import Bools, Floats, Group, Ints, Problem
from shardhet.planner.solution import PlanError

MICROBATCHES_BEYOND_MEASURED = 2  # how many times the largest measured size is considered
LEAST_MAX_MICROBATCH_SIZE = 16
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What is demanded of one device besides what its hardware allows."""

    memory_budget_bytes: int | None = None  # less than the cluster's
    rank_batch_size: int | None = None  # exactly this many samples
    max_microbatch_size: int | None = None
    recomputes: bool | None = None  # everything, or nothing; None leaves it open


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one device does: enough to write its part of a plan."""

    rank_batch_size: int
    microbatch_size: int
    recomputed_units: tuple[str, ...]

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Whole microbatches, and what is left over."""
        if not self.rank_batch_size:
            return ()
        whole, rest = divmod(self.rank_batch_size, self.microbatch_size)
        return (self.microbatch_size,) * whole + ((rest,) if rest else ())


@dataclass(frozen=True)
class CandidateTable:
    """The problem's candidates spelled out, and which devices make up each group."""

    problem: Problem
    positions: tuple[tuple[int, ...], ...]  # per group, in plan order
    microbatch_sizes: tuple[Ints, ...]  # per group, [C]
    choices: tuple[Ints, ...]  # per group, [C]: index into recompute_choices
    recompute_choices: tuple[tuple[str, ...], ...]
    is_cut: bool  # candidates were left out because they compute too long

    def candidate(self, group: int, index: int) -> Candidate:
        """The candidate at ``index`` of a group."""
        return Candidate(
            int(self.problem.groups[group].batch[index]),
            int(self.microbatch_sizes[group][index]),
            self.recompute_choices[int(self.choices[group][index])],
        )


def recompute_choices(model: CostModel) -> tuple[tuple[str, ...], ...]:
    """Nothing, then kind after kind added until everything is recomputed.

    Kinds that free most bytes per FLOP come first.
    """
    workload = model.workload
    kinds = [kind for kind in workload.kinds if workload.num_units_by_kind[kind.name]]
    kinds.sort(key=lambda kind: -kind.activation_bytes / (kind.forward_flops + 1))
    chosen: set[str] = set()
    choices: list[tuple[str, ...]] = [()]
    for kind in kinds:
        chosen.add(kind.name)
        choices.append(_patterns(model, chosen))
    return tuple(dict.fromkeys(choices))


def _patterns(model: CostModel, kinds: set[str]) -> tuple[str, ...]:
    """Patterns that match the units of these kinds and no others."""
    units = model.visited_units
    wanted = [unit.fqn for unit in units if unit.kind in kinds]
    others = [unit.fqn for unit in units if unit.kind not in kinds]
    if not others:
        return EVERY_UNIT
    patterns: dict[str, None] = {}
    for fqn in wanted:
        prefix, dot, last = fqn.rpartition(".")
        pattern = f"{prefix}.*" if dot and last.isdigit() else fqn
        is_safe = not any(fnmatchcase(other, pattern) for other in others)
        patterns[pattern if is_safe else fqn] = None
    return tuple(patterns)


class TableBuilder:
    """Candidates of every group of a cluster, at any cut."""

    def __init__(
        self,
        model: CostModel,
        *,
        global_batch_size: int,
        limits: Mapping[int, DeviceLimits],
        max_microbatch_size: int | None,
        turns: Turns,
        has_even_state: bool = False,
    ) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self.turns = turns
        self.recompute_choices = recompute_choices(model)
        self.state_numel = float(sum(layout.numel for layout in model.workload.layouts()))
        # Whole rows: a device may get this many elements more than its share.
        self.row_numel = 2.0 * max(kind.max_row_numel for kind in model.workload.kinds)
        even_numel = self.state_numel / model.cluster.world_size + self.row_numel
        self.stored_numel = even_numel if has_even_state else None
        self._max_microbatch_size = max_microbatch_size
        self._positions: dict[tuple[str | None, int, DeviceLimits], list[int]] = {}
        for position, device in enumerate(model.cluster.devices):
            stated = limits.get(position, DeviceLimits())
            budget = model.cluster.memory_budget_bytes(position)
            if stated.memory_budget_bytes is not None:
                budget = min(budget, stated.memory_budget_bytes)
            key = (device.kind, budget, replace(stated, memory_budget_bytes=None))
            self._positions.setdefault(key, []).append(position)
        self._groups = {
            key: _GroupTimes(self, key[0], key[1], key[2], len(positions))
            for key, positions in self._positions.items()
        }

    def largest_microbatch_size(self, device_kind: str | None, limit: int | None) -> int:
        """Measured sizes and some beyond, no larger than the batch."""
        units = self.model.profile.device(device_kind).units
        measured = max(unit.points[-1].microbatch_size for unit in units)
        size = max(LEAST_MAX_MICROBATCH_SIZE, MICROBATCHES_BEYOND_MEASURED * measured)
        stated = [each for each in (self._max_microbatch_size, limit) if each is not None]
        return max(1, min(self.global_batch_size, *(stated or [size])))

    def first_cut_s(self) -> float:
        """A time in which all devices together compute the batch several times over."""
        rate = sum(
            times.count / times.least_seconds_per_sample for times in self._groups.values()
        )
        slowest_single = min(times.least_seconds for times in self._groups.values())
        return 4 * (self.global_batch_size / rate + slowest_single)

    def table(self, cut_s: float) -> CandidateTable:
        """All candidates that compute for no longer than ``cut_s``, without dominated ones."""
        model = self.model
        built = [times.group(cut_s) for times in self._groups.values()]
        for (group, _, _), positions in zip(built, self._positions.values(), strict=True):
            if not len(group.batch):
                raise PlanError(self._groups_message(positions))
        excess = model.overlap_excess * sum(
            each.forward_comm_s + each.backward_comm_s for each in self.turns.classes
        )
        problem = Problem(
            groups=tuple(group for group, _, _ in built),
            global_batch_size=self.global_batch_size,
            # Even shares sum to the state but for rounding.
            state_numel=self.state_numel * (1 if self.stored_numel is None else 1 - 1e-12),
            fixed_s=excess + self.turns.exposed_comm_s,
            row_numel=self.row_numel,
        )
        return CandidateTable(
            problem=problem,
            positions=tuple(tuple(each) for each in self._positions.values()),
            microbatch_sizes=tuple(sizes for _, sizes, _ in built),
            choices=tuple(choices for _, _, choices in built),
            recompute_choices=self.recompute_choices,
            is_cut=any(times.is_cut(cut_s) for times in self._groups.values()),
        )

    def _groups_message(self, positions: Sequence[int]) -> str:
        cluster = self.model.cluster
        device = cluster.devices[positions[0]]
        budget = cluster.memory_budget_bytes(positions[0]) / GIB
        return (
            f"plan: device {positions[0]} ({device}) can do nothing that is demanded of it "
            f"within {budget:.2f} GiB. Raise its memory budget, lower its rank_batch_size, or "
            "leave it out of the cluster."
        )


class _GroupTimes:
    """Seconds and bytes of one kind of device, per microbatch size."""

    def __init__(
        self,
        builder: TableBuilder,
        device_kind: str | None,
        budget: int,
        limits: DeviceLimits,
        count: int,
    ) -> None:
        model = builder.model
        self.count = count
        self._builder = builder
        self._model = model
        self._device_kind = device_kind
        self._budget = budget
        self._limits = limits
        largest = builder.largest_microbatch_size(device_kind, limits.max_microbatch_size)
        self._sizes: Ints = np.arange(1, largest + 1)
        units = [
            model.profile.unit(device_kind, each.kind.name) for each in builder.turns.classes
        ]
        # [classes, 1 + sizes]: of one unit, by microbatch size; nothing takes no time
        self._forward = np.array(
            [[0.0, *(unit.forward_s.at(m) for m in range(1, largest + 1))] for unit in units]
        )
        self._backward = np.array(
            [[0.0, *(unit.backward_s.at(m) for m in range(1, largest + 1))] for unit in units]
        )
        numbers = np.array([each.num_units for each in builder.turns.classes], dtype=np.float64)
        whole = numbers @ (self._forward + self._backward)
        self.least_seconds_per_sample = float((whole[1:] / self._sizes).min())
        self.least_seconds = float(whole[1:].min())

    def group(self, cut_s: float) -> tuple[Group, Ints, Ints]:
        """The group at a cut, its candidates' microbatch sizes and recompute choices."""
        batches = self._batches(cut_s)
        per_choice = [self._of_choice(c, batches) for c in self._allowed_choices()]
        costs = np.concatenate([costs for costs, _ in per_choice], axis=2)  # [D, b, n]
        room = np.concatenate([room for _, room in per_choice], axis=1)  # [b, n]
        sizes = np.tile(self._sizes, len(per_choice))
        choices = np.repeat(self._allowed_choices(), len(self._sizes))
        is_first = np.arange(len(sizes)) == len(sizes) - len(self._sizes)
        # A device without samples is one candidate, not one per size.
        valid = (room >= 0) & np.where(
            batches[:, None] > 0, sizes <= batches[:, None], is_first
        )
        kept = valid & ~_dominated(costs, np.where(valid, room, -1.0))
        b, n = np.nonzero(kept)
        per_numel_s = self._model.profile.device(
            self._device_kind
        ).optimizer_seconds_per_element
        group = Group(self.count, batches[b], costs[:, b, n], room[b, n], per_numel_s)
        group, order = group.sorted()
        return group, sizes[n][order], choices[n][order]

    def _batches(self, cut_s: float) -> Ints:
        fixed = self._limits.rank_batch_size
        if fixed is not None:
            return np.array([fixed])
        model = self._model
        per_sample = model.boundary_bytes_per_sample
        by_memory = (
            self._budget // per_sample if per_sample else self._builder.global_batch_size
        )
        largest = min(self._builder.global_batch_size, int(by_memory))
        if self.is_cut(cut_s):
            largest = min(largest, int(cut_s / self.least_seconds_per_sample))
        return np.arange(1 + largest)

    def is_cut(self, cut_s: float) -> bool:
        """Whether larger batches would be there but for the time that they take."""
        whole_s = self._builder.global_batch_size * self.least_seconds_per_sample
        return self._limits.rank_batch_size is None and whole_s > cut_s

    def _allowed_choices(self) -> list[int]:
        last = len(self._builder.recompute_choices) - 1
        recomputes = self._limits.recomputes
        if recomputes is None:
            return list(range(last + 1))
        return [last if recomputes else 0]

    def _of_choice(self, choice: int, batches: Ints) -> tuple[Floats, Floats]:
        """Costs [D, b, m] and room [b, m] when this is recomputed."""
        model, turns = self._model, self._builder.turns
        rank = RankPlan(
            microbatch_sizes=(),
            state_share=0.0,
            recomputed_units=self._builder.recompute_choices[choice],
        )
        whole, rest = batches[:, None] // self._sizes, batches[:, None] % self._sizes
        costs = []
        for each, forward, backward in zip(
            turns.classes, self._forward, self._backward, strict=True
        ):
            forward_s = each.num_units * (whole * forward[1:] + forward[rest])
            backward_s = each.num_units * (whole * backward[1:] + backward[rest])
            if rank.recomputes(each.unit_fqn):
                backward_s = backward_s + forward_s
            for seconds, comm_s in (
                (forward_s, each.forward_comm_s),
                (backward_s, each.backward_comm_s),
            ):
                # Compute shorter than this hides behind its communication.
                costs.append(np.maximum(seconds, (1 - model.overlap_excess) * comm_s))
        return np.array(costs), self._room(rank, batches)

    def _room(self, rank: RankPlan, batches: Ints) -> Floats:
        """Elements of state that fit beside each batch and microbatch size."""
        model = self._model
        running = np.array(
            [float(model.running_bytes(rank, self._device_kind, int(m))) for m in self._sizes]
        )
        per_sample = model.boundary_bytes_per_sample + model.kept_bytes_per_sample(rank)
        computes = batches[:, None] > 0
        used = (
            model.profile.device(self._device_kind).reserved_bytes
            + computes * (model.unsharded_bytes + model.grad_bytes + running)
            + batches[:, None] * float(per_sample)
        )
        left = (self._budget - used) / model.bytes_per_stored_numel
        stored = self._builder.stored_numel
        if stored is not None:
            return np.where(left >= stored, stored, -1.0)
        return np.where(left >= 0, left, -1.0)


def _dominated(costs: Floats, room: Floats) -> Bools:
    """Which candidates [b, n] another of the same batch beats in every respect.

    Only the fastest of those with more room is asked, so some dominated ones stay.
    """
    order = np.argsort(-room, axis=1, kind="stable")
    costs = np.take_along_axis(costs, order[None], axis=2)
    total = costs.sum(axis=0)
    fastest = np.minimum.accumulate(total, axis=1)
    columns = np.arange(total.shape[1])
    pivot = np.maximum.accumulate(np.where(total == fastest, columns, 0), axis=1)
    # The first column that reached the running minimum: later equals do not replace it.
    previous = np.concatenate((np.zeros_like(pivot[:, :1]), pivot[:, :-1]), axis=1)
    beaten: Bools = np.all(np.take_along_axis(costs, previous[None], axis=2) <= costs, axis=0)
    beaten[:, 0] = False
    result = np.zeros_like(beaten)
    np.put_along_axis(result, order, beaten, axis=1)
    return result
