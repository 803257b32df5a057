"""A plan with a proof of how good it is."""

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from shardhet.records.plan import Plan

if TYPE_CHECKING:
    from shardhet.pricing.step_cost import StepCost  # imports numpy


class PlanError(ValueError):
    """No plan exists; the message carries the nearest miss."""

    def __init__(self, message: str, *, lower_bound_s: float = inf) -> None:
        """``lower_bound_s`` holds for plans that may exist all the same; inf if none does."""
        super().__init__(message)
        self.lower_bound_s = lower_bound_s


class NoRoomForRowsError(PlanError):
    """Shares of any size would fit, but none were found that fit after rounding to rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSolution:
    """The best plan found, its predicted cost, and a bound that no plan can beat."""

    plan: Plan
    predicted: "StepCost"  # of the plan as it will run: shares rounded to rows
    # Of the step time of any plan among the candidates in which all devices take part, or those
    # that do in this one.
    lower_bound_s: float
    fastest_s: float | None = None  # the step of the fastest plan, if another was preferred
    optimizer_bound_s: float = (
        0.0  # with whole matrices: no owners beside these batches beat it
    )

    @property
    def relative_gap(self) -> float:
        """(predicted step time - bound) / bound; 0 where the plan is proven optimal."""
        return max(0.0, self.predicted.step_time_s / self.lower_bound_s - 1)

    @property
    def fits(self) -> bool:
        """Whether every device stays within its budget."""
        return all(rank.fits for rank in self.predicted.distinct_ranks)

    @property
    def places(self) -> tuple[int, ...]:
        """The positions of the plan's devices in the cluster."""
        return tuple(range(self.plan.world_size))

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.plan.global_batch_size / self.predicted.step_time_s
