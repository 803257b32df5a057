"""The assignment of processes to the devices of a plan."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.channel import Channel, check_same_on_all_ranks
from shardhet.comm.failure import failing_as_peers
from shardhet.comm.groups import Communicators
from shardhet.comm.peers import Peers
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan
from shardhet.records.stages import Nodes

# Of `shardhet rehearse`, for the programs that it starts: its plan's file, its cards, or just 1
REHEARSE = "SHARDHET_REHEARSE"


@dataclass(frozen=True, slots=True)
class Members:
    """The processes of a plan, each in a position that its device fits."""

    group: dist.ProcessGroup | None  # of these processes; None: one process
    gather: Channel
    reduce: Channel
    control: Channel
    peers: Peers
    nodes: Nodes  # as the devices were found

    @classmethod
    def of_plan(
        cls,
        group: dist.ProcessGroup | None,
        plan: Plan,
        *,
        device: torch.device,
        device_spec: DeviceSpec | None,
    ) -> Self:
        """Find out which rank takes which device of ``plan``.  Collective over ``group``.

        Raises ``ValueError`` on every rank if the plans differ or the devices do not fit.
        """
        ranks = tuple(range(1 if group is None else group.size()))
        rank, names = 0 if group is None else group.rank(), [f"rank {r}" for r in ranks]
        given, channel = Communicators(None, None, group), Channel(group, ranks, rank)
        meeting = Peers(given, channel, names, device).fail_together("meeting the other ranks")
        with meeting, failing_as_peers():
            communicators = Communicators.over(group, device)
        *_, hello = communicators.channels(ranks, rank)
        with Peers(communicators, hello, names, device).fail_together(
            "meeting the other ranks"
        ):
            announced = hello.exchange_objects(device_spec or local_device_spec(device))
            check_same_on_all_ranks(plan.to_json(), what="plan", channel=hello)
            rank_by_position = match_devices([each.device for each in plan.ranks], announced)
        gather, reduce, control = communicators.channels(rank_by_position, rank)
        names = [f"rank {r} ({announced[r]})" for r in rank_by_position]
        for stage, positions in enumerate(plan.groups if plan.stages else ()):
            for i in positions:
                names[i] += f" of stage {stage}"
        return cls(
            group=group,
            gather=gather,
            reduce=reduce,
            control=control,
            peers=Peers(communicators, control, names, device),
            nodes=Nodes.of([announced[r].host or "" for r in rank_by_position]),
        )


def local_device_spec(device: torch.device) -> DeviceSpec:
    """Describe this process's device, as the driver (for a CPU: the system) reports it."""
    host = socket.gethostname()
    if not devices.is_on_host(device):
        properties = devices.module_of(device).get_device_properties(device)
        return DeviceSpec(
            host=host,
            kind=properties.name,
            memory_capacity_bytes=properties.total_memory,
            uuid=str(properties.uuid),
        )
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceSpec(host=host, kind=device.type, memory_capacity_bytes=num_bytes)


def is_rehearsal() -> bool:
    """Whether `shardhet rehearse` has started this process."""
    return bool(os.environ.get(REHEARSE))


def rehearsed() -> str | None:
    """The plan's file or the cards that are rehearsed for, if they are known."""
    told = os.environ.get(REHEARSE)
    return None if told == "1" else told or None


def planned_device(plan: Plan, group: dist.ProcessGroup | None) -> DeviceSpec:
    """What this process announces in place of its own device, under a plan for others."""
    rank = 0 if group is None else group.rank()
    return plan.ranks[min(rank, plan.world_size - 1)].device


def match_devices(
    planned: Sequence[DeviceSpec], announced: Sequence[DeviceSpec]
) -> tuple[int, ...]:
    """Return, for each planned device, the rank that takes it, whatever the ranks' order.

    A rank takes the position of its own number wherever possible.  Raises ``ValueError`` with
    a table if the devices found do not fit the plan.
    """
    if len(planned) != len(announced):
        raise ValueError(
            f"The plan is for {len(planned)} devices but {len(announced)} ranks were started.\n"
            f"{_device_table(planned, announced)}\n"
            f"Start {len(planned)} ranks or make a plan for {len(announced)} devices."
        )
    position_by_rank: dict[int, int] = {}

    def place(position: int, tried: set[int]) -> bool:  # one augmenting path (Kuhn 1955)
        others = [rank for rank in range(len(announced)) if rank != position]
        for rank in (position, *others):
            if rank in tried or not planned[position].accepts(announced[rank]):
                continue
            tried.add(rank)
            if rank not in position_by_rank or place(position_by_rank[rank], tried):
                position_by_rank[rank] = position
                return True
        return False

    if not all(place(position, set()) for position in range(len(planned))):
        raise ValueError(
            f"The devices found do not fit the plan.\n{_device_table(planned, announced)}\n"
            f"Run the planner on this cluster, or start the ranks on the planned devices. "
            f"To try the plan on CPUs: shardhet rehearse PROGRAM --plan plan.json, or "
            f"HetFSDP(model, plan, rehearse=True)."
        )
    return tuple(sorted(position_by_rank, key=lambda rank: position_by_rank[rank]))


def _device_table(planned: Sequence[DeviceSpec], announced: Sequence[DeviceSpec]) -> str:
    rows = [f"  planned {i}: {spec}" for i, spec in enumerate(planned)]
    rows += [f"  rank {i}: {spec}" for i, spec in enumerate(announced)]
    return "\n".join(rows)
