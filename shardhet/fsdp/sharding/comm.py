"""Streams, channels, buffers and memory of hosts that all units of one HetFSDP share.

The streams follow the design of FSDP2.  On CPU they are torch's dummy streams, which do
nothing, so that CPU and accelerators share one code path.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.calls import Pending, drain
from shardhet.comm.channel import Channel
from shardhet.comm.copy_streams import CopyStream
from shardhet.comm.devices import (
    BufferPool,
    HostAllocator,
    available_bytes,
    host_empty,
    processors,
    share_of_processors,
)
from shardhet.comm.groups import among_computing, in_two_levels
from shardhet.records.layout import FlatLayout
from shardhet.records.plan import HoldsFor, Plan, is_matched, pipeline_of
from shardhet.records.stages import Nodes, Stage, TwoLevels, relays

MIB = 2**20


@dataclass(frozen=True, slots=True)
class FlatKind:
    """What of a flat tensor determines its bytes, besides its layout."""

    dtype: torch.dtype
    is_trainable: bool


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The memory of this rank's host, before anything was placed there, and who shares it."""

    has_bytes: int | None  # None: it does not say
    positions: tuple[int, ...]  # of this host, whose optimizers are there
    row_bytes: int  # rows of parameters and gradients of all these
    moment_bytes: int  # one state of the optimizer that is as large as a parameter

    @classmethod
    def of(
        cls,
        plan: Plan,
        layouts: Sequence[FlatLayout],
        kinds: Sequence[FlatKind],
        *,
        nodes: Nodes,
        position: int,
        has_bytes: int | None,
    ) -> Self:
        """For the host of ``position``; ``layouts`` are cut by the plan."""
        node = nodes.node_by_position[position]
        on_host = tuple(i for i in nodes.positions(node) if plan.ranks[i].optimizer_on_host)
        rows = moments = 0
        for layout, kind in zip(layouts, kinds, strict=True):
            stored = sum(layout.shard_numels[i] for i in on_host) * kind.dtype.itemsize
            rows += stored * (1 + kind.is_trainable)
            moments += stored * kind.is_trainable
        return cls(has_bytes, on_host, rows, moments)

    def bytes_with(self, num_moments: int) -> int:
        """What all its ranks place there with so many states of the optimizer."""
        return self.row_bytes + num_moments * self.moment_bytes

    def shortfall(self, num_moments: int = 0) -> str | None:
        """What is wrong if the host's memory does not suffice; None if it does."""
        needed = self.bytes_with(num_moments)
        if self.has_bytes is None or needed <= self.has_bytes:
            return None
        states = f" and {num_moments} optimizer states" if num_moments else ""
        return (
            f"plan: optimizer_on_host: rows, gradients{states} of positions "
            f"{list(self.positions)} need {needed / MIB:,.0f} MiB of their host's memory, "
            f"which has {self.has_bytes / MIB:,.0f} MiB. Place fewer optimizers "
            "there, or give these devices smaller state shares."
        )


def meet_room(
    plan: Plan,
    layouts: Sequence[FlatLayout],
    kinds: Sequence[FlatKind],
    *,
    nodes: Nodes,
    control: Channel,
) -> HostRoom | None:
    """The room of this rank's host, as all its ranks see it.  Collective.

    None if no optimizer is on a host.  Raises ``ValueError`` on every rank if rows and
    gradients do not fit on some host.
    """
    if not any(rank.optimizer_on_host for rank in plan.ranks):
        return None
    found = control.exchange_objects(available_bytes())
    rooms = []
    for i in range(plan.world_size):
        here = [found[j] for j in nodes.positions(nodes.node_by_position[i])]
        has_bytes = min((each for each in here if each is not None), default=None)
        room = HostRoom.of(plan, layouts, kinds, nodes=nodes, position=i, has_bytes=has_bytes)
        if (shortfall := room.shortfall()) is not None:
            raise ValueError(shortfall)
        rooms.append(room)
    return rooms[control.position]


MAX_UNSENT_GATHERS = 4


class CommContext:
    """What units need to communicate with other ranks."""

    def __init__(
        self,
        device: torch.device,
        all_gather_channel: Channel,
        reduce_scatter_channel: Channel,
        nodes: Nodes | None = None,  # None: all positions are on one node
    ) -> None:
        self.device = device
        self.is_on_host = devices.is_on_host(device)
        self.nodes = nodes or Nodes((0,) * all_gather_channel.world_size)
        self.all_gather_channel = all_gather_channel
        self.reduce_scatter_channel = reduce_scatter_channel
        self._two_level_units: tuple[str, ...] = ()  # of the plan
        self._in_levels: list[Channel] = []  # the same two channels, in two levels
        self._handle = devices.module_of(device)
        group = all_gather_channel.group
        # With NCCL a wait for a collective is the stream's; with gloo the host stands still.
        self.host_runs_ahead = not self.is_on_host and (
            group is None or devices.backend_of(group, device) != "gloo"
        )
        if not self.is_on_host and device.index not in (
            None,
            self._handle.current_device(),
        ):
            raise ValueError(
                f"the model is on {device} but the current device is "
                f"{self._handle.current_device()}. Call torch.cuda.set_device({device.index}) "
                f"before init_process_group."
            )
        high_priority = -1  # otherwise the small copies in and out queue behind compute
        # The gather of the next unit overlaps the compute of the current one.
        self.all_gather_stream = self._handle.Stream(priority=high_priority)
        # The reduction of one unit overlaps the backward of the next.
        self.reduce_scatter_stream = self._handle.Stream(priority=high_priority)
        # Recorded on the compute stream after the last use of freed unsharded memory and after
        # the optimizer's writes; the gather stream waits for it before it writes.
        self.compute_event = self._handle.Event()
        # A context in which a stream is the current one; the one that the caller computes on.
        self.on_stream, self.current_stream = self._handle.stream, self._handle.current_stream
        # Those that receive parameters in this step and contribute gradients, though zeros
        # where they have no samples (with NCCL, or in another round).
        self.receivers: tuple[int, ...] = ()
        self.is_receiver = False  # whether this rank is one of them
        # Those that compute by the plan, and the units whose frozen rows they keep unsharded.
        self.computing: tuple[int, ...] = ()
        self._groups: list[tuple[Stage, range]] = []  # of those that have the same units
        self.resident_units: tuple[str, ...] = ()
        transport = all_gather_channel.transport
        # Memory that peers read is allocated where they can read it, which avoids a copy.
        self._allocate = host_empty if transport is None else transport.empty
        self.buffers = BufferPool(self._allocate)
        self._unsent: deque[Pending] = deque()
        self.host_memory = HostAllocator(device)  # for what is on the host by the plan
        self.num_changes_of_rows = 0  # by optimizers and users, as far as steps have begun
        self.num_rounds = 1  # of a step
        self.num_host_threads: int | None = None  # for rows on the host; None: on the device
        self.is_first_on_host = False  # of the ranks whose rows are there
        self.host_room: HostRoom | None = None  # None if no rank has rows there
        self.holds_for: HoldsFor | None = None  # what the plan was made for, if it says it

    @cached_property
    def to_device(self) -> CopyStream:
        """Copies of rows that are on the host by the plan."""
        return CopyStream(self.device)

    @cached_property
    def to_host(self) -> CopyStream:
        """Copies of their gradients."""
        return CopyStream(self.device)

    def follow(self, plan: Plan, control: Channel) -> None:
        """Communicate among the ranks that compute by ``plan``.  Collective."""
        self._share_host(plan, control)
        self.holds_for = plan.holds_for
        computes = [rank.rank_batch_size > 0 for rank in plan.ranks]
        self.computing = tuple(i for i, each in enumerate(computes) if each)
        self._groups = [*zip(pipeline_of(plan), plan.groups, strict=True)]
        self.resident_units = tuple(plan.resident_units)
        of_plan = relays(self.nodes, computes)
        self.all_gather_channel, self.reduce_scatter_channel = (
            among_computing(each, of_plan, control=control, device=self.device)
            for each in (self.all_gather_channel, self.reduce_scatter_channel)
        )
        self._two_level_units = tuple(plan.two_level_units)
        geometry = TwoLevels.among(self.nodes, computes) if plan.two_level_units else None
        self._in_levels = [
            in_two_levels(each, geometry, control=control, device=self.device)
            for each in (self.all_gather_channel, self.reduce_scatter_channel)
        ]

    def set_receivers(self, positions: tuple[int, ...]) -> None:
        """Let these receive parameters and contribute gradients from now on."""
        self.receivers = positions
        self.is_receiver = self.all_gather_channel.position in positions

    def receivers_for(self, computing: tuple[int, ...]) -> tuple[int, ...]:
        """Who receives parameters and contributes gradients where ``computing`` have samples.

        With NCCL all that compute by the plan, which have memory for both: it has communicators
        for them.  Messages between all pairs instead would make it allocate buffers for each
        (``groups._connect``), in the last batch of an epoch.
        """
        is_nccl = self.host_runs_ahead and self.all_gather_channel.group is not None
        return self.computing if is_nccl and {*computing} <= {*self.computing} else computing

    def computing_of(self, unit_fqn: str) -> tuple[int, ...]:
        """The positions that compute a unit by the plan: in stages, those of one."""
        for stage, positions in self._groups if unit_fqn else ():
            if stage.has(unit_fqn):
                return tuple(i for i in self.computing if i in positions)
        return self.computing

    def channels_of(self, unit_fqn: str) -> list[Channel]:
        """The channels of the unit's gathers and reductions, in one level or in two."""
        if is_matched(unit_fqn, self._two_level_units):
            return self._in_levels
        return [self.all_gather_channel, self.reduce_scatter_channel]

    def _share_host(self, plan: Plan, control: Channel) -> None:
        """Share each host's processors among the ranks whose optimizer steps there."""
        on_host = [i for i, rank in enumerate(plan.ranks) if rank.optimizer_on_host]
        self.num_host_threads, self.is_first_on_host = None, False
        if not on_host:
            return
        found = control.exchange_objects(processors())
        mine, nodes = control.position, self.nodes.node_by_position
        if mine in on_host:
            others = [found[i] for i in on_host if i != mine and nodes[i] == nodes[mine]]
            self.num_host_threads = share_of_processors(found[mine], others)
            self.is_first_on_host = mine == on_host[0]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, [numel], on the device and where peers can read it."""
        if self.is_on_host:
            return self._allocate(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def record_event(self, stream: Any) -> Any:
        """An event after all work queued on ``stream`` so far."""
        event = self._handle.Event()
        event.record(stream)
        return event

    def mark_device_time(self) -> Any:
        """A timed event after all work queued on the compute stream so far."""
        event = self._handle.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def mark_compute(self) -> None:
        """Make later gathers wait for all work queued on the compute stream so far."""
        self.compute_event = self.record_event(self.current_stream())

    def mark_rows_changed(self) -> None:
        """Make the next gathers read the rows anew that are on the host."""
        self.num_changes_of_rows += 1

    def end_of(self, gather: Pending) -> Any:
        """The event after a gather, on the stream of gathers."""
        with self.on_stream(self.all_gather_stream):
            gather.wait()
            return self.record_event(self.all_gather_stream)

    def keep_until_sent(self, gather: Pending) -> None:
        """Hold a gather while peers may still be reading this rank's shard.

        A few may be outstanding, so that a slow receiver does not delay a fast rank.  Their
        number is limited because each may hold a copy of the shard in ``param_dtype``.
        """
        self._unsent.append(gather)
        drain(self._unsent, MAX_UNSENT_GATHERS)

    def wait_all_sent(self) -> None:
        """Wait until no peer reads this rank's shards, so that the optimizer may write them.

        On an accelerator the compute stream has waited for each gather, and with it for what
        the gather reads: there is nothing left to wait for, but copies of rows on the host.
        """
        drain(self._unsent, 0)
        if self.num_host_threads is not None:
            self.to_device.wait_all()
