"""Bytes and seconds of optimizers that step on the host.

With S stored elements of a rank, T of them trained, and all such ranks of a node together
storing N trained elements, its optimizer takes

    28 N / (host's bytes per second)  +  copies that nothing hides

28 bytes are read and written per element: parameter, gradient and two moments.  The ranks of a
node share its memory, so they end together.  Gradients are copied to the host beside backward,
rows to the device beside forward.  Not hidden are the copies of one unit each way, and what
exceeds the rank's compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

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


@dataclass(frozen=True)
class HostPrices(Priced):
    """What is different for ranks whose plan says ``optimizer_on_host``."""

    @property
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
        shapes = (shape for kind in self.workload.kinds for shape in kind.param_shapes)
        gradient = max(map(prod, shapes), default=0) * self.workload.param_itemsize
        running, moved = running_bytes + gradient, int(share * self._moved_bytes)
        computes = bool(rank.microbatch_sizes)
        return replace(
            memory,
            state_bytes=int(stored * self.sent_itemsize),
            shard_buffer_bytes=int(share * self._held_bytes) + (0 if computes else moved),
            activation_bytes=memory.activation_bytes
            + computes * (max(running, moved) - running_bytes),
            host_bytes=memory.host_bytes + int(stored * self.workload.state_bytes_per_element),
        )

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
            update_s = self._update_s(node, sum(costs[i].stored_numel for i in on_host))
            needed = sum(costs[i].memory.host_bytes for i in here)
            has_room = needed <= (node.host_memory_bytes or needed)
            for i in here:
                has = has_room or not costs[i].memory.host_bytes
                found[i] = replace(costs[i], host_has_room=has)
            for i in on_host:
                exposed_s = self._exposed_copies_s(node, costs[i])
                found[i] = replace(found[i], optimizer_s=update_s + exposed_s)
        return tuple(found)

    @property
    def _trained_part(self) -> float:
        return self.workload.trained_numel / self.workload.numel

    def _update_s(self, node: Node, stored_numel: int) -> float:
        """Seconds of the optimizers of a node that step on the host together."""
        bytes_per_s = node.host_bytes_per_s or HOST_BYTES_PER_S
        return UPDATE_BYTES * stored_numel * self._trained_part / bytes_per_s

    def _exposed_copies_s(self, node: Node, cost: RankCost) -> float:
        """Seconds of the rank's copies that no compute hides."""
        bytes_per_s = DEVICE_LINK_BYTES_PER_S
        if node.link is not None:
            bytes_per_s = min(bytes_per_s, node.link.bandwidth_bytes_per_s)
        times = 2 * self.num_rounds - 1 if self.reduce_each_round else 1
        to_device_s = ROW_ITEMSIZE * cost.stored_numel / bytes_per_s
        to_host_s = to_device_s * self._trained_part * times
        largest = max(kind.numel for kind in self.workload.kinds) / self.workload.numel
        return max(to_device_s - cost.forward_s, largest * to_device_s) + max(
            to_host_s - cost.backward_s, largest * to_host_s / times
        )
