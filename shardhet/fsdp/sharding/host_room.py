"""Whether the memory of the hosts is enough for the rows and states that a plan puts there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from shardhet.comm.channel import Channel
from shardhet.comm.devices import available_bytes
from shardhet.records.layout import FlatLayout
from shardhet.records.plan import Plan
from shardhet.records.stages import Nodes

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

    def lack(self, num_moments: int = 0) -> str | None:
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
        if (lack := room.lack()) is not None:
            raise ValueError(lack)
        rooms.append(room)
    return rooms[control.position]
