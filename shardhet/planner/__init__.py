"""The best plan: what each device may do, a search with a proof, simpler planners beside it."""

from shardhet.planner.demands import Demands, DeviceLimits
from shardhet.planner.find import find_plan, solve
from shardhet.planner.search import Effort
from shardhet.planner.solution import PlanError, PlanSolution

__all__ = [
    "Demands",
    "DeviceLimits",
    "Effort",
    "PlanError",
    "PlanSolution",
    "find_plan",
    "solve",
]
