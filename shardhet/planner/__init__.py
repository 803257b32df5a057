"""Find the best plan: a search with a proof of optimality, and simpler planners to compare."""

from shardhet.planner.find import find_plan, solve
from shardhet.planner.problem.demands import Demands, DeviceLimits
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.search.search import Effort

__all__ = [
    "Demands",
    "DeviceLimits",
    "Effort",
    "PlanError",
    "PlanSolution",
    "find_plan",
    "solve",
]
