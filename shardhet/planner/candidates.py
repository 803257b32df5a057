"""Build the assignment problem from a cluster, a workload and a profile: list the candidates.

A candidate is a batch b in microbatches of at most m (see ``splits``) and a choice of what is
recomputed.  Its costs are the compute of every phase.  The phases are the forward of
each kind of unit, and the backward of each class of units that every recompute choice treats
alike.  Its room is what the budget leaves for state.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import inf
from typing import NamedTuple

import numpy as np

from shardhet.planner.demands import Demands, Role
from shardhet.planner.dominance import dominated
from shardhet.planner.problem import Floats, Group, Ints, Problem
from shardhet.planner.recompute import recompute_choices
from shardhet.planner.search import DEFAULT_EFFORT, Effort
from shardhet.planner.solution import PlanError
from shardhet.planner.splits import Splits, splits_of
from shardhet.planner.table import CandidateTable
from shardhet.pricing.cost import CostModel
from shardhet.records.plan import RankPlan
from shardhet.records.workload import Workload

MICROBATCHES_BEYOND_MEASURED = 2  # sizes up to this multiple of the largest measured one
LEAST_MAX_MICROBATCH_SIZE = 16
BATCHES_AT_ONCE = 2048
MOST_SAMPLES_LISTED = 2**17  # on one device
ROUNDING = 1e-12  # of sums of shares
FIRST_CUT_FACTOR = 4  # the first cut allows this many times the compute of the whole batch
CLOSE_CUT_FACTOR = 1.5  # likewise, where many groups make each candidate count
MANY_GROUPS = 32
GIB = 2**30


class PortShares(NamedTuple):
    """How much of the state a device stores, as part of all, if collectives are to be fast."""

    least: float = 0.0  # if it computes
    most: float = inf  # if it computes
    most_idle: float = inf


def row_numel(workload: Workload) -> float:
    """Elements that a device may get beyond its share when shares are rounded to rows."""
    return 2.0 * max(kind.max_row_numel for kind in workload.kinds)


class TableBuilder:
    """Lists the candidates of every group of a cluster, at any cut."""

    def __init__(
        self,
        model: CostModel,
        *,
        global_batch_size: int,
        demands: Demands,
        effort: Effort = DEFAULT_EFFORT,
        unevenness: float = 1.0,
        stored: PortShares = PortShares(),  # noqa: B008  a tuple
        row_part: float = 1.0,
        is_lenient: bool = False,
    ) -> None:
        """Collectives take as long as with this ``unevenness``, if devices store so much.

        ``row_part`` is the part that is left of the room that rounding to rows may take.

        With ``is_lenient``, demanded shares may be met to within rows, as plans meet them.
        The problem then admits every plan, also those that do not fit for sure; its solution
        is a bound.
        """
        self.model = model
        self.global_batch_size = global_batch_size
        self._demands = demands
        self.recompute_choices = recompute_choices(model, effort.recompute_steps)
        self.turns = model.turns(unevenness=unevenness, recomputed=self.recompute_choices)
        self.state_numel = float(sum(layout.numel for layout in model.workload.layouts()))
        self.row_numel = row_part * row_numel(model.workload)
        shares = demands.state_shares(model.cluster.world_size)
        self.fixed_numel = self.state_numel * sum(shares.values())  # by demand
        self.slack_numel = self.row_numel if is_lenient else 0.0  # of demanded shares
        self._fixed_optimizer_s = max(
            (
                model.profile.device(
                    model.cluster.devices[i].kind
                ).optimizer_seconds_per_element
                * max(0.0, share * self.state_numel - self.slack_numel)
                for i, share in shares.items()
            ),
            default=0.0,
        )
        # The most that a device stores if all store the same up to rows.
        world_size = model.cluster.world_size
        even = model.stored_numels([1 / world_size] * world_size)
        self.even_numel = float(max(even)) if demands.has_even_state else None
        self._rest_numel = self.state_numel - self.fixed_numel
        if demands.has_even_state or self.fixed_numel:
            # These shares sum to the state only up to rounding.
            spared = ROUNDING * self.state_numel + self.slack_numel * len(shares)
            self._rest_numel = max(0.0, self._rest_numel - spared)
        self.stored = stored
        self.max_microbatch_size = demands.max_microbatch_size
        all_roles = demands.roles(model.cluster)
        # Equal roles are one object, which is faster to compare than what it says.
        role_by_id = {id(role): role for role in all_roles}
        bundles: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = {}
        for positions in demands.bundles(model.cluster.world_size):
            role_ids = [id(all_roles[position]) for position in positions]
            key = (len(positions), tuple(dict.fromkeys(role_ids)))
            bundles.setdefault(key, []).append(positions)
        # Per group: sets of equal positions.
        self.bundles = tuple(map(tuple, bundles.values()))
        self._groups = [
            _GroupTimes(
                self,
                [role_by_id[each] for each in role_ids],
                num_members=num_members,
                count=len(of_group),
            )
            for (num_members, role_ids), of_group in bundles.items()
        ]

    def largest_microbatch_size(self, role: Role) -> int:
        """The largest size to consider: beyond the measured ones, at most the batch."""
        units = self.model.profile.device(role.device_kind).units
        measured = max(unit.points[-1].microbatch_size for unit in units)
        size = max(LEAST_MAX_MICROBATCH_SIZE, MICROBATCHES_BEYOND_MEASURED * measured)
        limits = (self.max_microbatch_size, role.limits.max_microbatch_size)
        stated = [each for each in limits if each is not None]
        return max(1, min(self.global_batch_size, *(stated or [size])))

    @property
    def unequal_s(self) -> float:
        """How much longer the optimizer takes if devices that must be equal store the same.

        They do, up to rows.
        """
        return max(
            (
                times.slowest_optimizer_s * self.row_numel
                for times in self._groups
                if times.num_members > 1
            ),
            default=0.0,
        )

    def least_compute_s(self, numbers: Sequence[int]) -> float:
        """No step is shorter if so many sets of each group compute."""
        per_s = sum(
            number * times.num_members / times.least_seconds_per_sample
            for number, times in zip(numbers, self._groups, strict=True)
        )
        return self.global_batch_size / per_s

    def first_cut_s(self) -> float:
        """The first cut: all communication, and several times the compute of the batch."""
        slowest_single = min(times.least_seconds for times in self._groups)
        compute_s = self.least_compute_s([times.count for times in self._groups])
        compute_s += slowest_single
        is_many = len(self._groups) > MANY_GROUPS
        factor = CLOSE_CUT_FACTOR if is_many else FIRST_CUT_FACTOR
        return self.turns.comm_s + self.model.overhead_s + factor * compute_s

    def table(self, cut_s: float, *, within_s: Sequence[float] | None = None) -> CandidateTable:
        """All candidates that compute no longer than ``cut_s``, without dominated ones.

        A candidate is dominated if another of the same batch has as much room and is as fast
        in every phase.  With ``within_s``, limits on the phases, candidates beyond them are
        left out, and the compute that communication hides counts too: these candidates are
        equally fast, and the one that computes least may be chosen.
        """
        model = self.model
        built = [times.group(cut_s, within_s) for times in self._groups]
        for (group, _, _), bundles in zip(built, self.bundles, strict=True):
            if not len(group.batch):
                raise PlanError(self._nothing_to_do(bundles[0]))
        problem = Problem(
            groups=tuple(group for group, _, _ in built),
            global_batch_size=self.global_batch_size,
            state_numel=self._rest_numel,
            fixed_s=self.turns.exposed_comm_s + model.overhead_s,
            row_numel=self.row_numel,
            fixed_optimizer_s=self._fixed_optimizer_s,
        )
        return CandidateTable(
            problem=problem,
            bundles=self.bundles,
            splits=tuple(times.splits for times in self._groups),
            split_indices=tuple(splits for _, splits, _ in built),
            choices=tuple(choices for _, _, choices in built),
            recompute_choices=self.recompute_choices,
            is_cut=any(times.is_cut(cut_s) for times in self._groups),
        )

    def _nothing_to_do(self, positions: Sequence[int]) -> str:
        cluster = self.model.cluster
        names = ", ".join(f"{i} ({cluster.devices[i]})" for i in positions)
        budget = min(self._demands.budget_bytes(cluster, i) for i in positions)
        together = " and be equal" if len(positions) > 1 else ""
        return (
            f"plan: device {names} can do nothing that is demanded of it{together} within "
            f"{budget / GIB:.3g} GiB. Raise its memory budget, lower its batch or its exact "
            "share of the state, or leave it out of the cluster."
        )


class _GroupTimes:
    """Candidates of a group, whose members are sets of equal devices (mostly of one device)."""

    def __init__(
        self, builder: TableBuilder, roles: Sequence[Role], *, num_members: int, count: int
    ) -> None:
        self.count = count
        self.num_members = num_members
        self._builder = builder
        self._roles = roles
        largest = min(builder.largest_microbatch_size(role) for role in roles)
        self._sizes: Ints = np.arange(1, largest + 1)
        self._members = [
            _RoleTimes(builder, role, self._sizes, is_together=num_members > 1)
            for role in roles
        ]
        # Devices that must be equal cut their batches by the slowest of them.
        self._whole_s: Floats = reduce(np.maximum, [each.whole_s for each in self._members])
        self.splits = splits_of(tuple(self._whole_s.tolist()), 0)
        self.least_seconds_per_sample = max(m.least_seconds_per_sample for m in self._members)
        self.least_seconds = max(member.least_seconds for member in self._members)
        profile = builder.model.profile
        self.slowest_optimizer_s = max(  # per element
            profile.device(role.device_kind).optimizer_seconds_per_element for role in roles
        )

    def group(self, cut_s: float, within_s: Sequence[float] | None) -> tuple[Group, Ints, Ints]:
        """The group at a cut, and the splits and recompute choices of its candidates."""
        batches, allowed = self._batches(cut_s), self._allowed_choices()
        self.splits = splits_of(tuple(self._whole_s.tolist()), int(batches.max(initial=0)))
        parts = [  # few batches at a time need little memory
            self._candidates(batches[start : start + BATCHES_AT_ONCE], allowed, within_s)
            for start in range(0, max(1, len(batches)), BATCHES_AT_ONCE)
        ]
        batch, costs, room, compute, splits, choices = (
            np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)
        )
        number = self.num_members
        group = Group(
            count=self.count,
            batch=number * batch,
            costs=costs,
            room=number * room,
            optimizer_s_per_numel=self.slowest_optimizer_s / number,
            num_members=number,
            compute_s=compute,
        )
        group, order = group.sorted()
        return group, splits[order], choices[order]

    def _candidates(
        self, batches: Ints, allowed: Sequence[int], within_s: Sequence[float] | None
    ) -> tuple[Ints, Floats, Floats, Floats, Ints, Ints]:
        """Batches, costs, room, compute, splits and recompute choices of what is kept."""
        per_choice = list(self._of_choices(allowed, batches))
        costs = np.concatenate([each.costs for each in per_choice], axis=2)  # [D, b, n]
        room = np.concatenate([each.room for each in per_choice], axis=1)  # [b, n]
        compute = np.concatenate([each.compute_s for each in per_choice], axis=1)  # [b, n]
        number = len(self.splits.largest)
        splits = np.tile(np.arange(number), len(per_choice))
        sizes = self.splits.largest[splits]
        choices = np.repeat(allowed, number)
        is_first = np.arange(len(sizes)) == len(sizes) - number
        # A device without samples is one candidate, not one per size.
        valid = (room >= 0) & np.where(
            batches[:, None] > 0, sizes <= batches[:, None], is_first
        )
        valid &= np.tile(self.splits.exist(batches), len(per_choice))
        known = costs
        if within_s is not None:
            valid &= (costs <= np.array(within_s)[:, None, None]).all(axis=0)
            known = np.concatenate((costs, compute[None]))
        kept = valid & ~dominated(known, np.where(valid, room, -1.0))
        b, n = np.nonzero(kept)
        return batches[b], costs[:, b, n], room[b, n], compute[b, n], splits[n], choices[n]

    def _batches(self, cut_s: float) -> Ints:
        """The batches that each member may compute."""
        stated = [role.limits.rank_batch_size for role in self._roles]
        fixed = {each for each in stated if each is not None}
        if fixed:
            return np.array(list(fixed) if len(fixed) == 1 else [], dtype=np.int64)
        per_sample = self._builder.model.boundary_bytes_per_sample
        largest = self._builder.global_batch_size // self.num_members
        if per_sample:
            largest = min(largest, *(role.budget_bytes // per_sample for role in self._roles))
        if self.is_cut(cut_s):
            largest = min(largest, int(cut_s / self.least_seconds_per_sample))
        if largest > MOST_SAMPLES_LISTED:
            raise PlanError(
                f"plan: global_batch_size is {self._builder.global_batch_size:,}, of which one "
                f"device may compute {largest:,}; plans are searched up to "
                f"{MOST_SAMPLES_LISTED:,} on one device. Lower global_batch_size, or state "
                "the batches of the fast devices (limits.0.batch)."
            )
        return np.arange(1 + largest)

    def is_cut(self, cut_s: float) -> bool:
        """Whether the cut leaves out larger batches."""
        is_fixed = any(role.limits.rank_batch_size is not None for role in self._roles)
        whole_s = self._builder.global_batch_size * self.least_seconds_per_sample
        return not is_fixed and whole_s > cut_s * self.num_members

    def _allowed_choices(self) -> list[int]:
        last = len(self._builder.recompute_choices) - 1
        claims = {role.limits.recomputes for role in self._roles} - {None}
        if not claims:
            return list(range(last + 1))
        return [last if True in claims else 0]

    def _of_choices(self, choices: Sequence[int], batches: Ints) -> Iterator["_Worth"]:
        """Per choice: costs of the slowest member, room of the smallest, compute of all."""
        members = [member.of_choices(choices, batches, self.splits) for member in self._members]
        for of_members in zip(*members, strict=True):
            yield _Worth(
                reduce(np.maximum, [each.costs for each in of_members]),
                reduce(np.minimum, [each.room for each in of_members]),
                reduce(np.add, [each.compute_s for each in of_members])
                * (self.num_members / len(of_members)),
            )


class _Worth(NamedTuple):
    """What batches b in microbatches of m cost a device, and the room that they leave."""

    costs: Floats  # [D, b, m]
    room: Floats  # [b, m]
    compute_s: Floats  # [b, m]


class _RoleTimes:
    """Seconds and bytes of one kind of device under one set of limits, by microbatch size."""

    def __init__(
        self, builder: TableBuilder, role: Role, sizes: Ints, *, is_together: bool
    ) -> None:
        """``is_together``: other devices must store the same, up to rows."""
        model, device_kind = builder.model, role.device_kind
        self._is_together = is_together
        self._builder = builder
        self._role = role
        self._sizes = sizes
        # By kind of unit, [2, 1 + sizes]: forward and backward of one unit by microbatch
        # size; size 0 takes no time.
        self._seconds: dict[str, Floats] = {}
        whole = np.zeros(1 + len(sizes))
        for name, number in model.workload.num_units_by_kind.items():
            if any(each.kind.name == name for each in builder.turns.classes):
                unit = model.profile.unit(device_kind, name)
                self._seconds[name] = np.array(
                    [
                        [0.0, *map(curve.at, sizes.tolist())]
                        for curve in (unit.forward_s, unit.backward_s)
                    ]
                )
                whole += number * self._seconds[name].sum(axis=0)
        self.whole_s = whole  # [1 + sizes] of a microbatch in all units
        self.least_seconds_per_sample = float((whole[1:] / sizes).min())
        self.least_seconds = float(whole[1:].min())

    def of_choices(
        self, choices: Sequence[int], batches: Ints, splits: Splits
    ) -> Iterator[_Worth]:
        """What each choice of what is recomputed is worth.

        The phases are the forward of every kind of unit, then the backward of every class.
        The forward of all classes of a kind is a single phase, because all of them are
        longest on the same rank: the sum of their maxima is the maximum of their sum.
        """
        all_seconds = splits.seconds(np.concatenate([*self._seconds.values()]), batches)
        seconds = {
            name: all_seconds[2 * i : 2 * i + 2]  # [2, b, m]
            for i, name in enumerate(self._seconds)
        }
        classes = self._builder.turns.classes
        excess = self._builder.model.profile.device(self._role.device_kind).overlap_excess

        def beside(compute_s: Floats, comm_s: float) -> Floats:
            # Compute that ends before its communication is hidden by it.
            slowed = np.where(compute_s > 0, compute_s + excess * comm_s, 0.0)
            return np.maximum(slowed, comm_s)

        forward = {name: np.zeros(each.shape[1:]) for name, each in seconds.items()}
        alone_s = sum(  # [b, m]
            each.num_units * seconds[each.kind.name].sum(axis=0) for each in classes
        )
        for each in classes:
            forward[each.kind.name] += beside(
                each.num_units * seconds[each.kind.name][0], each.forward_comm_s
            )
        for choice in choices:
            patterns = self._builder.recompute_choices[choice]
            rank = RankPlan(microbatch_sizes=(), state_share=0.0, recomputed_units=patterns)
            costs, compute_s = [*forward.values()], alone_s
            for each in classes:
                forward_s, backward_s = seconds[each.kind.name]
                again_s = forward_s if rank.recomputes(each.unit_fqn) else 0.0
                turns_s = each.num_units * (backward_s + again_s)
                costs.append(beside(turns_s, each.backward_comm_s))
                compute_s = compute_s + each.num_units * again_s
            room = self._room(rank, batches, splits.largest)
            yield _Worth(np.array(costs), room, compute_s)

    def _room(self, rank: RankPlan, batches: Ints, sizes: Ints) -> Floats:
        """Elements of state that fit besides each batch and microbatch size."""
        model, role = self._builder.model, self._role
        used = model.working_bytes(role.device_kind, rank, batches[:, None], sizes)
        left = model.room_numel(role.budget_bytes, used)
        if role.limits.max_state_share is not None:
            # ``Problem.rounded`` takes row_numel off all room, so it is added here.
            cap = role.limits.max_state_share * self._builder.state_numel
            left = np.minimum(left, cap + self._builder.row_numel)
        if role.limits.state_share is not None:
            # An exact share is not part of the state that the search distributes.
            left = left - role.limits.state_share * self._builder.state_numel
            left = np.minimum(left + self._builder.slack_numel, self._builder.row_numel)
        else:
            left = self._within_ports(left, batches)
        even_numel, row_numel = self._builder.even_numel, self._builder.row_numel
        if even_numel is not None:
            # ``Problem.rounded`` need not take off what rounding has added already.
            is_enough = left + 2 * self._builder.slack_numel >= even_numel
            return np.where(is_enough, even_numel + row_numel, -1.0)
        if self._is_together:
            left = left + self._builder.slack_numel
        return np.where(left >= 0, left, -1.0)

    def _within_ports(self, left: Floats, batches: Ints) -> Floats:
        """The room of which collectives can make use; -1 where it is less than they need."""
        stored, row_numel = self._builder.stored, self._builder.row_numel
        if stored == PortShares():
            return left
        least, most, most_idle = (each * self._builder.model.workload.numel for each in stored)
        computes = batches[:, None] > 0
        # ``Problem.rounded`` takes row_numel off all room, so it is added here.
        within = np.minimum(left, np.where(computes, most, most_idle) + row_numel)
        return np.where(computes & (left < least), -1.0, within)
