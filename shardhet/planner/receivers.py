"""Which devices compute, where the time of collectives depends on it.

Direct messages of a gather go to the devices that compute, and come from those that store.
Let R devices hold shares s_i of the state, let K of them compute, and r_i be 1 where i does.
The unevenness of the busiest port is (``TurnPrices.unevenness``)

    u = max over i of  max( s_i (K - r_i),  r_i (1 - s_i) ) R / (R - 1).

So fewer devices that compute, each with more of the state, may communicate for less time, and
memory or constraints may force u above 1.  ``who_computes`` lists the sets of devices that may
compute, each with the least u that shares can reach.  Of the plans in which exactly these
compute and u is between a and b, none is better than one with collectives as with a, where

    computing devices store   1 - b (R - 1) / R  at least,   b (R - 1) / (R (K - 1))  at most,
    the others                                               b (R - 1) / (R K)        at most.

That is a search like any other, and the interval can be split (``Computing.halves``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Self

import numpy as np

from shardhet.planner.candidates.candidates import TableBuilder
from shardhet.planner.candidates.role_times import LinkShares
from shardhet.planner.problem.constraints import NO_LIMITS, Constraints, Role
from shardhet.planner.problem.problem import Bools, Floats
from shardhet.planner.problem.solution import PlanSolution
from shardhet.pricing.cost import CostModel
from shardhet.pricing.turns import Turns

MAX_SETS = 1024  # that are looked at
BISECTIONS = 60  # of the unevenness and of the level of shares
ROUNDING = 1e-9  # of shares


@dataclass(frozen=True, slots=True)
class Computing:
    """Plans in which one set of devices computes and unevenness is in an interval."""

    constraints: Constraints  # the others do not compute
    number: int  # of those that do
    unevenness: float  # no such plan has less
    bound_s: float  # nor a shorter step
    most_unevenness: float = inf

    @classmethod
    def every(cls, constraints: Constraints, world_size: int) -> Self:
        """All plans, priced as with even shares."""
        return cls(constraints, world_size, 1.0, 0.0)

    @classmethod
    def as_in(cls, solution: PlanSolution, constraints: Constraints, unevenness: float) -> Self:
        """Plans in which the same devices compute as in ``solution``."""
        computes = np.array([rank.rank_batch_size > 0 for rank in solution.plan.ranks])
        return cls(_without(constraints, ~computes), int(computes.sum()), unevenness, 0.0)

    def stored(self, world_size: int) -> LinkShares:
        """How much devices may store in such a plan."""
        if self.most_unevenness == inf:
            return LinkShares()
        passed = self.most_unevenness * (world_size - 1) / world_size
        most = passed / (self.number - 1) if self.number > 1 else inf
        return LinkShares(1 - passed, most, passed / self.number)

    def halves(self, between: float, bound_s: float) -> tuple["Computing", "Computing"]:
        """The plans with less unevenness, and those with more."""
        lower = replace(self, most_unevenness=between, bound_s=bound_s)
        return lower, replace(self, unevenness=between, bound_s=bound_s)


def depends_on_shares(model: CostModel) -> bool:
    """Whether collectives take another time if shares of the state are others."""
    collectives = model.profile.collectives
    weights = (collectives.gather_unevenness_weight, collectives.reduce_unevenness_weight)
    return model.cluster.world_size > 1 and any(weights)


def who_computes(builder: TableBuilder, constraints: Constraints) -> list[Computing] | None:
    """The sets of devices that may compute: as many as possible, then by their bounds.

    Devices of one role are interchangeable, so only their numbers matter.  None if there are
    more than ``MAX_SETS``.
    """
    model = builder.model
    options = [
        _numbers(len(equal_groups), constraints.rank_batch_size(equal_groups[0][0]))
        for equal_groups in builder.equal_groups
    ]
    if prod(map(len, options)) > MAX_SETS:
        return None
    shares = _PossibleShares(builder, constraints)
    turns_of: dict[float, Turns] = {}
    found = []
    for numbers in product(*options):
        computes = np.zeros(model.cluster.world_size, dtype=bool)
        for number, equal_groups in zip(numbers, builder.equal_groups, strict=True):
            for positions in equal_groups[:number]:
                computes[list(positions)] = True
        unevenness = shares.least_unevenness(computes)
        if unevenness == inf:
            continue
        if unevenness not in turns_of:
            turns_of[unevenness] = model.turns(unevenness=unevenness)
        bound_s = max(turns_of[unevenness].comm_s, builder.least_compute_s(numbers))
        found.append(
            Computing(
                _without(constraints, ~computes),
                int(computes.sum()),
                unevenness,
                bound_s + model.overhead_s,
            )
        )
    return [*found[:1], *sorted(found[1:], key=lambda each: each.bound_s)]


def _numbers(count: int, stated: int | None) -> list[int]:
    """How many of ``count`` equal devices may compute, the most first."""
    if stated is None:
        return list(range(count, -1, -1))
    return [count if stated else 0]


def _without(constraints: Constraints, idle: Bools) -> Constraints:
    """The constraints, and no samples for these devices."""
    limits = dict(constraints.limits)
    for position in np.flatnonzero(idle).tolist():
        limits[position] = replace(limits.get(position, NO_LIMITS), rank_batch_size=0)
    return replace(constraints, limits=limits)


class _PossibleShares:
    """What each device may store, if it computes and if it does not, as part of the model."""

    def __init__(self, builder: TableBuilder, constraints: Constraints) -> None:
        model, world_size = builder.model, builder.model.cluster.world_size
        self._total = builder.state.whole / model.workload.numel
        row = builder.state.row / model.workload.numel
        exact = constraints.state_shares(world_size)
        if constraints.has_even_state:
            exact = dict.fromkeys(range(world_size), 1 / world_size)
        self._low = np.zeros(world_size)
        self._high = np.zeros((2, world_size))  # without samples, with some
        known: dict[int, tuple[float, float]] = {}
        for i, role in enumerate(constraints.roles(model.cluster)):
            if id(role) not in known:
                known[id(role)] = (_room(builder, role, 0), _room(builder, role, 1))
            most = exact.get(i, role.limits.max_state_share)
            for computes, room in enumerate(known[id(role)]):
                cap = inf if most is None else most * self._total + row
                self._high[computes, i] = min(room / model.workload.numel, cap)
            if i in exact:
                self._low[i] = max(0.0, exact[i] * self._total - row)

    def least_unevenness(self, computes: Bools) -> float:
        """The least unevenness if these devices compute; inf if the state does not fit then."""
        high = np.where(computes, self._high[1], self._high[0])
        is_impossible = not computes.any() or bool((high < self._low).any())
        if is_impossible or high.sum() < self._total * (1 - ROUNDING):
            return inf
        return _bracket(computes, self._low, high, self._total)[0]


def _room(builder: TableBuilder, role: Role, batch: int) -> float:
    """The most elements that fit besides no sample or one; negative if not even these do."""
    choices = [
        each for each in builder.policies if role.host is not None or not each.optimizer_on_host
    ]
    room = builder.model.of_member(role.member).room_for_state(
        choices,
        role.device_kind,
        role.budget_bytes,
        batches=np.array([batch]),
        sizes=np.array([1]),
        host_bytes=role.host_bytes,
    )
    return float(room.max())


def least_uneven_shares(
    computes: Bools, room: Floats, demanded: Mapping[int, float]
) -> Floats | None:
    """Shares within room for the least unevenness, as even as it allows; None if none fit."""
    low, high = np.zeros(len(room)), np.minimum(room, 1.0)
    for position, share in demanded.items():
        low[position] = high[position] = share
    if not computes.any() or high.sum() < 1 - ROUNDING:
        return None
    least, most = _limits(_bracket(computes, low, high, 1.0)[1], computes, low, high)
    below, above = 0.0, 1.0
    for _ in range(BISECTIONS):
        level = (below + above) / 2
        is_less = np.clip(level, least, most).sum() < 1
        below, above = (level, above) if is_less else (below, level)
    shares = np.clip(above, least, most)
    return shares / shares.sum()


def _bracket(computes: Bools, low: Floats, high: Floats, total: float) -> tuple[float, float]:
    """An unevenness that no shares within these limits reach, and one that some do.

    Both are the most that there is if the limits leave nothing open.
    """

    def is_possible(unevenness: float) -> bool:
        least, most = _limits(unevenness, computes, low, high)
        is_open = bool((least <= most + ROUNDING).all())
        return is_open and least.sum() <= total + ROUNDING <= most.sum() + 2 * ROUNDING

    below, above = 0.0, 2.0 * len(computes)
    if is_possible(below):
        return below, below
    for _ in range(BISECTIONS):
        middle = (below + above) / 2
        below, above = (below, middle) if is_possible(middle) else (middle, above)
    return below, above


def _limits(
    unevenness: float, computes: Bools, low: Floats, high: Floats
) -> tuple[Floats, Floats]:
    """The least and the most that each device stores where no port is busier than this."""
    world_size, number = len(computes), int(computes.sum())
    passed = unevenness * (world_size - 1) / world_size
    with np.errstate(divide="ignore"):
        most = np.divide(passed, number - computes, where=number > computes, out=high + 1.0)
    return np.where(computes, np.maximum(low, 1 - passed), low), np.minimum(high, most)
