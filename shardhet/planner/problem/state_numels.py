"""The state to distribute, in elements: what constraints fix of it, and what rows may add."""

from dataclasses import dataclass

from shardhet.planner.problem.constraints import Constraints
from shardhet.pricing.cost import CostModel
from shardhet.records.workload import Workload

ROUNDING = 1e-12  # of sums of shares


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNumels:
    """Elements of the state of a model, as the planner distributes them over a cluster."""

    whole: float
    row: float  # that a device may get beyond its share when shares are rounded to rows
    slack: float  # of a demanded share, within which it counts as met
    by_demand: dict[int, float]  # exact, by position
    even: float | None  # of a device, at most, if all are to store the same up to rows
    rest: float  # beside what is demanded

    @classmethod
    def of(
        cls,
        model: CostModel,
        constraints: Constraints,
        *,
        row_part: float = 1.0,
        is_relaxed: bool = False,
    ) -> "StateNumels":
        """``row_part`` is the part that is left of the room that rounding to rows may take.

        With ``is_relaxed``, demanded shares may be met to within rows, as plans meet them.
        """
        world_size = model.cluster.world_size
        whole = float(sum(layout.numel for layout in model.workload.layouts()))
        row = row_part * row_numel(model.workload)
        slack = row if is_relaxed else 0.0
        shares = constraints.state_shares(world_size)
        fixed = whole * sum(shares.values())
        rest = whole - fixed
        if constraints.has_even_state or fixed:
            # These shares sum to the state only up to rounding.
            rest = max(0.0, rest - (ROUNDING * whole + slack * len(shares)))
        even = None
        if constraints.has_even_state:
            even = float(max(model.stored_numels([1 / world_size] * world_size)))
        return cls(
            whole=whole,
            row=row,
            slack=slack,
            by_demand={i: share * whole for i, share in shares.items()},
            even=even,
            rest=rest,
        )


def row_numel(workload: Workload) -> float:
    """Elements that a device may get beyond its share when shares are rounded to rows."""
    return 2.0 * max(kind.max_row_numel for kind in workload.kinds)
