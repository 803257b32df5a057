"""Bytes and seconds of optimizers that step on the host, and of inputs of units there.

With S stored elements of a rank, T of them trained, and n such ranks on its node, its optimizer
takes

    28 T / (host's bytes per second / n)  +  copies that nothing hides

28 bytes are read and written per element: parameter, gradient and two moments.  The processors
of a node are shared evenly by these ranks, so each has this part of what the node moves.
Gradients are copied to the host beside backward, rows to the device beside forward.  Not hidden
are the copies of one unit each way, and what exceeds the rank's compute.

[Note: Inputs on the host]
Of a rank whose units H keep their inputs in the memory of the host until backward, i_u bytes
per sample of unit u, the device holds i_u while u runs, and in backward that of the unit before
it, which comes.  The host holds b (sum of i_u over H), a stage those of all rounds in
flight, and its device one more, of the round whose backward is next.  A copy overlaps the
turn of its unit, which takes as long as the longer of its compute and its copy.  The bandwidth
is that of a card's own link, or the rank's part of what its host states.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardhet.pricing.priced import Priced
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.step_cost import MemoryPeaks, RankCost
from shardhet.records.cluster import Cluster, Node
from shardhet.records.ops import HeldUnits, held_units
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import Phase, Schedule
from shardhet.records.workload import Unit

# Of a node that does not state its own: torch's fused AdamW on two threads took 1.49e9 elements
# a second, which is what two channels of DDR4 carry.
HOST_BYTES_PER_S = 42e9
ROW_ITEMSIZE = 4  # of parameters and gradients between host and device
DEVICE_LINK_BYTES_PER_S = 12e9  # PCIe 3 x16, or PCIe 4 x8, less protocol
NUM_LINES = 4  # of the time of an optimizer on the host, by what it stores
COPIES_HELD = 3  # parts of reductions: one in the making, and two that are being copied
Floats = NDArray[np.float64]


def update_bytes(num_moments: int) -> int:
    """Bytes of float32 that an optimizer on the host reads and writes per element.

    It reads the parameter, its gradient and ``num_moments`` states, and writes all of them but
    the gradient: 28 bytes for AdamW.
    """
    return ROW_ITEMSIZE * (3 + 2 * num_moments)


@dataclass(frozen=True, slots=True)
class HostPart:
    """The speed of one of several equal parts of a host."""

    bytes_per_s: float  # that its processors read and write
    copied_bytes_per_s: float  # between it and a device

    @classmethod
    def of(cls, node: Node, number: int) -> Self:
        """One of ``number`` parts."""
        copied = DEVICE_LINK_BYTES_PER_S
        if node.link is not None:
            copied = min(copied, node.link.bandwidth_bytes_per_s)
        return cls((node.host_bytes_per_s or HOST_BYTES_PER_S) / number, copied)


@dataclass(frozen=True)
class HostPrices(Priced):
    """What is different for ranks whose plan says ``optimizer_on_host``."""

    @cached_property
    def held(self) -> HeldUnits:
        """What is alive in the turns of a step."""
        return held_units(len(self.visited_units), self.form)

    @cached_property
    def trained_bytes(self) -> Floats:
        """[units] of whole gradients."""
        kinds = map(self.workload.kind_of, self.visited_units)
        itemsize = self.workload.reduce_itemsize
        return np.array([float(kind.trained_numel * itemsize) for kind in kinds])

    @cached_property
    def host_numel_bytes(self) -> Floats:
        """[turns + 1] bytes on the device per element whose row is on the host.

        The row in the dtype in which it is gathered, and the parts of reductions that are on
        their way.  Rows are cast on the device, from a copy of a unit's.  A lone device's part
        in the making is the whole gradient, which is counted as such.
        """
        held, trained = self.held, self.trained_bytes
        skipped = int(self.cluster.world_size == 1)
        # The last parts before a round begins: of a stage of one or two units, of more rounds.
        before = min(self.num_rounds, COPIES_HELD) - 1 if self.reduce_each_round else 1
        after = np.tile(trained, max(1, before))[:COPIES_HELD]
        first = after[skipped:]
        # By unit, of those whose turns came before in backward: in the first round, and later.
        nothing = np.zeros(COPIES_HELD)
        on_way = [
            _sums_after(trained, each, skipped) for each in (nothing, np.append(after, nothing))
        ]
        cast = 0.0
        if self.workload.param_dtype != "float32":
            cast = float(max(kind.numel for kind in self.workload.kinds)) * ROW_ITEMSIZE
        is_later = held.round > 0
        if self.reduce_each_round:
            in_forward = np.where(is_later, first.sum(), cast)
            in_backward = np.where(is_later, on_way[1][held.unit], on_way[0][held.unit])
        else:  # in the last round
            in_forward = np.where(is_later, 0.0, cast)
            in_backward = (held.round == held.round.max()) * on_way[0][held.unit]
        nbytes = np.append(np.where(held.is_backward, in_backward, in_forward), first.sum())
        return self.sent_itemsize + nbytes / self.workload.numel

    @cached_property
    def device_bytes_per_host_numel(self) -> float:
        """The most of ``host_numel_bytes``, while a copy is launched."""
        return float(self.host_numel_bytes.max()) + self._moved_bytes / self.workload.numel

    def launching_copies(self, moments: MemoryPeaks) -> MemoryPeaks:
        """The moments of a rank with rows on the host in which it launches copies of them.

        It does not run a microbatch meanwhile.
        """
        moved = self._moved_bytes / self.workload.numel
        runs = (-1,) * len(moments.runs)
        return replace(moments, numel_bytes=moments.numel_bytes + moved, runs=runs)

    @cached_property
    def sent_itemsize(self) -> float:
        """Bytes of an element as it is gathered."""
        gathered = map(
            self.workload.gathered_bytes, map(self.workload.kind_of, self.workload.units)
        )
        return sum(gathered) / self.workload.numel

    @cached_property
    def _moved_bytes(self) -> int:
        """What a copy of a reduction's part takes besides: it is cast, or added to others."""
        adds_rounds = self.num_rounds > 1 and self.reduce_each_round
        largest = max(kind.trained_numel for kind in self.workload.kinds)
        if adds_rounds:  # the total so far
            return largest * self.workload.reduce_itemsize
        return largest * ROW_ITEMSIZE * (self.workload.reduce_dtype != "float32")

    def with_hosts(
        self, costs: Sequence[RankCost], ranks: Sequence[RankPlan]
    ) -> tuple[RankCost, ...]:
        """The costs with the seconds of optimizers on hosts, and whether hosts have room."""
        if not any(cost.memory.host_bytes for cost in costs):
            return tuple(costs)
        found, cluster = list(costs), self.cluster
        for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
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

    @property
    def _update_bytes(self) -> float:
        """What the optimizer reads and writes per stored element."""
        return update_bytes(self.workload.num_moments) * self._trained_part

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

    def host_optimizer(
        self, part: HostPart, forward_s: Floats, backward_s: Floats
    ) -> tuple[Floats, Floats]:
        """[NUM_LINES] seconds per stored element, and [NUM_LINES, ...] seconds off.

        The optimizer takes what the slowest of these lines says.  They differ in which copies
        compute hides, but for one unit: of the first both ways, of the last none.
        """
        to_device_s, to_host_s = self._copies_s(part)
        largest, number = self._largest_part, self._num_reductions
        of_rows = (largest * to_device_s, 0.0 * forward_s), (to_device_s, forward_s)
        back = (largest * to_host_s / number, 0.0 * backward_s), (to_host_s, backward_s)
        update_s = self._update_bytes / part.bytes_per_s
        lines = [(update_s + d + h, f + b) for (d, f), (h, b) in product(of_rows, back)]
        per_numel_s, off_s = zip(*lines, strict=True)
        return np.array(per_numel_s), np.array(off_s)

    def most_host_seconds_per_numel(self, part: HostPart) -> float:
        """Seconds of the optimizer per stored element if nothing hides copies."""
        update_s = self._update_bytes / part.bytes_per_s
        return update_s + sum(self._copies_s(part))

    def row_copies_s(self, schedule: Schedule, node: Node) -> list[float]:
        """By turn: seconds per stored element of the model of copies beside it.

        Rows come to the device in the first round's forward, of one unit after the other, and
        gradients go to the host where they are reduced.
        """
        to_device_s, to_host_s = self._copies_s(HostPart.of(node, 1))
        to_host_s /= self._num_reductions
        found = []
        for turn in schedule.turns:
            kind = self.workload.kind_of(self.visited_units[turn.unit])
            is_reduced = self.reduce_each_round or turn.round == self.num_rounds - 1
            if turn.phase is Phase.FORWARD:
                copy_s = to_device_s * kind.numel / self.workload.numel * (turn.round == 0)
            else:
                part = kind.trained_numel / max(1, self.workload.trained_numel)
                copy_s = to_host_s * part * is_reduced
            found.append(copy_s)
        return found

    def _optimizer_s(self, part: HostPart, cost: RankCost) -> float:
        """Seconds of a rank's optimizer on its part of the host, and of exposed copies."""
        compute_s = np.array(cost.forward_s), np.array(cost.backward_s)
        per_numel_s, off_s = self.host_optimizer(part, *compute_s)
        return float((per_numel_s * cost.stored_numel - off_s).max())


@dataclass(frozen=True)
class HostInputPrices(HostPrices):
    """Bytes and seconds of inputs on hosts in a scenario."""

    @cached_property
    def _may_leave(self) -> frozenset[str]:
        """Units whose inputs need a gradient: those after the first that is trained."""
        units = self.visited_units
        if self.receives:
            return frozenset(unit.fqn for unit in units)
        trained = [bool(self.workload.kind_of(unit).trained_numel) for unit in units]
        first = trained.index(True) if True in trained else len(units)
        return frozenset(unit.fqn for unit in units[first + 1 :])

    @cached_property
    def _input_bytes(self) -> dict[str, int]:
        return {u.fqn: self.workload.kind_of(u).input_bytes for u in self.visited_units}

    def leaves_device(self, rank: RankPlan, unit: Unit) -> bool:
        """Whether the rank keeps the unit's inputs on the host."""
        if not rank.inputs_on_host:
            return False
        return rank.keeps_input_on_host(unit.fqn) and unit.fqn in self._may_leave

    def host_bytes_per_sample(self, rank: RankPlan) -> int:
        """Bytes in the memory of the host, for each sample of a round, of all in flight."""
        return self.in_flight * sum(
            self.workload.kind_of(unit).input_bytes
            for unit in self.visited_units
            if self.leaves_device(rank, unit)
        )

    def host_paces(self, plan: Plan) -> list[float]:
        """Bytes per second that each rank's copies get, both ways alike."""
        shared, cluster = list[float](), self.cluster
        for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
            ranks = plan.ranks[here.start : here.stop]
            copying = sum(bool(rank.inputs_on_host and rank.rank_batch_size) for rank in ranks)
            stated = node.host_bytes_per_s or float("inf")
            shared += [min(DEVICE_LINK_BYTES_PER_S, stated / max(1, copying))] * len(here)
        return shared

    def copy_s_per_sample(self, rank: RankPlan, unit_fqn: str) -> float:
        """Seconds of a copy of a unit's input if all devices of each host copy."""
        if not self._copies(rank, unit_fqn):
            return 0.0
        stated = [
            node.host_bytes_per_s / len(node.devices)
            for node in self.cluster.nodes
            if node.host_bytes_per_s
        ]
        return self._input_bytes[unit_fqn] / min([DEVICE_LINK_BYTES_PER_S, *stated])

    def _copies(self, rank: RankPlan, unit_fqn: str) -> bool:
        """Whether turns of the unit copy inputs; those of the model's first are its own."""
        is_first = unit_fqn == self.visited_units[0].fqn and not self.receives
        return not is_first and rank.keeps_input_on_host(unit_fqn)

    def beside_copies_s(
        self,
        rank: RankPlan,
        unit_fqn: str,
        sizes: Sequence[int],
        seconds: tuple[float, float],
        pace: float,
    ) -> tuple[float, float]:
        """Seconds of a unit's forward and backward beside the copies of its inputs."""
        copy_s = self.copy_s(rank, unit_fqn, sizes, pace)
        return max(seconds[0], copy_s), max(seconds[1], copy_s)

    def copy_s(self, rank: RankPlan, unit_fqn: str, sizes: Sequence[int], pace: float) -> float:
        """Seconds of a copy of a unit's inputs; 0 if they stay."""
        if not self._copies(rank, unit_fqn):
            return 0.0
        return sum(sizes) * self._input_bytes[unit_fqn] / pace


def part_of_hosts(scenario: Scenario, whole: Cluster, positions: Collection[int]) -> Scenario:
    """``scenario``, that of devices of ``whole``, with their equal part of each host.

    The other devices of a host have the rest of its memory and speed.
    """
    nodes, own = [], iter(scenario.cluster.nodes)
    for node, places in zip(whole.nodes, whole.positions_by_node, strict=True):
        number = len(places)
        kept = sum(i in positions for i in places)
        if not kept:
            continue
        memory, speed = node.host_memory_bytes, node.host_bytes_per_s or HOST_BYTES_PER_S
        here = next(own)
        if kept < number:
            here = replace(
                here,
                host_memory_bytes=None if memory is None else memory * kept // number,
                host_bytes_per_s=speed * kept / number,
            )
        nodes.append(here)
    return replace(scenario, cluster=replace(scenario.cluster, nodes=tuple(nodes)))


def _sums_after(values: Floats, then: Floats, skipped: int) -> Floats:
    """The sum of ``COPIES_HELD`` values after each but for the first ``skipped`` of them.

    After the last value come those of ``then``.
    """
    sums = np.cumsum(np.concatenate((values, then)))
    number = len(values)
    return sums[COPIES_HELD : COPIES_HELD + number] - sums[skipped : skipped + number]
