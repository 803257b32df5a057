"""Find the best plan: a search with a proof of optimality, and simpler planners to compare."""

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
