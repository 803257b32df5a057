"""What devices store and compute of matrices that each is whole on one of them.

The optimizer is taken to be Muon, whose step on a matrix of m x n elements, m <= n, is five
iterations of three products: 5 (4 m^2 n + 2 m^3) operations.  A device does them as fast as the
forward of the units that have most of the model's, at the largest microbatch that is known.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shardhet.records.layout import cut_by_shares
from shardhet.records.plan import Plan, is_matched
from shardhet.records.profiles import Profile
from shardhet.records.workload import UnitKind, Workload

ITERATIONS = 5
Matrices = Counter[tuple[int, ...]]  # how many of each shape


@dataclass(frozen=True, slots=True)
class OwnedState:
    """What each device stores, by position."""

    numels: list[int]
    matrices: list[Matrices] = field(default_factory=list)  # whole ones that are trained
    # Elements beyond its share: of some unit, which its buffers hold besides, and of units from
    # some one to the last, whose gradients come first.
    uneven: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)


def stored_whole(plan: Plan, workload: Workload) -> OwnedState:
    """What each device stores under a plan with whole matrices."""
    devices = range(plan.world_size)
    kinds = [workload.kind_of(unit) for unit in workload.units]
    are_whole = [is_matched(unit.fqn, plan.whole_matrices or ()) for unit in workload.units]
    owned = [rank.owned or () for rank in plan.ranks]
    cut = cut_by_shares(workload.layouts(), plan.state_shares, are_whole, owned)
    by_unit = np.array([layout.shard_numels for layout in cut], dtype=np.float64)
    numels = by_unit.sum(axis=0)
    more = by_unit - np.outer(by_unit.sum(axis=1), numels / numels.sum())
    more = more[[bool(unit.fqn) for unit in workload.units]]
    matrices = [Matrices() for _ in devices]
    for kind, layout, is_whole in zip(kinds, cut, are_whole, strict=True):
        for i in devices if is_whole else ():
            trained = (p for p in trained_matrices(kind) if layout.rows(p, i).numel)
            matrices[i].update(kind.param_shapes[p] for p in trained)
    uneven = more.max(axis=0, initial=0.0)
    early = np.cumsum(more[::-1], axis=0).max(axis=0, initial=0.0)
    counted = [np.ceil(each).astype(int).tolist() for each in (numels, uneven, early)]
    return OwnedState(counted[0], matrices, *counted[1:])


def trained_matrices(kind: UnitKind) -> list[int]:
    """Indices of the parameters that Muon takes."""
    trained = sorted(set(range(len(kind.param_shapes))) - set(kind.frozen_params))
    return [i for i in trained if len(kind.param_shapes[i]) == 2]


def operations(shape: tuple[int, ...]) -> float:
    """Of Muon's step on a matrix."""
    least, most = sorted(shape)
    return ITERATIONS * (4.0 * least**2 * most + 2.0 * least**3)


def seconds_per_operation(
    profile: Profile, workload: Workload, device_kind: str | None
) -> float:
    """Of a device's matrix products."""
    numbers = workload.num_units_by_kind
    kind = max(workload.kinds, key=lambda each: numbers[each.name] * each.forward_flops)
    points = profile.unit(device_kind, kind.name).points
    size = points[-1].microbatch_size
    return points[-1].forward.mean_s / max(1, kind.forward_flops * size)


def matrices_s(
    profile: Profile, workload: Workload, device_kind: str | None, matrices: Matrices
) -> float:
    """Seconds of Muon's step on these matrices."""
    total = sum(number * operations(shape) for shape, number in matrices.items())
    return total * seconds_per_operation(profile, workload, device_kind)
