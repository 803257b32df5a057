"""Fully sharded data parallelism for GPUs that are not alike.

The public names are imported when first used, so that ``import shardhet`` stays light and
the planning side never touches torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` says that they are for users
    from shardhet.checkpoint import redistribute as redistribute
    from shardhet.comm.channel import may_take_long as may_take_long
    from shardhet.comm.liveness.watch import watch_ranks as watch_ranks
    from shardhet.fsdp import HetFSDP as HetFSDP
    from shardhet.fsdp.microbatch.loss import mean_of_samples as mean_of_samples
    from shardhet.fsdp.step.calls import gather_features as gather_features
    from shardhet.planner import PlanError as PlanError
    from shardhet.planner import find_plan as find_plan
    from shardhet.pricing.scenario import Scenario as Scenario
    from shardhet.profiler.batch import ExampleBatch as ExampleBatch
    from shardhet.profiler.describe import describe as describe
    from shardhet.profiler.describe import plan_for as plan_for
    from shardhet.records.cluster import Cluster as Cluster
    from shardhet.records.cluster import DeviceSpec as DeviceSpec
    from shardhet.records.plan import Plan as Plan
    from shardhet.records.plan import RankPlan as RankPlan
    from shardhet.records.profiles import Profile as Profile
    from shardhet.records.stages import Stage as Stage
    from shardhet.records.workload import Workload as Workload
    from shardhet.simulator.simulation import simulate as simulate
    from shardhet.training.dealing.loader import PlanSampler as PlanSampler
    from shardhet.training.dealing.loader import loader as loader
    from shardhet.training.guard import BadStepGuard as BadStepGuard
    from shardhet.training.hooks.bad_steps import OnBadStep as OnBadStep
    from shardhet.training.hooks.checkpoints import SaveCheckpoints as SaveCheckpoints
    from shardhet.training.hooks.hooks import After as After
    from shardhet.training.hooks.hooks import Hook as Hook
    from shardhet.training.hooks.hooks import Hooks as Hooks
    from shardhet.training.hooks.hooks import StopOnSignal as StopOnSignal
    from shardhet.training.hooks.hooks import Trace as Trace
    from shardhet.training.rebalancing import Predicted as Predicted
    from shardhet.training.rebalancing import Rebalancer as Rebalancer

_MODULE_BY_NAME = {
    "After": "shardhet.training.hooks.hooks",
    "Cluster": "shardhet.records.cluster",
    "DeviceSpec": "shardhet.records.cluster",
    "StopOnSignal": "shardhet.training.hooks.hooks",
    "ExampleBatch": "shardhet.profiler.batch",
    "HetFSDP": "shardhet.fsdp",
    "BadStepGuard": "shardhet.training.guard",
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
    "Scenario": "shardhet.pricing.scenario",
    "Stage": "shardhet.records.stages",
    "Trace": "shardhet.training.hooks.hooks",
    "Workload": "shardhet.records.workload",
    "describe": "shardhet.profiler.describe",
    "find_plan": "shardhet.planner",
    "gather_features": "shardhet.fsdp.step.calls",
    "loader": "shardhet.training.dealing.loader",
    "mean_of_samples": "shardhet.fsdp.microbatch.loss",
    "may_take_long": "shardhet.comm.channel",
    "plan_for": "shardhet.profiler.describe",
    "redistribute": "shardhet.checkpoint",
    "simulate": "shardhet.simulator.simulation",
    "watch_ranks": "shardhet.comm.liveness.watch",
}

__all__ = sorted(_MODULE_BY_NAME)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return import_module("shardhet.checkpoint")
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'shardhet' has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)
