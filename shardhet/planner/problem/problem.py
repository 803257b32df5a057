"""The assignment problem behind a plan: devices in groups, candidates, one batch, one state.

Devices that must do the same count as one device, with the sum of their batches and rooms and
the cost of the slowest.

Devices of a group are interchangeable.  Each takes one candidate c: a batch b_c, a cost
t_dc in every phase d, and the room a_c that it leaves for state.  With n_gc the number
of devices of group g that take candidate c, and s their shares of the state,

    minimise    sum_d T_d + T_optimizer + fixed
    such that   T_d >= t_dc                 wherever n_gc > 0
                T_optimizer >= o_c(s)       on every device
                T_optimizer >= the time of devices whose exact share is demanded
                sum n_gc b_c = B,   sum s = S,   s <= a_c,   sum_c n_gc = N_g

S is the state without these exact shares.  o_c(s) is o_g s, or where candidates of a group
differ the most of several lines.

Given which candidates are used, T_d and T_optimizer follow (``Problem.evaluate``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
AT_ONCE = 1e30  # elements per second of an optimizer that takes no time, where others differ


@dataclass(frozen=True)
class Group:
    """Interchangeable devices, or sets of equal devices, and the candidates of each."""

    count: int
    batch: Ints  # [C] samples
    costs: Floats  # [D, C] seconds
    room: Floats  # [C] elements of state that fit besides it; never negative
    optimizer_s_per_numel: float
    num_members: int = 1  # devices in each of the ``count`` sets
    num_batches: int = 1  # of these devices together; those of a context group have one
    # [C] seconds of compute that no communication hides; None: the sum of the costs
    compute_s: Floats | None = None
    # [2, K, C] lines r and a, where candidates differ: in T seconds the optimizer updates what
    # is least of r T + a
    own_optimizer: Floats | None = None

    @property
    def optimizer(self) -> Floats:
        """The lines [2, K, C] of the optimizer, or [2, 1, 1] if candidates do not differ."""
        if self.own_optimizer is not None:
            return self.own_optimizer
        per_numel = self.optimizer_s_per_numel
        return np.array([[[1 / per_numel if per_numel > 0 else inf]], [[0.0]]])

    def sorted(self) -> tuple["Group", Ints]:
        """The group with the largest batch first, then the most room; and the permutation."""
        order = np.lexsort((-self.room, -self.batch))
        return self.only(order), order

    def only(self, candidates: Ints) -> "Group":
        """The group with these candidates, in this order."""
        return replace(
            self,
            batch=self.batch[candidates],
            costs=self.costs[:, candidates],
            room=self.room[candidates],
            compute_s=_of(self.compute_s, candidates),
            own_optimizer=_of(self.own_optimizer, candidates),
        )


def _of(values: Floats | None, candidates: Ints) -> Floats | None:
    return None if values is None else values[..., candidates]


@dataclass(frozen=True, slots=True)
class Choice:
    """``count`` devices of a group take one candidate."""

    group: int
    candidate: int
    count: int


@dataclass(frozen=True, slots=True)
class Value:
    """What a choice for every device costs."""

    objective_s: float
    phases_s: tuple[float, ...]
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What a choice must stay within."""

    phases_s: tuple[float, ...]
    optimizer_s: float = inf
    totals_s: Floats | None = None  # [G, C] the least sum of phases if a candidate is used
    total_s: float = inf  # candidates with larger totals are not allowed


@dataclass(frozen=True)
class Problem:
    """All groups, padded to matrices [G, C] with rows in the order of ``Group.sorted``."""

    groups: tuple[Group, ...]
    global_batch_size: int
    state_numel: float  # S
    fixed_s: float = 0.0
    row_numel: float = 0.0  # that rounding to rows may take of a device's room
    fixed_optimizer_s: float = 0.0  # for exact shares that are demanded

    @property
    def num_phases(self) -> int:
        """D, the number of phases."""
        return self.groups[0].costs.shape[0]

    @cached_property
    def counts(self) -> Floats:
        """[G] devices in each group."""
        return np.array([group.count for group in self.groups], dtype=np.float64)

    @cached_property
    def batch(self) -> Floats:
        """[G, C] samples; 0 where padded."""
        return self._padded([group.batch.astype(np.float64) for group in self.groups], 0.0)

    @cached_property
    def room(self) -> Floats:
        """[G, C] elements; 0 where padded."""
        return self._padded([group.room for group in self.groups], 0.0)

    @cached_property
    def costs(self) -> tuple[Floats, ...]:
        """D times [G, C] seconds; inf where padded, so that no limit allows it."""
        return tuple(
            self._padded([group.costs[d] for group in self.groups], np.inf)
            for d in range(self.num_phases)
        )

    @cached_property
    def compute_s(self) -> Floats:
        """[G, C] seconds of compute; inf where padded."""
        rows = [
            group.costs.sum(axis=0) if group.compute_s is None else group.compute_s
            for group in self.groups
        ]
        return self._padded(rows, np.inf)

    @cached_property
    def optimizer(self) -> Floats:
        """[2, K, G, C], or [2, 1, G, 1] if candidates do not differ: lines as those of groups;
        r is inf where the optimizer is not counted.
        """
        lines = [group.optimizer for group in self.groups]
        width = self.batch.shape[1] if self.optimizers_differ else 1
        found = np.zeros((2, max(each.shape[1] for each in lines), len(lines), width))
        for g, (group, own) in enumerate(zip(self.groups, lines, strict=True)):
            rows = found[:, :, g, : len(group.batch)]
            rows[:] = own[:, :1]  # again, if others have more lines
            rows[:, : own.shape[1]] = own
        return found

    @property
    def optimizers_differ(self) -> bool:
        """Whether those of one group's candidates do."""
        return any(group.own_optimizer is not None for group in self.groups)

    @cached_property
    def counts_optimizer(self) -> bool:
        """Whether the optimizer takes time on any device."""
        return bool(np.isfinite(self.optimizer[0]).any())

    def numels_within(self, group: int, optimizer_s: float) -> Floats:
        """[C] or [1] elements that a device of the group can update in this time."""
        return _updated(self.optimizer[:, :, group], optimizer_s)

    @cached_property
    def least_optimizer_s(self) -> float:
        """The optimizer's time if memory did not limit it, and compute hid all copies."""
        rate, ahead = self.optimizer
        at_first = np.where(ahead > 0, inf, rate).min(axis=0)
        rates = float(self.counts @ at_first.max(axis=1))
        return max(self.fixed_optimizer_s, self.state_numel / rates)

    @cached_property
    def parts(self) -> tuple[Floats, Floats]:
        """[K, G, C] elements a and rates r: in T seconds a device updates sum min(a, T r)."""
        if not self.optimizers_differ:
            return self.room[None], np.broadcast_to(self.optimizer[0], (1, *self.room.shape))
        return _parts(self.room, np.minimum(self.optimizer, AT_ONCE))

    def rounded(self) -> "Problem":
        """The problem with all room reduced by what rounding to rows may take."""
        groups = tuple(
            replace(
                group, room=np.maximum(0.0, group.room - self.row_numel * group.num_members)
            )
            for group in self.groups
        )
        return replace(self, groups=groups, row_numel=0.0)

    def within(self, limits: Sequence[float]) -> tuple["Problem", tuple[Ints, ...]]:
        """The problem without candidates beyond the limits, and the indices of the rest."""
        kept = tuple(
            np.flatnonzero((group.costs <= np.array(limits)[:, None]).all(axis=0))
            for group in self.groups
        )
        return self.only(kept), kept

    def only(self, kept: Sequence[Ints]) -> "Problem":
        """The problem with these candidates of each group."""
        groups = tuple(group.only(k) for group, k in zip(self.groups, kept, strict=True))
        return replace(self, groups=groups)

    def in_common_parts(self) -> "Problem":
        """The problem with samples counted in the largest part that divides all batches."""
        batches = [group.batch for group in self.groups]
        part = int(np.gcd.reduce(np.concatenate([*batches, [self.global_batch_size]])))
        groups = [replace(each, batch=each.batch // part) for each in self.groups]
        whole = self.global_batch_size // part
        return replace(self, groups=tuple(groups), global_batch_size=whole)

    def allowed(self, limits: Limits) -> Bools:
        """[G, C] which candidates stay within the limits."""
        allowed = self.costs[0] <= limits.phases_s[0]
        for cost, limit in zip(self.costs[1:], limits.phases_s[1:], strict=True):
            allowed &= cost <= limit
        if limits.totals_s is not None:
            allowed &= limits.totals_s <= limits.total_s
        return allowed

    def room_within(self, limits: Limits) -> Floats:
        """[G, C] room that the optimizer can update within its limit."""
        if limits.optimizer_s == inf or not self.counts_optimizer:
            return self.room
        return np.minimum(self.room, _updated(self.optimizer, limits.optimizer_s))

    def has_room(self, choices: Sequence[Choice], limits: Limits) -> bool:
        """Whether the state fits besides the choices and the optimizer stays in its limit."""
        room = self.room_within(limits)
        total = sum(each.count * room[each.group, each.candidate] for each in choices)
        return bool(total >= self.state_numel)

    def least_phases_s(self) -> tuple[float, ...]:
        """A lower bound on each phase, as if memory were unlimited and samples divisible.

        Within T_d a device of group g computes at most T_d max_c b_c / t_dc samples.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = [np.where(self.batch > 0, self.batch / cost, 0.0) for cost in self.costs]
        return tuple(
            self.global_batch_size / float(self.counts @ rate.max(axis=1)) for rate in rates
        )

    def totals_above(self, min_s: Sequence[float]) -> Floats:
        """[G, C] sum over phases of max(least, cost): a bound on steps that use a candidate."""
        totals = np.zeros_like(self.batch)
        for cost, least in zip(self.costs, min_s, strict=True):
            totals += np.maximum(cost, least)
        return totals

    def _padded(self, rows: Sequence[Floats], filler: float) -> Floats:
        width = max(len(row) for row in rows)
        matrix = np.full((len(rows), width), filler)
        for i, row in enumerate(rows):
            matrix[i, : len(row)] = row
        return matrix

    def phases_of(self, choices: Sequence[Choice]) -> tuple[float, ...]:
        """The time of every phase under a choice."""
        group = [choice.group for choice in choices]
        candidate = [choice.candidate for choice in choices]
        return tuple(float(cost[group, candidate].max()) for cost in self.costs)

    def evaluate(self, choices: Sequence[Choice]) -> Value | None:
        """The exact objective of a choice; None if the state does not fit."""
        group = [choice.group for choice in choices]
        candidate = [choice.candidate for choice in choices]
        number = np.array([choice.count for choice in choices], dtype=np.float64)
        if float(number @ self.room[group, candidate]) < self.state_numel:
            return None
        room, rate = (each[:, group, candidate] for each in self.parts)
        number = np.tile(number, len(room))
        # Parts are as much as the room, up to rounding.
        demand = min(self.state_numel, float(number @ room.ravel()))
        optimizer_s = fill_level(room.ravel(), rate.ravel(), number, demand)
        optimizer_s = max(optimizer_s, self.fixed_optimizer_s)
        phases = self.phases_of(choices)
        return Value(sum(phases) + optimizer_s + self.fixed_s, phases, optimizer_s)


def _updated(lines: Floats, optimizer_s: float) -> Floats:
    """[...] elements that optimizers of these lines [2, K, ...] update in this time."""
    rate, ahead = lines
    found = np.full(rate.shape, inf)  # where the optimizer takes no time
    if optimizer_s < inf:
        np.multiply(rate, optimizer_s, out=found, where=np.isfinite(rate))
        found += ahead
    least: Floats = found.min(axis=0)
    return least


def _parts(room: Floats, lines: Floats) -> tuple[Floats, Floats]:
    """``Problem.parts``, of lines [2, K, ...] and the room [...].

    The room is one more line, of rate 0.  Lines are sorted by falling rate. The minimum of the
    lines moves from line i to a later one where that becomes lower; the rate drops by the
    difference of both.  If it leaves that one at once, too, it loses both differences.
    """
    order = np.argsort(-lines[0], axis=0, kind="stable")
    nothing = np.zeros((1, *room.shape))
    rate, ahead = (np.take_along_axis(each, order, axis=0) for each in lines)
    rate, ahead = np.concatenate((rate, nothing)), np.concatenate((ahead, room[None]))
    with np.errstate(divide="ignore", invalid="ignore"):  # of parallel lines
        met_s = (ahead - ahead[:, None]) / (rate[:, None] - rate)  # [K + 1, K + 1, ...]
        left_s = [met_s[:i, i:].max(axis=0).min(axis=0) for i in range(1, len(rate))]
    lost = rate[:-1] - rate[1:]
    return np.multiply(lost, left_s, out=np.zeros(lost.shape), where=lost > 0), lost


def fill_level(room: Floats, rate: Floats, number: Floats, demand: float) -> float:
    """The least u with  sum_j number_j min(room_j, u rate_j) >= demand;  inf if there is none.

    The left side is concave and piecewise linear in u, with kinks at room_j / rate_j.
    """
    if float(number @ room) < demand:
        return inf
    is_free = np.isinf(rate)
    if is_free.any() or not rate.all():
        demand -= float(number[is_free] @ room[is_free])
        is_paid = ~is_free & (rate > 0)
        room, rate, number = room[is_paid], rate[is_paid], number[is_paid]
    if demand <= 0 or not len(room):
        return 0.0
    kinks = room / rate
    order = np.argsort(kinks, kind="stable")
    full = np.concatenate(([0.0], np.cumsum((number * room)[order])))
    rates = np.concatenate((np.cumsum((number * rate)[order][::-1])[::-1], [0.0]))
    # Between kink i-1 and kink i: those before i are full, the others take u rate_j.
    reached = full[1:] + kinks[order] * rates[1:]
    i = min(int(np.searchsorted(reached, demand)), len(kinks) - 1)
    return float((demand - full[i]) / rates[i])
