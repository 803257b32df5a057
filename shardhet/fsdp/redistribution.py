"""Moves the rows of a HetFSDP among running ranks, from one plan to another."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from shardhet.comm.collectives import whole_of
from shardhet.comm.devices import available_bytes
from shardhet.fsdp.module import HetFSDP
from shardhet.fsdp.sharding.build import ROOT_FQN, cut_by_plan
from shardhet.fsdp.sharding.comm import CommContext, FlatKind, HostRoom
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.persistence import check_resident_units
from shardhet.fsdp.stages.channels import check_names
from shardhet.records.cluster import DeviceSpec
from shardhet.records.layout import FlatLayout
from shardhet.records.plan import Plan
from shardhet.records.stages import stage_by_unit


@dataclass(frozen=True, slots=True)
class FlatMove:
    """A flat tensor and its layout under the new plan."""

    unit_fqn: str
    flat: FlatTensor
    comm: CommContext  # that it is gathered over from now on
    layout: FlatLayout
    on_host: bool  # this rank's rows, under the new plan

    def whole(self, shard: Tensor, model: HetFSDP) -> Tensor:
        """All ranks' ``shard``s, [numel], in the order of the new layout.  Collective."""
        before = self.flat.layout
        whole = whole_of(shard, before.shard_numels, model._comm.all_gather_channel)
        if before.param_spans == self.layout.param_spans:
            return whole
        moved = whole.new_zeros(self.layout.numel)
        for old, new in zip(before.param_spans, self.layout.param_spans, strict=True):
            moved[new.start : new.stop] = whole[old.start : old.stop]
        return moved


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
    if plan.context_groups is not None and model._skeleton is None:
        return (
            "plan: it has context groups, and the one that the model was wrapped with has "
            "none. Wrap the model with a plan that has some."
        )
    if (reason := _why_other_units(model, plan)) is not None:
        return reason
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


def _why_other_units(model: HetFSDP, plan: Plan) -> str | None:
    """Why the units cannot be cut into the stages of ``plan``, or be without stages."""
    if (plan.stages is None) != (model.plan.stages is None) and (found := _shared(model)):
        return found
    if plan.stages is not None:
        if model.beyond_stages:
            return (
                f"plan: it has stages, but the model has {model.beyond_stages[0]}, which they "
                "cannot have yet. Give it a plan without stages."
            )
        try:
            check_names(plan.stages, model.module)
            stage_by_unit(plan.stages, [unit.fqn for unit in model._runtime.units])
        except ValueError as error:
            return str(error)
    return None


def _shared(model: HetFSDP) -> str | None:
    """Why units are others with stages than without: some share a parameter."""
    runtime = model._runtime
    fqn_by_module = {
        inner: each.fqn
        for unit in runtime.units
        for each in unit.modules
        for inner in each.module.modules()
    }
    for slot in (slot for unit in runtime.all_units for slot in unit.slots):
        owners = {owner for owner, _ in slot.owners} & fqn_by_module.keys()
        fqns = sorted({fqn_by_module[owner] for owner in owners})
        if len(fqns) > 1:
            return (
                f"plan: units {', '.join(fqns)} share {slot.fqn}, so they are one "
                "unit without stages and several with them. Save a checkpoint and load it "
                "under the other plan."
            )
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
        [move.layout for move in moves(model, plan, comm)],
        [FlatKind(flat.orig_dtype, flat.is_trainable) for flat in flats],
        nodes=comm.nodes,
        position=model.position,
        has_bytes=has_bytes,
    )


def moves(model: HetFSDP, plan: Plan, of_units: CommContext) -> Iterator[FlatMove]:
    """Every flat tensor with its next layout, unit by unit.

    ``of_units`` is what all units but the root are gathered over.
    """
    runtime = model._runtime
    flats = [(unit.fqn, flat) for unit in runtime.all_units for flat in unit.flats]
    uncut = [FlatLayout.of_shapes([slot.shape for slot in flat.slots]) for _, flat in flats]
    numbers = {unit.fqn: len(unit.flats) for unit in runtime.all_units}
    layouts = cut_by_plan(uncut, numbers, plan)
    on_host = plan.ranks[model.position].optimizer_on_host
    for (fqn, flat), layout in zip(flats, layouts, strict=True):
        comm = model._comm if fqn == ROOT_FQN else of_units
        yield FlatMove(fqn, flat, comm, layout, on_host)


def follow(model: HetFSDP, plan: Plan, of_units: CommContext, room: HostRoom | None) -> None:
    """Compute as ``plan`` says from the next step on; the rows have been moved.  Collective."""
    before = model.plan
    model._comm.host_room = room
    model._comm.buffers.release()  # of the sizes of the plan before
    model._comm.follow(plan, model._control)
    if plan.stages is None and before.stages is None:
        model._runtime.follow(plan, model.batches_per_step)
    else:
        for unit in model._runtime.units:
            unit.gather_over(of_units)
        model.compute_by(plan, of_units)
    model.plan = replace(plan, units=before.units)
