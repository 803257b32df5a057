"""Fully sharded data parallelism for GPUs that are not alike.

The public names are imported when first used, so that ``import shardhet`` stays light and
the planning side never touches torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardhet.cluster import DeviceSpec
    from shardhet.fsdp import HetFSDP
    from shardhet.plan import Plan, RankPlan

_MODULE_BY_NAME = {
    "DeviceSpec": "shardhet.cluster",
    "HetFSDP": "shardhet.fsdp",
    "Plan": "shardhet.plan",
    "RankPlan": "shardhet.plan",
}

__all__ = ["DeviceSpec", "HetFSDP", "Plan", "RankPlan"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'shardhet' has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)
