"""Bytes and seconds of optimizers that step on the host.

With S stored elements of a rank, T of them trained, and n such ranks on its node, its optimizer
takes

    28 T / (host's bytes per second / n)  +  copies that nothing hides

28 bytes are read and written per element: parameter, gradient and two moments.  The processors
of a node are shared evenly by these ranks, so each has this part of what the node moves.
Gradients are copied to the host beside backward, rows to the device beside forward.  Not hidden
are the copies of one unit each way, and what exceeds the rank's compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardhet.pricing.priced import Priced
from shardhet.pricing.step_cost import MemoryParts, RankCost
from shardhet.records.cluster import Node
from shardhet.records.plan import RankPlan

# Of a node that does not state its own: torch's fused AdamW on two threads took 1.49e9 elements
# a second, which is what two channels of DDR4 carry.
HOST_BYTES_PER_S = 42e9
UPDATE_BYTES = 28
ROW_ITEMSIZE = 4  # of parameters and gradients between host and device
DEVICE_LINK_BYTES_PER_S = 12e9  # PCIe 3 x16, or PCIe 4 x8, less protocol
COPIES_HELD = 3  # parts of reductions: one in the making, and two that are being copied
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HostPart:
    """One of several equal parts of a host."""

    memory_bytes: float
    bytes_per_s: float  # that its processors read and write
    copied_bytes_per_s: float  # between it and a device

    @classmethod
    def of(cls, node: Node, number: int) -> Self:
        """One of ``number`` parts; what the node does not state is not limited."""
        copied = DEVICE_LINK_BYTES_PER_S
        if node.link is not None:
            copied = min(copied, node.link.bandwidth_bytes_per_s)
        return cls(
            (node.host_memory_bytes or inf) / number,
            (node.host_bytes_per_s or HOST_BYTES_PER_S) / number,
            copied,
        )


@dataclass(frozen=True)
class HostPrices(Priced):
    """What is different for ranks whose plan says ``optimizer_on_host``."""

    @cached_property
    def device_bytes_per_host_numel(self) -> float:
        """Bytes on the device per element whose row is on the host, buffers included.

        The row in the dtype in which it is gathered, and the parts of reductions of the
        largest unit that are on their way.  A row is cast on the device, from a copy of the
        largest unit's.
        """
        return self._held_bytes_per_host_numel + self._moved_bytes / self.workload.numel

    @property
    def _held_bytes_per_host_numel(self) -> float:
        """``device_bytes_per_host_numel`` while no copy is launched."""
        return self.sent_itemsize + self._held_bytes / self.workload.numel

    @cached_property
    def sent_itemsize(self) -> float:
        """Bytes of an element as it is gathered."""
        gathered = map(
            self.workload.gathered_bytes, map(self.workload.kind_of, self.workload.units)
        )
        return sum(gathered) / self.workload.numel

    @cached_property
    def _trained_numels(self) -> list[int]:
        """Of all units, the largest first."""
        kinds = map(self.workload.kind_of, self.workload.units)
        return sorted((kind.trained_numel for kind in kinds), reverse=True)

    @cached_property
    def _held_bytes(self) -> int:
        """Parts of reductions that are on their way; before that, rows that are cast."""
        workload = self.workload
        nbytes = sum(self._trained_numels[:COPIES_HELD]) * workload.reduce_itemsize
        if workload.param_dtype != "float32":
            nbytes = max(nbytes, max(kind.numel for kind in workload.kinds) * ROW_ITEMSIZE)
        return nbytes

    @cached_property
    def _moved_bytes(self) -> int:
        """What a copy of a reduction's part takes besides: it is cast, or added to others."""
        adds_rounds = self.num_rounds > 1 and self.reduce_each_round
        if adds_rounds:  # the total so far
            return self._trained_numels[0] * self.workload.reduce_itemsize
        is_cast = self.workload.reduce_dtype != "float32"
        return self._trained_numels[0] * ROW_ITEMSIZE * is_cast

    def with_rows_on_host(
        self, memory: MemoryParts, rank: RankPlan, stored: int, running_bytes: int
    ) -> MemoryParts:
        """The memory of a rank that stores its elements on the host.

        A rank that computes does not run a microbatch, which needs ``running_bytes``, while it
        launches copies.  While it runs one, the gradient of a parameter is alive too.
        """
        share = stored / self.workload.numel
        running = running_bytes + self._gradient_bytes
        moved = int(share * self._moved_bytes)
        computes = bool(rank.microbatch_sizes)
        return replace(
            memory,
            state_bytes=int(stored * self.sent_itemsize),
            shard_buffer_bytes=int(share * self._held_bytes) + (0 if computes else moved),
            activation_bytes=memory.activation_bytes
            + computes * (max(running, moved) - running_bytes),
            host_bytes=memory.host_bytes + int(stored * self.workload.state_bytes_per_element),
        )

    @cached_property
    def _gradient_bytes(self) -> int:
        """Of the largest parameter."""
        shapes = (shape for kind in self.workload.kinds for shape in kind.param_shapes)
        return max(map(prod, shapes), default=0) * self.workload.param_itemsize

    def room_on_host(self, left_bytes: Floats, running_bytes: Floats) -> Floats:
        """Elements whose rows may be on the host, if so many bytes are left on the device.

        It is the inverse of ``with_rows_on_host``; ``running_bytes`` are 0 for ranks that do
        not compute.
        """
        between_copies = (left_bytes - self._gradient_bytes) / self._held_bytes_per_host_numel
        in_copies = (left_bytes + running_bytes) / self.device_bytes_per_host_numel
        room: Floats = np.where(
            running_bytes > 0, np.minimum(between_copies, in_copies), in_copies
        )
        return room

    def with_hosts(
        self, costs: Sequence[RankCost], ranks: Sequence[RankPlan]
    ) -> tuple[RankCost, ...]:
        """The costs with the seconds of optimizers on hosts, and whether hosts have room."""
        if not any(cost.memory.host_bytes for cost in costs):
            return tuple(costs)
        found, first = list(costs), 0
        for node in self.cluster.nodes:
            here = range(first, first + len(node.devices))
            first = here.stop
            on_host = [i for i in here if ranks[i].optimizer_on_host]
            part = HostPart.of(node, max(1, len(on_host)))
            needed = sum(costs[i].memory.host_bytes for i in here)
            has_room = needed <= (node.host_memory_bytes or needed)
            for i in here:
                has = has_room or not costs[i].memory.host_bytes
                found[i] = replace(costs[i], host_has_room=has)
            for i in on_host:
                found[i] = replace(found[i], optimizer_s=self._optimizer_s(part, costs[i]))
        return tuple(found)

    @cached_property
    def _trained_part(self) -> float:
        return self.workload.trained_numel / self.workload.numel

    @cached_property
    def _largest_part(self) -> float:
        """Of the model, in its largest unit."""
        return max(kind.numel for kind in self.workload.kinds) / self.workload.numel

    @property
    def _num_reductions(self) -> int:
        """How often gradients or their totals cross between the device and the host."""
        return 2 * self.num_rounds - 1 if self.reduce_each_round else 1

    def _copies_s(self, part: HostPart) -> tuple[float, float]:
        """Seconds per stored element of its copies to the device, and to the host."""
        to_device_s = ROW_ITEMSIZE / part.copied_bytes_per_s
        return to_device_s, to_device_s * self._trained_part * self._num_reductions

    def host_seconds_per_numel(self, part: HostPart, *, hides_copies: bool) -> float:
        """Seconds of the optimizer per stored element: those of rows that compute hides, but
        for one unit each way, or at most.
        """
        to_device_s, to_host_s = self._copies_s(part)
        if hides_copies:
            to_device_s *= self._largest_part
            to_host_s *= self._largest_part / self._num_reductions
        return UPDATE_BYTES * self._trained_part / part.bytes_per_s + to_device_s + to_host_s

    def hidden_numel(self, part: HostPart, forward_s: Floats, backward_s: Floats) -> Floats:
        """Elements whose copies so much compute hides, but for one unit each way."""
        to_device_s, to_host_s = self._copies_s(part)
        to_device_s *= 1 - self._largest_part
        to_host_s *= 1 - self._largest_part / self._num_reductions
        found = np.full(forward_s.shape, inf)
        for compute_s, copy_s in ((forward_s, to_device_s), (backward_s, to_host_s)):
            if copy_s > 0:
                found = np.minimum(found, compute_s / copy_s)
        return found

    def _optimizer_s(self, part: HostPart, cost: RankCost) -> float:
        """Seconds of a rank's optimizer on its part of the host, and of exposed copies."""
        largest, (to_device_s, to_host_s) = self._largest_part, self._copies_s(part)
        to_device_s, to_host_s = to_device_s * cost.stored_numel, to_host_s * cost.stored_numel
        update_s = UPDATE_BYTES * cost.stored_numel * self._trained_part / part.bytes_per_s
        return (
            update_s
            + max(to_device_s - cost.forward_s, largest * to_device_s)
            + max(to_host_s - cost.backward_s, largest * to_host_s / self._num_reductions)
        )
