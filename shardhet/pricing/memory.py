"""Memory of a rank: what it needs besides the state that it stores, and how much state fits.

For b samples in microbatches of m, S stored elements and the patterns c of what is recomputed,

    bytes = reserved + sigma S + [b > 0] (unsharded + gradients + running_c(m)) + b p_c

sigma is the bytes per stored element, p_c the bytes per sample of the inputs of every unit
([Note: Inputs on the host] says of which) and of the graphs that are not recomputed,
and running_c(m) what the running microbatch needs in addition.  Arrays of b and m give arrays
of bytes.  A stage of a pipeline holds p_c of all rounds in flight.

[Note: Inputs on the host]
Of a rank whose units H keep their inputs in the memory of the host until backward, i_u bytes
per sample of unit u, the device holds b (sum of i_u over the other units + the two largest of
H): one is in use while another comes or leaves.  The host holds b (sum of i_u over H).  A copy
overlaps the turn of its unit, which takes as long as the longer of its compute and its copy.
The bandwidth is that of a card's own link, or the rank's part of what its host states.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardhet.pricing.hosts import DEVICE_LINK_BYTES_PER_S, HostPart, HostPrices
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.step_cost import MemoryParts
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.workload import Unit, UnitKind

LEAST_KNOWN_SIZES = 33  # of microbatches, whose bytes are computed at once
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class HostInputPrices(HostPrices):
    """Bytes and seconds of inputs on hosts in a setting."""

    @cached_property
    def _may_leave(self) -> frozenset[str]:
        """Units whose inputs need a gradient: those after the first that is trained."""
        units = self.visited_units
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

    def input_bytes_per_sample(self, rank: RankPlan) -> int:
        """Bytes on the device of inputs of units, and of two gradients of the largest."""
        known = self.known.input_bytes
        treated = (rank.recomputed_units, rank.inputs_on_host) if rank.inputs_on_host else ()
        key = (self.in_flight, treated)
        if key not in known:
            sizes = [
                (self.workload.kind_of(unit).input_bytes, self.leaves_device(rank, unit))
                for unit in self.visited_units
            ]
            staying = sum(nbytes for nbytes, leaves in sizes if not leaves)
            leaving = sorted((nbytes for nbytes, leaves in sizes if leaves), reverse=True)
            held = self.in_flight * (staying + sum(leaving[:2]))
            known[key] = held + 2 * max(nbytes for nbytes, _ in sizes)
        return known[key]

    def host_bytes_per_sample(self, rank: RankPlan) -> int:
        """Bytes in the memory of the host, for each sample of a round."""
        return sum(
            self.workload.kind_of(unit).input_bytes
            for unit in self.visited_units
            if self.leaves_device(rank, unit)
        )

    def coming_bytes_per_sample(self, rank: RankPlan, unit: Unit, *, is_backward: bool) -> int:
        """Bytes of inputs on the device in a turn only: its own, and the next one's."""
        if not self.leaves_device(rank, unit):
            return 0
        own = self.workload.kind_of(unit).input_bytes
        before = self.visited_units[max(0, self.visited_units.index(unit) - 1)]
        comes = is_backward and before is not unit and self.leaves_device(rank, before)
        return own + (self.workload.kind_of(before).input_bytes if comes else 0)

    def host_paces(self, plan: Plan) -> list[float]:
        """Bytes per second that each rank's copies get, both ways alike."""
        shared: list[float] = []
        ranks = iter(plan.ranks)
        for node in self.cluster.nodes:
            here = [next(ranks) for _ in node.devices]
            copying = sum(bool(rank.inputs_on_host and rank.rank_batch_size) for rank in here)
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
        """Whether turns of the unit copy inputs; those of the first are no activations."""
        is_first = unit_fqn == self.visited_units[0].fqn
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
        if not self._copies(rank, unit_fqn):
            return seconds
        copy_s = sum(sizes) * self._input_bytes[unit_fqn] / pace
        return max(seconds[0], copy_s), max(seconds[1], copy_s)


@dataclass(frozen=True)
class MemoryPrices(HostInputPrices):
    """Bytes of ranks in a setting."""

    @cached_property
    def bytes_per_stored_numel(self) -> float:
        """Bytes that a rank needs per element that it stores, buffers included.

        The buffers are copies of the largest unit's shard: two if parameters are gathered in
        a dtype other than float32, and one more if gradients are reduced in one, or added to
        those of earlier rounds.  In two levels, sums of every node but two are added to them.
        """
        workload = self.workload
        copies = 0.0
        if workload.param_dtype != "float32":
            copies += 2 * max(map(workload.gathered_bytes, workload.kinds))
        adds_rounds = self.num_rounds > 1 and self.reduce_each_round
        if workload.reduce_dtype != "float32" or adds_rounds:
            trained = max(kind.trained_numel for kind in workload.kinds)
            copies += trained * workload.reduce_itemsize
        if self.two_level_units:
            trained = max(kind.trained_numel for kind in workload.kinds)
            copies += max(0, len(self.cluster.nodes) - 2) * trained * workload.reduce_itemsize
        return workload.state_bytes_per_element + copies / workload.numel

    @cached_property
    def unsharded_bytes(self) -> int:
        """Gathered parameters of the root and of two units that run one after the other.

        Of all units if they stay unsharded after forward.
        """
        nbytes = self.workload.gathered_bytes
        if self.reshard_after_forward or self.cluster.world_size == 1:
            return self._max_of_neighbours(nbytes) + sum(map(nbytes, self.root_kinds))
        return sum(nbytes(self.workload.kind_of(unit)) for unit in self.workload.units)

    @cached_property
    def grad_bytes(self) -> int:
        """Unsharded gradients of the unit in backward and of the one being reduced.

        Of all units if several rounds are reduced together.
        """

        def nbytes(kind: UnitKind) -> int:
            return kind.trained_numel * self.workload.reduce_itemsize

        if self.reduce_each_round or self.num_rounds == 1 or self.cluster.world_size == 1:
            return self._max_of_neighbours(nbytes) + sum(map(nbytes, self.root_kinds))
        return sum(nbytes(self.workload.kind_of(unit)) for unit in self.workload.units)

    def _max_of_neighbours(self, nbytes: Callable[[UnitKind], int]) -> int:
        """The most bytes of two units that run one after the other."""
        if self.cluster.world_size == 1:
            return 0  # the shard is the storage
        sizes = [nbytes(self.workload.kind_of(unit)) for unit in self.visited_units]
        return max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))

    def kept_bytes_per_sample(self, rank: RankPlan) -> int:
        """Bytes per sample of the graphs of the units that the rank does not recompute."""
        runs = self._runs_of(rank.recomputed_units)
        return self.in_flight * sum(
            number * self.workload.kind_by_name[kind].activation_bytes
            for (kind, is_recomputed), number in runs.items()
            if not is_recomputed
        )

    def num_recomputed(self, rank: RankPlan) -> int:
        """The number of units that the rank recomputes; 0 if it does not compute."""
        runs = self._runs_of(rank.recomputed_units)
        return sum(number for (_, is_recomputed), number in runs.items() if is_recomputed)

    def running_bytes(self, rank: RankPlan, device_kind: str | None, size: int) -> int:
        """Bytes that the running microbatch needs besides the graphs that are kept anyway."""
        return int(self._running_by_size(rank, device_kind, size)[size])

    def _running_by_size(self, rank: RankPlan, device_kind: str | None, largest: int) -> Floats:
        """``running_bytes`` by size, at least up to the largest; whole numbers."""
        runs, known = self._runs_of(rank.recomputed_units), self.known.running_bytes
        units = self.profile.device(device_kind).unit_by_kind
        is_counted = all(units[kind].peak_bytes is None for kind, _ in runs if kind in units)
        key = (tuple(runs), None if is_counted else device_kind)
        if key not in known or len(known[key]) <= largest:
            size = max(largest, LEAST_KNOWN_SIZES)
            found = [self._running_of_unit(*run, device_kind, size) for run in runs]
            known[key] = np.max(found, axis=0)
        return known[key]

    def needs_more_if_larger(
        self, rank: RankPlan, device_kind: str | None, largest: int
    ) -> bool:
        """Whether microbatches up to the largest need no less memory if they are larger."""
        running = self._running_by_size(rank, device_kind, largest)[1 : 1 + largest]
        return bool((np.diff(running) >= 0).all())

    def turn_bytes(
        self, rank: RankPlan, device_kind: str | None, unit: Unit, *, is_backward: bool
    ) -> int:
        """Bytes that a rank needs while it computes a unit, besides what is kept anyway.

        They are its gathered parameters, in backward its gradients and two gradients of its
        inputs, what the running microbatch needs, and inputs that come from the host.
        """
        running = self.running_bytes(rank, device_kind, max(rank.microbatch_sizes))
        running += rank.rank_batch_size * self.coming_bytes_per_sample(
            rank, unit, is_backward=is_backward
        )
        if not is_backward:
            return self.unsharded_bytes + running
        of_inputs = 2 * rank.rank_batch_size * self.workload.kind_of(unit).input_bytes
        return self.unsharded_bytes + self.grad_bytes + of_inputs + running

    def kept_bytes(self, rank: RankPlan, unit: Unit) -> int:
        """Bytes that a rank keeps of a unit from forward to backward: inputs and graphs."""
        kind = self.workload.kind_of(unit)
        graph = 0 if rank.recomputes(unit.fqn) else kind.activation_bytes
        inputs = 0 if self.leaves_device(rank, unit) else kind.input_bytes
        return rank.rank_batch_size * (inputs + graph)

    def working_bytes(
        self, device_kind: str | None, rank: RankPlan, batches: Ints, sizes: Ints
    ) -> Floats:
        """Bytes of everything but state and its buffers, for each batch and microbatch size.

        ``rank`` says what is recomputed.  The result is [..., len(sizes)] for ``batches``
        [..., 1].
        """
        running = self._running_by_size(rank, device_kind, int(sizes.max(initial=0)))[sizes]
        computes = batches > 0
        used: Floats = (
            self.profile.device(device_kind).reserved_bytes
            + computes * (self.unsharded_bytes + self.grad_bytes + running)
            + batches * float(self.bytes_per_sample(rank))
        )
        return used

    def bytes_per_sample(self, rank: RankPlan) -> int:
        """Bytes that each sample of a rank's batch adds, whatever the microbatch size."""
        return self.input_bytes_per_sample(rank) + self.kept_bytes_per_sample(rank)

    def room_numel(self, budget_bytes: float, working_bytes: Floats) -> Floats:
        """Elements of state that fit into a budget besides the working memory."""
        room: Floats = (budget_bytes - working_bytes) / self.bytes_per_stored_numel
        return room

    def room_for_state(
        self,
        rank: RankPlan,
        device_kind: str | None,
        budget_bytes: float,
        *,
        batches: Ints,
        sizes: Ints,
        host: HostPart | None,
    ) -> Floats:
        """``room_numel`` beside these batches, of state on the device or on a part of its host.

        ``rank`` says which, and what is recomputed.
        """
        used = self.working_bytes(device_kind, rank, batches, sizes)
        if not rank.optimizer_on_host:
            return self.room_numel(budget_bytes, used)
        assert host is not None
        running = self._running_by_size(rank, device_kind, int(sizes.max(initial=0)))[sizes]
        room = self.room_on_host(budget_bytes - used, (batches > 0) * running)
        inputs = batches * float(self.host_bytes_per_sample(rank))
        left = (host.memory_bytes - inputs) / self.workload.state_bytes_per_element
        return np.minimum(room, left)

    def bytes_per_numel_of(self, rank: RankPlan) -> float:
        """Bytes on the device per element that the rank stores, buffers included."""
        if rank.optimizer_on_host:
            return self.device_bytes_per_host_numel
        return self.bytes_per_stored_numel

    def _runs_of(self, recomputed_units: tuple[str, ...]) -> Mapping[tuple[str, bool], int]:
        """The number of recomputed and of not recomputed units of each kind."""
        known = self.known.runs
        if recomputed_units not in known:
            rank = RankPlan(
                microbatch_sizes=(), state_share=0.0, recomputed_units=recomputed_units
            )
            runs = ((unit.kind, rank.recomputes(unit.fqn)) for unit in self.visited_units)
            known[recomputed_units] = Counter(runs)
        return known[recomputed_units]

    def _running_of_unit(
        self, kind_name: str, is_recomputed: bool, device_kind: str | None, largest: int
    ) -> Floats:
        """[1 + largest] what one unit needs while it runs, by size of the microbatch."""
        kind = self.workload.kind_by_name[kind_name]
        sizes = np.arange(1 + largest, dtype=np.float64)
        graph = sizes * kind.activation_bytes
        measured = self.profile.unit(device_kind, kind.name).peak_bytes
        peak = graph + sizes * kind.transient_bytes
        if measured is not None:
            peak = np.trunc(at_sizes(measured, largest))
        return peak if is_recomputed else np.maximum(0.0, peak - graph)

    def memory(self, rank: RankPlan, stored_numel: int) -> MemoryParts:
        """The memory of a rank that stores this many elements, by purpose."""
        workload, device_kind = self.workload, rank.device.kind
        batch, sizes = rank.rank_batch_size, rank.microbatch_sizes
        buffers = self.bytes_per_stored_numel - workload.state_bytes_per_element
        kept = batch * self.kept_bytes_per_sample(rank)
        running = self.running_bytes(rank, device_kind, max(sizes)) if batch else 0
        parts = MemoryParts(
            state_bytes=int(stored_numel * workload.state_bytes_per_element),
            shard_buffer_bytes=int(stored_numel * buffers),
            unsharded_bytes=self.unsharded_bytes if batch else 0,
            grad_bytes=self.grad_bytes if batch else 0,
            boundary_bytes=batch * self.input_bytes_per_sample(rank),
            activation_bytes=kept + running,
            reserved_bytes=self.profile.device(device_kind).reserved_bytes,
            host_bytes=batch * self.host_bytes_per_sample(rank),
        )
        if rank.optimizer_on_host:
            return self.with_rows_on_host(parts, rank, stored_numel, running)
        return parts
