"""Build the assignment problem from a cluster, a workload and a profile: list the candidates.

A candidate is a batch b in microbatches of at most m (see ``splits``) and a choice of what is
recomputed.  Its costs are the compute of every phase.  The phases are the forward of
each kind of unit, and the backward of each class of units that every recompute choice treats
alike.  Its room is what the budget leaves for state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from shardhet.planner.candidates.group_times import GroupTimes, may_compute
from shardhet.planner.candidates.recompute import policies
from shardhet.planner.candidates.role_times import LinkShares, Terms
from shardhet.planner.candidates.table import CandidateTable
from shardhet.planner.forms import BatchRounds
from shardhet.planner.problem.constraints import Constraints, Role
from shardhet.planner.problem.problem import Floats, Problem
from shardhet.planner.problem.solution import PlanError
from shardhet.planner.problem.state_numels import StateNumels
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.pricing.cost import CostModel
from shardhet.records.cluster import Cluster

MOST_SAMPLES_LISTED = 2**17  # on one device
MOST_LISTED_AT_ONCE = 2**14  # on devices of different groups together
MANY_BATCHES, FEW_BATCHES = 1024, 256  # of one device: then first with a stride, to so many
FIRST_CUT_FACTOR = 4  # the first cut allows this many times the compute of the whole batch
CLOSE_CUT_FACTOR = 1.5  # likewise, where many groups make each candidate count
MANY_GROUPS = 32
FINER = 2  # steps of recomputation where few long samples are shared by tokens
GIB = 2**30


Bundles = tuple[list[Role], list[tuple[int, ...]]]  # sets of positions with these roles


@dataclass(frozen=True, slots=True)
class LeastCompute:
    """Bounds on the compute of the batch, spread perfectly over all devices."""

    whole_s: float
    unit_s: Mapping[str, Floats]  # [2] of one unit of each kind: forward and backward
    overlap_slowdown: float  # the least of any device


class TableBuilder:
    """Lists the candidates of every group of a cluster, at any cut."""

    def __init__(
        self,
        model: CostModel,
        *,
        rounds: BatchRounds,
        constraints: Constraints,
        effort: Effort = DEFAULT_EFFORT,
        unevenness: float = 1.0,
        stored: LinkShares = LinkShares(),  # noqa: B008  a tuple
        row_part: float = 1.0,
        is_relaxed: bool = False,
        has_endless_memory: bool = False,
    ) -> None:
        """Of plans with ``rounds``, which need not fit with ``has_endless_memory``.

        Collectives take as long as with this ``unevenness``, if devices store so much.
        ``row_part`` and ``is_relaxed``: see ``StateNumels.of``.  A lenient problem admits every
        plan, also those that do not fit for sure; its solution is a bound.
        """
        self.model = model
        self.rounds = rounds
        self.constraints = constraints
        self.policies = policies(
            model,
            effort.recompute_steps * (FINER if constraints.context_groups else 1),
            on_host=constraints.may_keep_inputs_on_host,
            optimizer_on_host=constraints.may_keep_optimizer_on_host,
        )
        self.turns = model.turns(
            unevenness=unevenness, recomputed=model.policies(self.policies)
        )
        self.state = StateNumels.of(
            model, constraints, row_part=row_part, is_relaxed=is_relaxed
        )
        self._fixed_optimizer_s = max(
            (
                model.profile.device(
                    model.cluster.devices[i].kind
                ).optimizer_seconds_per_element
                * max(0.0, numel - self.state.slack)
                for i, numel in self.state.by_demand.items()
            ),
            default=0.0,
        )
        self._terms = Terms(
            model,
            self.turns,
            self.policies,
            self.state,
            stored,
            rounds,
            has_endless_memory,
            constraints.max_microbatch_size,
        )
        equal_groups = bundles_of(constraints, model.cluster)
        self.equal_groups = tuple(tuple(sets) for _, sets in equal_groups)
        self._groups = [
            GroupTimes(self._terms, roles, num_members=len(sets[0]), count=len(sets))
            for roles, sets in equal_groups
        ]

    @property
    def unequal_s(self) -> float:
        """How much longer the optimizer takes if devices that must be equal store the same.

        They do, up to rows.
        """
        return max(
            (
                times.slowest_optimizer_s * self.state.row
                for times in self._groups
                if times.num_batches > 1
            ),
            default=0.0,
        )

    def least_compute_s(self, numbers: Sequence[int]) -> float:
        """No step is shorter if so many sets of each group compute."""
        per_s = sum(
            number * times.num_batches / times.least_seconds_per_sample
            for number, times in zip(numbers, self._groups, strict=True)
        )
        return self.rounds.round_size / per_s

    @property
    def all_compute_s(self) -> float:
        """No step is shorter than the compute of the batch, spread perfectly."""
        return self.least_compute_s([times.count for times in self._groups])

    def least_compute(self) -> LeastCompute:
        """What the batch takes at least."""
        kinds = self.model.cluster.number_by_kind
        number = np.array([[times.count * times.num_batches] for times in self._groups])
        with np.errstate(divide="ignore"):  # a phase may take no time
            unit_s = {
                name: self.rounds.global_batch_size
                / (number / [each.unit_s[name] for each in self._groups]).sum(axis=0)
                for name in self._groups[0].unit_s
            }
        return LeastCompute(
            whole_s=self.all_compute_s,
            unit_s=unit_s,
            overlap_slowdown=min(
                self.model.profile.device(kind).overlap_slowdown for kind in kinds
            ),
        )

    def first_cut_s(self) -> float:
        """The first cut: all communication, and several times the compute of the batch."""
        slowest_single = min(times.least_seconds for times in self._groups)
        compute_s = self.all_compute_s + slowest_single
        is_many = len(self._groups) > MANY_GROUPS
        factor = CLOSE_CUT_FACTOR if is_many else FIRST_CUT_FACTOR
        return self.turns.comm_s + self.model.overhead_s + factor * compute_s

    @property
    def min_s(self) -> float:
        """No plan has a shorter step."""
        return max(self.turns.comm_s, self.all_compute_s) + self.model.overhead_s

    def may_be_within(self, cutoff_s: float) -> bool:
        """Whether a step of at most ``cutoff_s`` may exist; false proves that none does."""
        left_s = cutoff_s - self.turns.exposed_comm_s - self.model.overhead_s
        compute, comm_s = self.least_compute(), self._terms.comm_s
        of_classes = [
            each.num_units * compute.unit_s[each.kind.name] for each in self.turns.classes
        ]
        compute_s = np.array(of_classes).T.ravel()  # [2 classes]
        beside_s = compute_s + compute.overlap_slowdown * comm_s * (compute_s > 0)
        least_s = np.maximum(beside_s, comm_s)
        return bool(least_s.sum() <= left_s) and may_compute(
            self._groups, self.rounds.round_size, cutoff_s, left_s, least_s
        )

    def stride(self, cut_s: float) -> int:
        """Between batches, so that no device has too many of them; 1 if there are few."""
        longest = max(len(window) for window in self._windows(cut_s))
        return max(1, longest // FEW_BATCHES) if longest > MANY_BATCHES else 1

    def check_listed(self, cut_s: float, *, is_whole: bool) -> None:
        """Refuse batches that would take too long to list: ``PlanError``.

        ``is_whole``: the cutoff has not yet been tightened by a coarse search.
        """
        windows = self._windows(cut_s)
        # Of a single device all are listed if its batch does not fit.
        is_alone = self.model.cluster.world_size == 1
        longest = max(window.stop if is_alone else len(window) for window in windows)
        listed = sum(len(window) for window in windows if len(window) > MANY_BATCHES)
        if longest <= MOST_SAMPLES_LISTED and (is_whole or listed <= MOST_LISTED_AT_ONCE):
            return
        raise PlanError(
            f"plan: a round has {self.rounds.round_size:,} samples, of which one device may "
            f"compute {longest - 1:,}; plans are searched up to {MOST_SAMPLES_LISTED:,} on one "
            "device, or fewer where links or memory leave open who computes how much. Lower "
            "global_batch_size, or state the batches of the fast devices (limits.0.batch).",
            lower_bound_s=self.min_s,
        )

    def _windows(self, cut_s: float) -> list[range]:
        """The batches that a device of each group may compute.

        If a cut limits them, a device also computes at least what the others cannot, and a
        single device computes all.
        """
        most = [times.most(cut_s) for times in self._groups]
        if not self._is_cut(cut_s) and self.model.cluster.world_size > 1:
            return [range(1 + each) for each in most]
        together = sum(
            times.count * times.num_batches * each
            for times, each in zip(self._groups, most, strict=True)
        )
        missing = self.rounds.round_size - together
        windows = []
        for times, each in zip(self._groups, most, strict=True):
            least = -(-(missing + times.num_batches * each) // times.num_batches)
            windows.append(range(min(max(0, least), each), 1 + each))
        return windows

    def _is_cut(self, cut_s: float) -> bool:
        return any(times.is_cut(cut_s) for times in self._groups)

    def table(
        self,
        cut_s: float,
        *,
        within_s: Sequence[float] | None = None,
        stride: int = 1,
        has_less: bool = False,
    ) -> CandidateTable:
        """All candidates that compute no longer than ``cut_s``, without dominated ones.

        With a ``stride``, of large batches only multiples of it.  A candidate is dominated if
        another of the same batch has as much room and is as fast in every phase.  With
        ``within_s``, limits on the phases, candidates beyond them are left out, and the compute
        that communication hides counts too: these candidates are equally fast, and the one that
        computes least may be chosen.  With ``has_less``, also batches that are too small: the
        others cannot compute the rest.
        """
        model = self.model
        built = []
        for times, window in zip(self._groups, self._windows(cut_s), strict=True):
            asked = range(window.stop) if has_less else window
            each = times.group(asked, within_s, stride)
            if asked.start and not len(each[0].batch):
                # The least that the cut leaves to it does not fit: no plan is as fast.
                each = times.group(range(window.stop), within_s, stride)
            built.append(each)
        for (group, _, _), equal_groups in zip(built, self.equal_groups, strict=True):
            if not len(group.batch):
                raise PlanError(self._nothing_to_do(equal_groups[0]))
        problem = Problem(
            groups=tuple(group for group, _, _ in built),
            global_batch_size=self.rounds.round_size,
            state_numel=self.state.rest,
            fixed_s=self.turns.exposed_comm_s + model.overhead_s,
            row_numel=self.state.row,
            fixed_optimizer_s=self._fixed_optimizer_s,
        )
        return CandidateTable(
            problem=problem,
            rounds=self.rounds,
            equal_groups=self.equal_groups,
            splits=tuple(times.splits for times in self._groups),
            split_indices=tuple(splits for _, splits, _ in built),
            choices=tuple(choices for _, _, choices in built),
            policies=self.policies,
            is_cut=self._is_cut(cut_s),
        )

    def _nothing_to_do(self, positions: Sequence[int]) -> str:
        cluster = self.model.cluster
        names = ", ".join(f"{i} ({cluster.devices[i]})" for i in positions)
        budget = min(self.constraints.budget_bytes(cluster, i) for i in positions)
        together = " and be equal" if len(positions) > 1 else ""
        return (
            f"plan: device {names} can do nothing that is demanded of it{together} within "
            f"{budget / GIB:.3g} GiB. Raise its memory budget, lower its batch or its exact "
            "share of the state, or leave it out of the cluster."
        )


def bundles_of(constraints: Constraints, cluster: Cluster) -> list[Bundles]:
    """All positions, in sets of equal devices, mostly of one: what roles there are, or that
    of each member of a context group, and the sets; in the order of their first members.
    """
    roles, alone = constraints.roles(cluster), dict[int, list[int]]()
    sets = [
        tuple(sorted(e))
        for e in (*constraints.equal, *constraints.context_groups)
        if len(e) > 1
    ]
    held, found = set(chain.from_iterable(sets)), dict[tuple[int, ...], Bundles]()
    for each in sorted(sets):
        of_set = [roles[i] for i in each]
        if not of_set[0].member:
            of_set = list({id(role): role for role in of_set}.values())
        key = (len(each), *map(id, of_set))
        found.setdefault(key, (of_set, []))[1].append(each)
    for i, role in enumerate(map(id, roles)):
        if i not in held:
            alone.setdefault(role, []).append(i)
    for role, positions in alone.items():
        found[1, role] = [roles[positions[0]]], [*zip(positions, strict=True)]
    return sorted(found.values(), key=lambda each: each[1][0])
