"""Memory of a rank: what it needs at its fullest moment, and how much state fits.

For b samples in microbatches of m, S stored elements and the patterns c of what is recomputed,

    bytes = reserved + max over moments j of  fixed_j + running_cj(m) + b p_cj + sigma_j S

where p_cj are the bytes per sample of inputs of units and of graphs, and sigma_j those per
stored element; see [Note: What is alive in a turn].  A rank that computes nothing has reserved
+ sigma S.  Arrays of b and m give arrays of bytes.  A stage of a pipeline holds the inputs and
graphs of all rounds in flight.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from shardhet.pricing.hosts import COPIES_HELD, HostInputPrices
from shardhet.pricing.priced import UnitRun, at_sizes
from shardhet.pricing.step_cost import MemoryParts, MemoryPeaks
from shardhet.records.ops import MAX_ROUNDS
from shardhet.records.plan import RankPlan
from shardhet.records.workload import Unit

STORED_DTYPES = ("float32", "float64")  # in which parameters are kept, too
LEAST_KNOWN_SIZES = 33  # of microbatches, whose bytes are computed at once
AT_ONCE = 2**17  # numbers of bytes
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PeakMemoryPrices(HostInputPrices):
    """Bytes in the turns of a step in a scenario."""

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
            copies += 2 * max(map(workload.cast_bytes, workload.kinds))
        adds_rounds = self.num_rounds > 1 and self.reduce_each_round
        if workload.reduce_dtype != "float32" or adds_rounds:
            trained = max(kind.trained_numel for kind in workload.kinds)
            copies += trained * workload.reduce_itemsize
        if self.two_level_units:
            trained = max(kind.trained_numel for kind in workload.kinds)
            copies += max(0, len(self.cluster.nodes) - 2) * trained * workload.reduce_itemsize
        return workload.state_bytes_per_element + copies / workload.numel

    @cached_property
    def _state_bytes(self) -> float:
        """Of a device that computes, per stored element, besides rows inside of what stays."""
        workload = self.workload
        return workload.state_bytes_per_element - self.inside_bytes / workload.numel

    @cached_property
    def _unsharded_bytes(self) -> Floats:
        """[turns + 1] of gathered parameters; the last is after all turns."""
        if self.is_alone and self.workload.param_dtype in STORED_DTYPES:
            # The rows are what it computes with; some of them are not counted per element.
            return np.full(len(self.held.unit) + 1, float(self.inside_bytes))
        gathered = self.workload.gathered_bytes
        kinds = map(self.sent_kind, self.visited_units)
        of_units = self.held.unsharded @ np.array([float(gathered(kind)) for kind in kinds])
        of_root = sum(map(gathered, self.root_kinds))
        return np.append(of_units, 0.0) + of_root + self.resident_bytes

    @cached_property
    def _grad_bytes(self) -> Floats:
        """[turns + 1] of whole gradients."""
        if self.is_alone:
            return np.zeros(len(self.held.unit) + 1)  # the rows are the gradients
        return self._whole_grad_bytes

    @cached_property
    def _whole_grad_bytes(self) -> Floats:
        held = self.held
        of_root = sum(kind.trained_numel for kind in self.root_kinds)
        has_root = np.append(held.is_backward | (held.round > 0), True)
        of_units = np.append(
            held.grads @ self.trained_bytes, held.last_grads @ self.trained_bytes
        )
        return of_units + has_root * float(of_root * self.workload.reduce_itemsize)

    @cached_property
    def _numel_bytes(self) -> tuple[Floats, Floats]:
        """[turns + 1] bytes per stored element, and by how many bytes that is below the full
        state because gradient shards do not exist yet.  Shares are the same of each unit.
        """
        workload, held = self.workload, self.held
        of_grads = workload.grad_bytes_per_element
        per_numel = self.trained_bytes / workload.numel
        num_rows = held.num_rows
        if self.is_alone:
            num_rows = np.minimum(1, num_rows + held.grads)
        present = np.minimum(num_rows, 1) @ per_numel
        pending = np.append(np.maximum(0.0, of_grads - present), 0.0)
        twice = np.append(np.maximum(num_rows - 1, 0) @ per_numel, self._copied_part)
        numel_bytes = self._state_bytes + self._level_sums
        return numel_bytes - pending + twice, pending

    @property
    def _copied_part(self) -> float:
        """Bytes per stored element of a copy of the largest unit's rows, where one is made."""
        workload = self.workload
        adds_rounds = self.num_rounds > 1 and self.reduce_each_round and not self.is_alone
        if workload.reduce_dtype == "float32" and not adds_rounds:
            return 0.0
        return float(self.trained_bytes.max(initial=0.0)) / workload.numel

    @property
    def _level_sums(self) -> float:
        """Bytes per stored element of sums of nodes, in two levels."""
        if not self.two_level_units:
            return 0.0
        number = max(0, len(self.cluster.nodes) - 2)
        return number * float(self.trained_bytes.max(initial=0.0)) / self.workload.numel

    @cached_property
    def _of_form(self) -> tuple[object, ...]:
        """What memory depends on besides the workload and what a rank does with units."""
        levels = len(self.cluster.nodes) if self.two_level_units else 0
        of_stage = (self.in_flight, self.receives, self.hands_on_bytes)
        few = min(self.num_rounds, max(MAX_ROUNDS, COPIES_HELD))  # more rounds have the same
        return (
            replace(self.form, num_rounds=few),
            of_stage,
            self.is_alone,
            levels,
            self.resident_units,
            self.member and self.member.recomputed,
        )

    def moments(self, rank: RankPlan) -> MemoryPeaks:
        """Those in which the rank may hold the most while it computes."""
        key, known = self.memory_key(rank), self.known.of_workload.moments
        if key not in known:
            found = self.moments_by_turn(rank)
            if rank.optimizer_on_host:
                found = found.and_also(self.launching_copies(found))
            known[key] = found.fullest()
        return known[key]

    def memory_key(self, rank: RankPlan) -> tuple[object, ...]:
        """What says how much memory units and state of a rank need, for the same workload."""
        on_host = rank.inputs_on_host, rank.optimizer_on_host
        return (self._of_form, *self.treated(rank), *on_host)

    def moments_by_turn(self, rank: RankPlan) -> MemoryPeaks:
        """[turns + 1] of at most ``MAX_ROUNDS`` rounds; the last is after all turns."""
        held, units = self.held, self.visited_units
        inputs = np.array([float(self._input_bytes[unit.fqn]) for unit in units])
        leaves = np.array([self.leaves_device(rank, unit) for unit in units])
        graphs = np.array([self._graph_bytes(rank, unit) for unit in units])
        has_grad = np.array([unit.fqn in self._may_leave for unit in units])
        coming = np.where(leaves, inputs, 0.0)
        after = np.append(inputs[1:], float(self.hands_on_bytes))
        before = np.append(0.0, coming[:-1])
        kept = np.cumsum(inputs - coming)
        others = self.in_flight - 1  # rounds, all of whose inputs and graphs are held
        passing = coming + after  # its own input, and what it returns or the gradient of that
        passing += (others > 0) * coming[-1]  # with which the backward that follows begins
        in_backward = held.is_backward * (before + has_grad * inputs)[held.unit]
        of_inputs = (kept + passing)[held.unit] + in_backward + others * kept[-1]
        # At each end of a stage, what it receives next is on its way, and what it sent last.
        of_inputs = of_inputs + 2 * (self.receives * inputs[0] + self.hands_on_bytes)
        of_graphs = np.cumsum(graphs)[held.unit] + others * graphs.sum()
        runs = list(self._runs_of(rank))
        run_of = [runs.index(self.run_of(rank, unit)) for unit in units]
        numel_bytes, pending = self._numel_bytes
        if rank.optimizer_on_host:
            numel_bytes = self.host_numel_bytes
            pending = np.zeros(len(numel_bytes))
        unsharded, grads = self._unsharded_bytes, self._grad_bytes
        if rank.optimizer_on_host and self.is_alone:
            # Its rows are what is gathered, and its whole gradients go to the host.
            unsharded, grads = np.zeros(len(unsharded)), self._whole_grad_bytes
        return MemoryPeaks(
            unsharded_bytes=unsharded,
            grad_bytes=grads,
            input_bytes=np.append(of_inputs, 0.0),
            graph_bytes=np.append(of_graphs, 0.0),
            numel_bytes=numel_bytes,
            pending_bytes=pending,
            runs=(*(run_of[i] for i in held.unit), -1),
        )

    def kept_bytes_per_sample(self, rank: RankPlan) -> Floats:
        """[units] of inputs and graphs that wait for backward once the unit has run."""
        kept = [
            self._input_bytes[unit.fqn] * (not self.leaves_device(rank, unit))
            + self._graph_bytes(rank, unit)
            for unit in self.visited_units
        ]
        return np.array(kept, dtype=np.float64)

    def _graph_bytes(self, rank: RankPlan, unit: Unit) -> float:
        """Bytes of a sample that wait for a unit's backward besides its input."""
        kind = self.kind_for(rank, unit)
        if not rank.recomputes(unit.fqn):
            return float(kind.activation_bytes)
        return float(kind.kv_bytes * self.keeps_received(rank, unit.fqn))

    def _runs_of(self, rank: RankPlan) -> Mapping[UnitRun, int]:
        """How many units run in each way."""
        known, key = self.known.of_workload.runs, self.treated(rank)
        if key not in known:
            known[key] = Counter(self.run_of(rank, unit) for unit in self.visited_units)
        return known[key]


@dataclass(frozen=True)
class MemoryPrices(PeakMemoryPrices):
    """Bytes of ranks in a scenario."""

    def num_recomputed(self, rank: RankPlan) -> int:
        """The number of units that the rank recomputes; 0 if it does not compute."""
        runs = self._runs_of(rank)
        return sum(number for run, number in runs.items() if run.is_recomputed)

    def running_by_size(self, rank: RankPlan, device_kind: str | None, largest: int) -> Floats:
        """[runs + 1, 1 + sizes] what a microbatch needs besides graphs that are kept anyway.

        The sizes are at least those up to the largest.  The last run needs nothing.
        """
        runs, known = self._runs_of(rank), self.known.running_bytes
        units = self.profile.device(device_kind).unit_by_kind
        is_counted = all(
            units[run.kind].peak_bytes is None for run in runs if run.kind in units
        )
        key = (tuple(runs), None if is_counted else device_kind)
        if key not in known or known[key].shape[1] <= largest:
            size = max(largest, LEAST_KNOWN_SIZES)
            found = [self._running_of_unit(run, device_kind, size) for run in runs]
            known[key] = np.array([*found, np.zeros(1 + size)])
        return known[key]

    def needs_more_if_larger(
        self, rank: RankPlan, device_kind: str | None, largest: int
    ) -> bool:
        """Whether microbatches up to the largest need no less memory if they are larger."""
        key, known = (*self.treated(rank), device_kind, largest), self.known.needs_more
        if key not in known:
            running = self.running_by_size(rank, device_kind, largest)[:, 1 : 1 + largest]
            known[key] = bool((np.diff(running) >= 0).all())
        return known[key]

    def _lines_of_all(
        self,
        ranks: Sequence[RankPlan],
        device_kind: str | None,
        batches: Ints,
        sizes: Ints,
    ) -> Iterator[tuple[Floats, Floats, Ints]]:
        """[J, ..., sizes] bytes without stored elements in J moments, [J, ..., 1] bytes per
        element, and [J] of which rank they are; few moments at a time of many batches.

        Each rank says what is recomputed and what is on the host.  ``batches`` [..., 1] have at
        least one sample.
        """
        running, bytes_of, rank_of = self.moments_of_all(
            ranks, device_kind, int(sizes.max(initial=0))
        )
        shape = np.broadcast_shapes(batches.shape, sizes.shape)
        fixed, per_sample, per_numel = (
            each.reshape(-1, *(1 for _ in shape)) for each in bytes_of
        )
        reserved = self.profile.device(device_kind).reserved_bytes
        number = max(1, AT_ONCE // max(1, prod(shape)))
        for start in range(0, len(rank_of), number):
            part = slice(start, start + number)
            needed = reserved + fixed[part] + batches * per_sample[part]
            yield running[part][:, sizes] + needed, per_numel[part], rank_of[part]

    def moments_of_all(
        self, ranks: Sequence[RankPlan], device_kind: str | None, largest: int
    ) -> tuple[Floats, list[Floats], Ints]:
        """Of the moments of several ranks one after the other: [J, 1 + largest] what
        microbatches need, [J] other bytes, those per sample and per element, and whose it is.
        """
        moments = [self.moments(rank) for rank in ranks]
        running = np.concatenate(
            [
                self.running_by_size(rank, device_kind, largest)[[*each.runs], : 1 + largest]
                for rank, each in zip(ranks, moments, strict=True)
            ]
        )
        bytes_of = [(m.fixed_bytes, m.sample_bytes, m.numel_bytes) for m in moments]
        rank_of = np.repeat(np.arange(len(ranks)), [len(each.runs) for each in moments])
        return running, [*map(np.concatenate, zip(*bytes_of, strict=True))], rank_of

    def bytes_per_sample(self, rank: RankPlan) -> int:
        """Bytes that each sample of a rank's batch adds at most, whatever the microbatches."""
        return int(self.moments(rank).sample_bytes.max())

    def room_for_state(
        self,
        ranks: Sequence[RankPlan],
        device_kind: str | None,
        budget_bytes: float,
        *,
        batches: Ints,
        sizes: Ints,
        host_bytes: float,
    ) -> Floats:
        """[ranks, ..., sizes] elements of state that fit besides these batches [..., 1], on the
        device or in ``host_bytes`` of its host; negative if not even the batch fits.

        Each rank says which, and what is recomputed.
        """
        shape = np.broadcast_shapes(batches.shape, sizes.shape)
        rooms: Floats = np.full((len(ranks), *shape), inf)
        for own, per_numel, rank_of in self._lines_of_all(ranks, device_kind, batches, sizes):
            starts = np.flatnonzero(np.diff(rank_of, prepend=-1))
            least = np.minimum.reduceat((budget_bytes - own) / per_numel, starts, axis=0)
            found = rank_of[starts]
            rooms[found] = np.minimum(rooms[found], least)
        reserved = self.profile.device(device_kind).reserved_bytes
        for i, rank in enumerate(ranks):
            idle = (budget_bytes - reserved) / self.bytes_per_numel_of(rank)
            rooms[i] = np.where(batches > 0, rooms[i], idle)
            if host_bytes < inf:
                inputs = batches * float(self.host_bytes_per_sample(rank))
                left = (host_bytes - inputs) / self.workload.state_bytes_per_element
                is_limit = rank.optimizer_on_host or left < 0
                rooms[i] = np.where(is_limit, np.minimum(rooms[i], left), rooms[i])
        return rooms

    def bytes_per_numel_of(self, rank: RankPlan) -> float:
        """Bytes on the device per element of a rank that only stores, buffers included."""
        if rank.optimizer_on_host:
            return self.device_bytes_per_host_numel
        return self.bytes_per_stored_numel

    def _running_of_unit(self, run: UnitRun, device_kind: str | None, largest: int) -> Floats:
        """[1 + largest] what one unit needs while it runs, by size of the microbatch.

        While the gradient of a parameter is made, the graph may still be there.
        """
        whole = self.workload.kind_by_name[run.kind]
        kind = whole.in_tiles(run.num_tiles)
        sizes = np.arange(1 + largest, dtype=np.float64)
        graph = sizes * kind.activation_bytes
        measured = self.profile.unit(device_kind, kind.name).peak_bytes
        of_param = kind.max_trained_numel * self.workload.param_itemsize
        peak = graph + np.maximum(sizes * kind.transient_bytes, of_param)
        if measured is not None:
            counted = whole.activation_bytes + whole.transient_bytes
            fewer = counted - kind.activation_bytes - kind.transient_bytes  # in tiles
            peak = np.maximum(0.0, np.trunc(at_sizes(measured, largest)) - sizes * fewer)
        return peak if run.is_recomputed else np.maximum(0.0, peak - graph)

    def bytes_per_numel_range(self, rank: RankPlan) -> tuple[float, float]:
        """The least and the most bytes that an element adds to the fullest moment."""
        if not rank.rank_batch_size:
            return (self.bytes_per_numel_of(rank),) * 2
        numel_bytes = self.moments(rank).numel_bytes
        return float(numel_bytes.min()), float(numel_bytes.max())

    def lines_of(self, rank: RankPlan) -> Floats:
        """[2, moments] bytes of a rank without stored elements, and per element."""
        kind = rank.device.kind
        reserved = self.profile.device(kind).reserved_bytes
        if not rank.rank_batch_size:
            return np.array([[reserved], [self.bytes_per_numel_of(rank)]])
        running, bytes_of, _ = self.moments_of_all((rank,), kind, max(rank.microbatch_sizes))
        fixed, per_sample, per_numel = bytes_of
        own = running[:, -1] + (reserved + fixed + rank.rank_batch_size * per_sample)
        return np.stack((own, per_numel))

    def memory(self, rank: RankPlan, stored_numel: int) -> MemoryParts:
        """The memory of a rank that stores this many elements, by purpose.

        ``CostModel`` (pricing/cost.py) shows it; the planner asks ``room_for_state`` and
        ``moments_of_all``.
        """
        workload, batch = self.workload, rank.rank_batch_size
        reserved = self.profile.device(rank.device.kind).reserved_bytes
        state_bytes = int(stored_numel * workload.state_bytes_per_element)
        host_bytes = batch * self.host_bytes_per_sample(rank)
        if rank.optimizer_on_host:
            host_bytes += state_bytes
            state_bytes = int(stored_numel * self.sent_itemsize)
        if not batch:
            kept = int(stored_numel * self.bytes_per_numel_of(rank))
            return MemoryParts(
                state_bytes=state_bytes,
                shard_buffer_bytes=kept - state_bytes,
                reserved_bytes=reserved,
                host_bytes=host_bytes,
            )
        inside_bytes = 0
        if not rank.optimizer_on_host:
            inside_bytes = state_bytes - int(stored_numel * self._state_bytes)
        own, per_numel = self.lines_of(rank)
        j, moments = int(np.argmax(own + stored_numel * per_numel)), self.moments(rank)
        size = max(rank.microbatch_sizes)
        running = self.running_by_size(rank, rank.device.kind, size)
        pending_bytes = int(stored_numel * moments.pending_bytes[j])
        kept = int(stored_numel * moments.numel_bytes[j])
        return MemoryParts(
            state_bytes=state_bytes,
            shard_buffer_bytes=kept - (state_bytes - inside_bytes) + pending_bytes,
            pending_bytes=pending_bytes,
            unsharded_bytes=int(moments.unsharded_bytes[j]) - inside_bytes,
            grad_bytes=int(moments.grad_bytes[j]),
            boundary_bytes=int(batch * moments.input_bytes[j]),
            activation_bytes=int(
                batch * moments.graph_bytes[j] + running[moments.runs[j], size]
            ),
            reserved_bytes=reserved,
            host_bytes=host_bytes,
        )
