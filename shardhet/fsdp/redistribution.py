"""Moves the rows of a HetFSDP among running ranks, from one plan to another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardhet.comm.collectives import all_gather_uneven
from shardhet.fsdp.module import HetFSDP
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.records.cluster import DeviceSpec
from shardhet.records.layout import FlatLayout, cut_by_shares
from shardhet.records.plan import Plan


@dataclass(frozen=True, slots=True)
class FlatMove:
    """A flat tensor and its layout under the new plan."""

    unit_fqn: str
    flat: FlatTensor
    layout: FlatLayout

    def whole(self, shard: Tensor, model: HetFSDP) -> Tensor:
        """All ranks' ``shard``s in the present layout, end to end: [numel].  Collective."""
        channel = model._comm.gather_channel
        whole = torch.empty(self.layout.numel, dtype=shard.dtype, device=shard.device)
        gather = all_gather_uneven(
            whole,
            shard,
            self.flat.layout.shard_numels,
            channel=channel,
            receivers=range(channel.world_size),
        )
        gather.wait()
        gather.wait_sent()  # the shard may be freed then
        return whole


def why_not(model: HetFSDP, plan: Plan) -> str | None:
    """Why ``model`` cannot follow ``plan`` as it is now; None if it can."""
    before = model.plan
    if plan.world_size != before.world_size:
        return (
            f"plan: it is for {plan.world_size} devices but {before.world_size} ranks are "
            "running. Save a checkpoint and start as many ranks as it needs."
        )
    for i, (new, old) in enumerate(zip(plan.ranks, before.ranks, strict=True)):
        if new.device not in (DeviceSpec(), old.device):
            return (
                f"plan: position {i} is for {new.device} but {old.device} in the plan that is "
                "followed now. Keep the devices in their positions, or leave them out."
            )
    if any(rank.optimizer_on_host for rank in plan.ranks):
        return "plan: it has optimizer_on_host, which cannot be followed yet. Leave it out."
    if any(rank.inputs_on_host for rank in plan.ranks):
        return "plan: it has inputs_on_host, which cannot be followed yet. Leave it out."
    if plan.units and plan.units != before.units:
        return "plan: it was made for another model. Run the planner on this one."
    with_grad = [fqn for fqn, param in model.named_parameters() if param.grad is not None]
    if with_grad:
        return (
            f"gradients: {with_grad[0]} and {len(with_grad) - 1} more have one, which would "
            "not move. Call it between steps, after optimizer.zero_grad()."
        )
    runtime = model._runtime
    if runtime.awaits_backward or runtime.rounds.have_begun or runtime.unit_by_unit is not None:
        return "a step is in progress. Call it after model.backward, outside of unit_by_unit."
    return None


def moves(model: HetFSDP, plan: Plan) -> Iterator[FlatMove]:
    """Every flat tensor with its next layout, unit by unit."""
    units = (*model._runtime.units, model._runtime.root)
    flats = [(unit.fqn, flat) for unit in units for flat in unit.flats]
    uncut = [FlatLayout.of_shapes([slot.shape for slot in flat.slots]) for _, flat in flats]
    layouts: Sequence[FlatLayout] = cut_by_shares(uncut, plan.state_shares)
    for (fqn, flat), layout in zip(flats, layouts, strict=True):
        yield FlatMove(fqn, flat, layout)


def follow(model: HetFSDP, plan: Plan) -> None:
    """Compute as ``plan`` says from the next step on; the rows have been moved."""
    model._comm.buffers.release()  # of the sizes of the plan before
    model._comm.follow(plan, model._control)
    model._runtime.follow(plan, model.batches_per_step)
    model.plan = replace(plan, units=model.plan.units)
