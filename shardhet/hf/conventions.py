"""transformers' own options for sharding at load time, as far as a plan supports them."""

from typing import Any

import torch
from transformers.distributed.configuration_utils import DistributedConfig

from shardhet.records.plan import Plan

# Each of these must be 1: larger sizes ask for another kind of parallelism.
ONES = ("tp_size", "dp_replicate_size", "pp_size", "ep_size")
NOTHINGS = ("tp_plan", "ep_plan", "enable_sequence_parallel", "fsdp_cpu_offload")


def options_of(config: DistributedConfig | None, plan: Plan) -> dict[str, Any]:
    """The options of HetFSDP equivalent to ``config``; raises ``ValueError`` for the rest."""
    if config is None:
        return {}
    for name in ONES:
        if getattr(config, name) not in (None, 1):
            raise ValueError(
                f"distributed_config: {name}={getattr(config, name)}, but a plan has data "
                f"parallelism alone. Leave {name} out."
            )
    for name in NOTHINGS:
        if getattr(config, name):
            raise ValueError(
                f"distributed_config: {name}={getattr(config, name)!r} cannot be had with a "
                f"plan. Leave {name} out."
            )
    if config.fsdp_size not in (None, 1, plan.world_size):
        raise ValueError(
            f"distributed_config: fsdp_size={config.fsdp_size} but the plan has "
            f"{plan.world_size} devices. Leave fsdp_size out, or make the two equal."
        )
    if config.fsdp_plan:
        raise ValueError(
            "distributed_config: fsdp_plan names modules by transformers' patterns. Pass "
            "units=[...] with classes or names instead."
        )
    if config.fsdp_mixed_precision:
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    return {}
