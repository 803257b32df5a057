"""How the ranks of stages communicate, and what a model in stages cannot do yet, by name.

They do within each stage, and across each cut.  On hosts all messages travel over gloo, in
groups of all ranks.  NCCL has a communicator for the ranks that compute in a stage, and one for
each cut and direction; all ranks make them in the order of stages, and use each at once, all
its ranks together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardhet.comm import devices
from shardhet.comm.calls import Messages
from shardhet.comm.channel import Channel
from shardhet.comm.groups import among_computing, part_of
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.unit import UnitModules, find_units
from shardhet.records.plan import Plan
from shardhet.records.stages import Nodes, Stage, relays


def find_units_by(
    plan: Plan,
    module: nn.Module,
    wanted: Sequence[type[nn.Module] | str] | None,
    loss_fn: Any,
) -> list[UnitModules]:
    """As ``find_units``; raises ``ValueError`` naming what stages cannot have."""
    is_merged = plan.stages is None
    units = find_units(module, wanted, keeps_last=loss_fn is not None, merges_tied=is_merged)
    _check_not_compiled(module, units)
    if plan.stages is None:
        return units
    check_names(plan.stages, module)
    for what in beyond_stages(module, units):
        refuse(what, is_there=True)
    return units


def _check_not_compiled(module: nn.Module, units: Sequence[UnitModules]) -> None:
    """Raise ``ValueError`` if a module around units is compiled, and so what units wait for."""
    of_units = {each for unit in units for each in unit.modules}
    for fqn, each in module.named_modules():
        is_compiled = each._compiled_call_impl is not None or hasattr(each, "_orig_mod")
        if is_compiled and any(inner in of_units for inner in each.modules() if inner != each):
            raise ValueError(
                f"HetFSDP: {repr(fqn) if fqn else 'the model'} is compiled around its units, "
                "whose gathers and microbatches torch cannot compile. Compile what is inside: "
                "shardhet.training.compiling.compile_units(module, device) before wrapping it."
            )


def beyond_stages(module: nn.Module, units: Sequence[UnitModules]) -> list[str]:
    """What a module has that stages cannot have, before its units are intercepted.

    What surrounds units runs in stages that have only a part of its values.
    """
    modules = list(module.modules())
    of_units = {each for unit in units for each in unit.modules}
    inside = {inner for each in of_units for inner in each.modules()}
    found = {
        "batch norm outside of units": any(
            isinstance(each, _BatchNorm) for each in modules if each not in inside
        ),
        "a forward that was replaced outside of units": any(
            "forward" in vars(each) for each in modules if each not in inside
        ),
        "a module around a unit's forward that is compiled": any(
            each._compiled_call_impl is not None
            for each in modules
            if each not in inside or each in of_units
        ),
    }
    return [what for what, is_there in found.items() if is_there]


def check_names(stages: Sequence[Stage], module: nn.Module) -> None:
    """Raise ``ValueError`` if a stage names what the model does not have."""
    known = [fqn for fqn, _ in module.named_modules(remove_duplicate=False)]
    for i, stage in enumerate(stages):
        missing = [each for each in stage.units if not any(fnmatchcase(f, each) for f in known)]
        if missing:
            raise ValueError(
                f"plan: stages[{i}] names {', '.join(map(repr, missing))}, which the model "
                "does not have. Name units of this model, or give it a plan that was made for "
                "it."
            )


def check_hooks(module: nn.Module) -> None:
    """Raise ``ValueError`` if a module has a backward hook, which would run in one stage, or in
    two, on gradients that are divided by the number of tokens later.
    """
    for fqn, each in module.named_modules():
        is_there = bool(each._backward_hooks or each._backward_pre_hooks)
        refuse(f"a backward hook of module {fqn!r}", is_there=is_there)


def refuse(what: str, *, is_there: bool, where: str = "HetFSDP") -> None:
    """Raise ``ValueError`` if it is there."""
    if is_there:
        raise ValueError(
            f"{where}: {what}, which a plan with stages cannot have yet. Leave it out, or give "
            "a plan without stages."
        )


def comm_of_units(plan: Plan, comm: CommContext, control: Channel) -> CommContext:
    """What units are gathered and reduced over: in stages, their ranks alone.  Collective.

    On hosts these are messages: the transport of ``comm`` would need all ranks for each call.
    """
    if plan.stages is None:
        return comm
    is_on_host = devices.is_on_host(comm.device)
    is_over_gloo = not is_on_host and not comm.host_runs_ahead
    refuse("tensors of an accelerator that gloo carries", is_there=is_over_gloo)
    gather, reduce = (
        replace(each, transport=None, levels=None)
        for each in (comm.all_gather_channel, comm.reduce_scatter_channel)
    )
    made = CommContext(comm.device, gather, reduce, comm.nodes)
    made.follow(plan, control)
    for each in plan.groups:
        relay_by_position = _relays_of(plan, each, comm.nodes)
        found = [
            among_computing(channel, relay_by_position, control=control, device=comm.device)
            for channel in (gather, reduce)
        ]
        if control.position in each:
            made.all_gather_channel, made.reduce_scatter_channel = found
    return made


def _relays_of(plan: Plan, group: range, nodes: Nodes) -> list[int]:
    """By position, who takes part for it in the collectives of a stage; -1 outside of it."""
    near = Nodes(tuple(nodes.node_by_position[i] for i in group))
    found = relays(near, [plan.ranks[i].rank_batch_size > 0 for i in group])
    return [group[found[i - group.start]] if i in group else -1 for i in range(len(plan.ranks))]


@dataclass(frozen=True, slots=True)
class StageChannels:
    """The channels of this rank's stage to those beside it."""

    on_host: Channel  # to tell what is handed back
    # By the earlier of two stages.
    onward: Mapping[int, Channel]
    back: Mapping[int, Channel]

    @classmethod
    def of(cls, plan: Plan, comm: CommContext, control: Channel) -> "StageChannels":
        """Those of a plan with stages.  Collective."""
        host, everyone = torch.device("cpu"), range(plan.world_size)

        def of_all(purpose: str) -> Channel:
            made = part_of(control, everyone, purpose=purpose, control=control, device=host)
            assert made is not None
            return made

        told, cuts = of_all("handing back"), range(len(plan.groups) - 1)
        if devices.is_on_host(comm.device):
            onward = of_all("handing over")
            return cls(told, dict.fromkeys(cuts, onward), dict.fromkeys(cuts, told))
        ways: dict[str, dict[int, Channel]] = {"onward": {}, "back": {}}
        for cut, pair in enumerate(pairwise(plan.groups)):
            for way, channels in ways.items():
                made = part_of(
                    comm.all_gather_channel,
                    [i for group in pair for i in group],
                    purpose=way,
                    control=control,
                    device=comm.device,
                )
                if made is not None:
                    _connect(made, *(pair if way == "onward" else pair[::-1]), comm.device)
                    channels[cut] = made
        return cls(told, **ways)


def _connect(channel: Channel, senders: range, receivers: range, device: torch.device) -> None:
    """Send between all pairs once: NCCL connects ranks when they first do."""
    messages = Messages(channel)
    for position in receivers if channel.position in senders else ():
        messages.send(torch.zeros(1, device=device), position)
    for position in senders if channel.position in receivers else ():
        messages.receive(torch.zeros(1, device=device), position)
    messages.post().wait()
