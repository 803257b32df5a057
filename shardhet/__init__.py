"""Fully sharded data parallelism for GPUs that are not alike.

The public names are imported when first used, so that ``import shardhet`` stays light and
the planning side never touches torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardhet.checkpoint import redistribute
    from shardhet.comm.channel import phase
    from shardhet.comm.liveness.watch import watch_ranks
    from shardhet.fsdp import HetFSDP
    from shardhet.fsdp.microbatch.loss import mean_of_samples
    from shardhet.fsdp.step.calls import gather_features
    from shardhet.planner import PlanError, find_plan
    from shardhet.pricing.setting import Setting
    from shardhet.profiler.batch import ExampleBatch
    from shardhet.profiler.describe import describe, plan_for
    from shardhet.records.cluster import Cluster, DeviceSpec
    from shardhet.records.plan import Plan, RankPlan
    from shardhet.records.profiles import Profile
    from shardhet.records.stages import Stage
    from shardhet.records.workload import Workload
    from shardhet.simulator.simulation import simulate
    from shardhet.training.dealing.loader import PlanSampler, loader
    from shardhet.training.guard import Guard
    from shardhet.training.hooks.bad_steps import OnBadStep
    from shardhet.training.hooks.checkpoints import SaveCheckpoints
    from shardhet.training.hooks.hooks import After, EndNotice, Hook, Hooks, Trace
    from shardhet.training.rebalancing import Predicted, Rebalancer

_MODULE_BY_NAME = {
    "After": "shardhet.training.hooks.hooks",
    "Cluster": "shardhet.records.cluster",
    "DeviceSpec": "shardhet.records.cluster",
    "EndNotice": "shardhet.training.hooks.hooks",
    "ExampleBatch": "shardhet.profiler.batch",
    "HetFSDP": "shardhet.fsdp",
    "Guard": "shardhet.training.guard",
    "Hook": "shardhet.training.hooks.hooks",
    "Hooks": "shardhet.training.hooks.hooks",
    "OnBadStep": "shardhet.training.hooks.bad_steps",
    "Plan": "shardhet.records.plan",
    "PlanError": "shardhet.planner",
    "PlanSampler": "shardhet.training.dealing.loader",
    "Predicted": "shardhet.training.rebalancing",
    "Profile": "shardhet.records.profiles",
    "RankPlan": "shardhet.records.plan",
    "Rebalancer": "shardhet.training.rebalancing",
    "SaveCheckpoints": "shardhet.training.hooks.checkpoints",
    "Setting": "shardhet.pricing.setting",
    "Stage": "shardhet.records.stages",
    "Trace": "shardhet.training.hooks.hooks",
    "Workload": "shardhet.records.workload",
    "describe": "shardhet.profiler.describe",
    "find_plan": "shardhet.planner",
    "gather_features": "shardhet.fsdp.step.calls",
    "loader": "shardhet.training.dealing.loader",
    "mean_of_samples": "shardhet.fsdp.microbatch.loss",
    "phase": "shardhet.comm.channel",
    "plan_for": "shardhet.profiler.describe",
    "redistribute": "shardhet.checkpoint",
    "simulate": "shardhet.simulator.simulation",
    "watch_ranks": "shardhet.comm.liveness.watch",
}

__all__ = [
    "After",
    "Cluster",
    "DeviceSpec",
    "EndNotice",
    "ExampleBatch",
    "Guard",
    "HetFSDP",
    "Hook",
    "Hooks",
    "OnBadStep",
    "Plan",
    "PlanError",
    "PlanSampler",
    "Predicted",
    "Profile",
    "RankPlan",
    "Rebalancer",
    "SaveCheckpoints",
    "Setting",
    "Stage",
    "Trace",
    "Workload",
    "describe",
    "find_plan",
    "gather_features",
    "loader",
    "mean_of_samples",
    "phase",
    "plan_for",
    "redistribute",
    "simulate",
    "watch_ranks",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return import_module("shardhet.checkpoint")
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'shardhet' has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)
