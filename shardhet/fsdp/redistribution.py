"""Moves the rows of a HetFSDP among running ranks, from one plan to another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardhet.comm.collectives import all_gather_uneven
from shardhet.comm.on_host.memory import available_bytes
from shardhet.fsdp.module import HetFSDP
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.host_room import FlatKind, HostRoom
from shardhet.fsdp.sharding.residence import check_resident_units
from shardhet.records.cluster import DeviceSpec
from shardhet.records.layout import FlatLayout, cut_by_shares
from shardhet.records.plan import Plan


@dataclass(frozen=True, slots=True)
class FlatMove:
    """A flat tensor and its layout under the new plan."""

    unit_fqn: str
    flat: FlatTensor
    layout: FlatLayout
    on_host: bool  # this rank's rows, under the new plan

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
    if plan.stages or before.stages:
        return (
            "plan: this one or the next one has stages, between which rows cannot move yet. "
            "Save a checkpoint and load it under the other plan."
        )
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
    if plan.units and plan.units != before.units:
        return "plan: it was made for another model. Run the planner on this one."
    units = model._runtime.all_units
    frozen = [unit.fqn for unit in units if any(not flat.is_trainable for flat in unit.flats)]
    try:
        check_resident_units(plan, frozen, [unit.fqn for unit in units])
    except ValueError as error:
        return str(error)
    with_grad = [fqn for fqn, param in model.named_parameters() if param.grad is not None]
    if with_grad:
        return (
            f"gradients: {with_grad[0]} and {len(with_grad) - 1} more have one, which would "
            "not move. Call it between steps, after optimizer.zero_grad()."
        )
    runtime = model._runtime
    if (
        runtime.step.awaits_backward
        or runtime.rounds.have_begun
        or runtime.calls.outside_of_steps is not None
    ):
        return "a step is in progress. Call it after model.backward, outside of unit_by_unit."
    return None


def room_under(model: HetFSDP, plan: Plan, num_moments: int) -> HostRoom | None:
    """The room of this rank's host under ``plan``; what is there now will be given back."""
    if not any(rank.optimizer_on_host for rank in plan.ranks):
        return None
    comm, has_bytes = model._comm, available_bytes()
    if has_bytes is not None and comm.host_room is not None:
        has_bytes += comm.host_room.bytes_with(num_moments)
    flats = [flat for unit in model._runtime.all_units for flat in unit.flats]
    return HostRoom.of(
        plan,
        [move.layout for move in moves(model, plan)],
        [FlatKind(flat.orig_dtype, flat.is_trainable) for flat in flats],
        nodes=comm.nodes,
        position=model.position,
        has_bytes=has_bytes,
    )


def moves(model: HetFSDP, plan: Plan) -> Iterator[FlatMove]:
    """Every flat tensor with its next layout, unit by unit."""
    flats = [(unit.fqn, flat) for unit in model._runtime.all_units for flat in unit.flats]
    uncut = [FlatLayout.of_shapes([slot.shape for slot in flat.slots]) for _, flat in flats]
    layouts: Sequence[FlatLayout] = cut_by_shares(uncut, plan.state_shares)
    on_host = plan.ranks[model.position].optimizer_on_host
    for (fqn, flat), layout in zip(flats, layouts, strict=True):
        yield FlatMove(fqn, flat, layout, on_host)


def follow(model: HetFSDP, plan: Plan, room: HostRoom | None) -> None:
    """Compute as ``plan`` says from the next step on; the rows have been moved."""
    model._comm.host_room = room
    model._comm.buffers.release()  # of the sizes of the plan before
    model._comm.follow(plan, model._control)
    model._runtime.follow(plan, model.batches_per_step)
    model.plan = replace(plan, units=model.plan.units)
