"""How the ranks of stages communicate: within each stage, and across each cut.

On hosts all messages travel over gloo, in groups of all ranks.  NCCL has a communicator for the
ranks that compute in a stage, and one for each cut and direction; all ranks make them in the
order of stages, and use each at once, all its ranks together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from shardhet.comm import devices
from shardhet.comm.calls import Messages
from shardhet.comm.channel import Channel
from shardhet.comm.groups import among_computing, part_of
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.stages.refusals import refuse
from shardhet.records.plan import Plan
from shardhet.records.stages import Nodes, carriers


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
        for each in (comm.gather_channel, comm.reduce_channel)
    )
    made = CommContext(comm.device, gather, reduce, comm.nodes)
    made.follow(plan, control)
    for each in plan.groups:
        carrier_by_position = _carriers_of(plan, each, comm.nodes)
        found = [
            among_computing(channel, carrier_by_position, control=control, device=comm.device)
            for channel in (gather, reduce)
        ]
        if control.position in each:
            made.gather_channel, made.reduce_channel = found
    return made


def _carriers_of(plan: Plan, group: range, nodes: Nodes) -> list[int]:
    """By position, who takes part for it in the collectives of a stage; -1 outside of it."""
    near = Nodes(tuple(nodes.node_by_position[i] for i in group))
    found = carriers(near, [plan.ranks[i].rank_batch_size > 0 for i in group])
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
                    comm.gather_channel,
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
