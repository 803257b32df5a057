"""The candidates of a group: devices that may do the same, or sets of devices that must.

A set may also be a context group.  It has one batch, of which each member computes its tokens,
and together the room of all.
"""

from collections.abc import Sequence
from functools import cached_property, reduce

import numpy as np

from shardhet.planner.candidates.dominance import dominated
from shardhet.planner.candidates.role_times import RoleTimes, Terms, Worth
from shardhet.planner.candidates.splits import (
    LeastSplits,
    Splits,
    Tried,
    splits_of,
    worth_trying,
)
from shardhet.planner.problem.constraints import Role
from shardhet.planner.problem.problem import Floats, Group, Ints
from shardhet.records.plan import EVERY_UNIT

SPLITS_AT_ONCE = 2**21  # of batches into microbatches


class GroupTimes:
    """Candidates of a group, whose members are sets of equal devices (mostly of one device)."""

    def __init__(
        self, terms: Terms, roles: Sequence[Role], *, num_members: int, count: int
    ) -> None:
        self.count = count
        self.num_members = num_members
        self._terms = terms
        self._roles = roles
        self._is_shared = roles[0].member is not None
        self.num_batches = 1 if self._is_shared else num_members
        self._terms_of = [terms.of(role) for role in roles]
        pairs = list(zip(self._terms_of, roles, strict=True))
        largest = min(each.largest_microbatch_size(role) for each, role in pairs)
        self._members = [
            RoleTimes(each, role, largest, is_together=self.num_batches > 1)
            for each, role in pairs
        ]
        self._num_measured = max(each.num_measured for each in self._members)
        # Devices that must be equal cut their batches by the slowest of them.
        self._whole_s: Floats = reduce(np.maximum, [each.whole_s for each in self._members])
        self.splits = self._splits(0)
        self.least_seconds_per_sample = max(m.least_seconds_per_sample for m in self._members)
        self.least_seconds = max(member.least_seconds for member in self._members)
        # [2] of a sample, by kind of unit: forward and backward of one unit.
        self.unit_s: dict[str, Floats] = {
            name: reduce(np.maximum, [each.least_unit_s(name) for each in self._members])
            for name in self._members[0].unit_names
        }
        on_hosts = [
            terms.model.most_host_seconds_per_numel(role.host)
            for role in roles
            if role.host is not None
        ]
        # per element
        self.slowest_optimizer_s = max([*(m.optimizer_s for m in self._members), *on_hosts])
        self._has_host = len(on_hosts) == len(roles)

    def _splits(self, max_batch: int) -> Splits | LeastSplits:
        if self._terms.has_endless_memory:
            return LeastSplits(self._num_measured)
        return splits_of(tuple(self._whole_s.tolist()), self._num_measured, max_batch)

    def group(
        self, window: range, within_s: Sequence[float] | None, stride: int
    ) -> tuple[Group, Ints, Ints]:
        """The group with batches in a window, and splits and recompute choices."""
        batches, allowed = self._batches(window, stride), self._allowed_choices()
        self.splits = self._splits(int(batches.max(initial=0)))
        at_once = max(1, SPLITS_AT_ONCE // len(self.splits.largest))
        parts = [  # few batches at a time need little memory
            self._candidates(batches[start : start + at_once], allowed, within_s)
            for start in range(0, max(1, len(batches)), at_once)
        ]
        batch, costs, room, compute, optimizer, splits, choices = (
            np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)
        )
        number = self.num_members
        group = Group(
            count=self.count,
            batch=self.num_batches * batch,
            costs=costs,
            room=number * room,
            optimizer_s_per_numel=self.slowest_optimizer_s / number,
            num_members=number,
            num_batches=self.num_batches,
            compute_s=compute,
            own_optimizer=optimizer * number if self._has_host else None,
        )
        group, order = group.sorted()
        return group, splits[order], choices[order]

    def _candidates(
        self, batches: Ints, allowed: Ints, within_s: Sequence[float] | None
    ) -> tuple[Ints, Floats, Floats, Floats, Floats, Ints, Ints]:
        """Batches, costs, room, compute, lines of the optimizer, splits and recompute choices
        of what is kept.
        """
        tried = worth_trying(
            self.splits,
            [each.curves_s for each in self._members],
            batches,
            needs_more_if_larger=all(each.needs_more_if_larger for each in self._members),
        )
        splits, exists = tried.splits, tried.exists
        number = splits.shape[1]
        shape = (len(batches), len(allowed) * number)
        costs, room, compute, optimizer = self._of_choices(allowed, batches, tried)
        costs = costs.reshape(len(costs), *shape)  # [D, b, n]
        room, compute = room.reshape(shape), compute.reshape(shape)  # [b, n]
        optimizer = optimizer.reshape(*optimizer.shape[:2], *shape)  # [2, K, b, n]
        # A device without samples is one candidate for each place of the optimizer, not one
        # per size and choice.
        last = {self._is_on_host(choice): i for i, choice in enumerate(allowed)}
        is_idle = np.isin(np.arange(room.shape[1]), [number * i for i in last.values()])
        exists = np.tile(exists, len(allowed))
        valid = (room >= 0) & np.where(batches[:, None] > 0, exists, is_idle)
        known = costs
        if within_s is not None:
            valid &= (costs <= np.array(within_s)[:, None, None]).all(axis=0)
            known = np.concatenate((costs, compute[None]))
        if self._has_host:
            # All of the state by each line, or by the one that holds for little state.
            rate, ahead = optimizer
            whole = self._terms.state.whole
            whole_s = np.maximum((whole - ahead) / rate, whole / rate.max(axis=0))
            known = np.concatenate((known, whole_s))
        kept = valid & ~dominated(known, np.where(valid, room, -1.0))
        b, n = np.nonzero(kept)
        return (
            batches[b],
            costs[:, b, n],
            room[b, n],
            compute[b, n],
            optimizer[:, :, b, n],
            splits[b, n % number],
            allowed[n // number],
        )

    @cached_property
    def _fixed(self) -> set[int]:
        """The batches that are demanded."""
        stated = [role.limits.rank_batch_size for role in self._roles]
        return {each for each in stated if each is not None}

    def most(self, cut_s: float) -> int:
        """The largest batch that each member may compute."""
        if self._fixed:
            return max(self._fixed)
        terms = self._terms
        largest = self._terms.rounds.round_size // self.num_batches
        for of, role in zip(self._terms_of, self._roles, strict=True):
            if not terms.has_endless_memory and of.least_bytes_per_sample:
                largest = min(largest, role.budget_bytes // of.least_bytes_per_sample)
        if self.is_cut(cut_s):
            largest = min(largest, int(cut_s / self.least_seconds_per_sample))
        return largest

    def most_within(self, most_s: float, left_s: float, least_s: Floats) -> int:
        """The largest batch of all members whose phases may take ``left_s`` of ``most_s``."""
        most = self.most(most_s)
        each = min(member.most_within(most, left_s, least_s) for member in self._members)
        return self.count * self.num_batches * each

    def _batches(self, window: range, stride: int) -> Ints:
        """The batches that each member may compute."""
        if self._fixed:
            return np.array(list(self._fixed) if len(self._fixed) == 1 else [], dtype=np.int64)
        if stride == 1:
            return np.arange(window.start, window.stop)
        multiples = np.arange(-(-window.start // stride) * stride, window.stop, stride)
        # One device may compute what is left of the batch.
        rest = multiples + self._terms.rounds.round_size % stride
        ends = (window.start, window.stop - 1)
        return np.unique(np.concatenate((multiples, rest[rest < window.stop], ends)))

    def is_cut(self, cut_s: float) -> bool:
        """Whether the cut leaves out larger batches."""
        whole_s = self._terms.rounds.round_size * self.least_seconds_per_sample
        return not self._fixed and whole_s > cut_s * self.num_batches

    def _is_on_host(self, choice: int) -> bool:
        return self._terms.policies[choice].optimizer_on_host

    def _allowed_choices(self) -> Ints:
        claims = {role.limits.recomputes for role in self._roles} - {None}
        wanted = EVERY_UNIT if True in claims else ()
        choices = [
            i
            for i, each in enumerate(self._terms.policies)
            if (not claims or each.recomputed_units == wanted)
            and (self._has_host or not each.optimizer_on_host)
        ]
        return np.array(choices, dtype=np.int64)

    def _of_choices(self, choices: Ints, batches: Ints, tried: Tried) -> Worth:
        """Costs of the slowest member, room of the smallest, compute and lines of all.

        Of a context group, the room is the mean, if all have some.
        """
        sizes = self.splits.largest[tried.splits]
        members = [
            member.of_choices(choices, batches, sizes, seconds)
            for member, seconds in zip(self._members, tried.seconds, strict=True)
        ]
        costs, rooms, compute_s, optimizers = zip(*members, strict=True)
        room: Floats = reduce(np.minimum, rooms)
        if self._is_shared:
            room = np.where(room < 0, room, sum(rooms) / self.num_members)
        return Worth(
            reduce(np.maximum, costs),
            room,
            reduce(np.add, compute_s) * (self.num_members / len(members)),
            np.concatenate(optimizers, axis=1),
        )


def may_compute(
    groups: Sequence[GroupTimes],
    num_samples: int,
    most_s: float,
    left_s: float,
    least_s: Floats,
) -> bool:
    """Whether all groups together may compute so many, as of ``most_within``.

    It asks one group after the other, until those that were asked leave too few to the rest.
    """
    most = [each.count * each.num_batches * each.most(most_s) for each in groups]
    slack = sum(most) - num_samples
    for group, each in zip(groups, most, strict=True):
        if slack < 0:
            break
        slack -= each - group.most_within(most_s, left_s, least_s)
    return slack >= 0
