"""Fully sharded data parallelism for GPUs that are not alike.

The public names are imported when first used, so that ``import shardhet`` stays light and
the planning side never touches torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardhet.cluster import Cluster, DeviceSpec
    from shardhet.fsdp import HetFSDP
    from shardhet.plan import Plan, RankPlan
    from shardhet.planner import PlanError, find_plan
    from shardhet.profiler.batch import ExampleBatch
    from shardhet.profiler.describe import describe
    from shardhet.profiles import Profile
    from shardhet.simulator import simulate
    from shardhet.workload import Workload

_MODULE_BY_NAME = {
    "Cluster": "shardhet.cluster",
    "DeviceSpec": "shardhet.cluster",
    "ExampleBatch": "shardhet.profiler.batch",
    "HetFSDP": "shardhet.fsdp",
    "Plan": "shardhet.plan",
    "PlanError": "shardhet.planner",
    "Profile": "shardhet.profiles",
    "RankPlan": "shardhet.plan",
    "Workload": "shardhet.workload",
    "describe": "shardhet.profiler.describe",
    "find_plan": "shardhet.planner",
    "simulate": "shardhet.simulator",
}

__all__ = [
    "Cluster",
    "DeviceSpec",
    "ExampleBatch",
    "HetFSDP",
    "Plan",
    "PlanError",
    "Profile",
    "RankPlan",
    "Workload",
    "describe",
    "find_plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'shardhet' has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)
