"""The predicted cost of a step: seconds and bytes of its turns, its ranks and the whole.

``shardhet.pricing.cost`` creates these records.

[Note: What is alive in a turn]
While a rank computes a turn of unit u, its device holds

    unsharded    u and what the schedule gathers ahead or keeps
    gradients    in backward: whole gradients of u, of the unit that is being reduced, and of
                 units that wait for the last round
    rows         of gradients that are reduced, and one more part for each unit that is being
                 reduced in a later round
    inputs       of all units up to u, of which [Note: Inputs on the host] says some are away;
                 what u returns, or in backward its gradient and that of the input
    graphs       of the units up to u that are not recomputed
    running      what one microbatch of u needs besides

Units before u are sharded and have no gradients yet; what belongs to units after u is gone, but
for its rows.  So no two maxima of different turns are added up.  At the end of the step only
rows and optimizer states remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from shardhet.records.schedule import Phase

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes that one rank holds at its fullest moment, by purpose."""

    state_bytes: int  # parameters, gradients and optimizer state that it stores
    shard_buffer_bytes: int = 0  # copies of its shards that are being communicated
    unsharded_bytes: int = 0  # gathered parameters of the current and the next unit
    grad_bytes: int = 0  # unsharded gradients of the current unit and the one being reduced
    boundary_bytes: int = 0  # inputs of units for the whole rank batch, and their gradients
    activation_bytes: int = 0  # graphs that are kept, and what the running microbatch needs
    reserved_bytes: int  # of the process besides its tensors
    pending_bytes: int = 0  # of the state: rows of gradients that do not exist yet
    host_bytes: int = 0  # in the memory of the host, which is not the device's

    @property
    def resting_bytes(self) -> int:
        """What the rank has of its state at that moment, and its buffers."""
        return self.state_bytes - self.pending_bytes + self.shard_buffer_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all parts on the device."""
        return (
            self.resting_bytes
            + self.unsharded_bytes
            + self.grad_bytes
            + self.boundary_bytes
            + self.activation_bytes
            + self.reserved_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeaks:
    """Moments of a step on one rank, [J]; each may be the one in which it holds the most.

    In moment j it holds ``unsharded + grads + b sample + S numel + running(m)`` bytes, and what
    is reserved, for b samples in microbatches of m and S stored elements.
    """

    unsharded_bytes: Floats  # gathered parameters
    grad_bytes: Floats  # whole gradients
    input_bytes: Floats  # per sample: inputs of units and their gradients
    graph_bytes: Floats  # per sample
    numel_bytes: Floats  # per stored element, buffers included
    pending_bytes: Floats  # per stored element: rows of gradients that do not exist yet
    runs: tuple[int, ...]  # what runs: indices into a list of the rank's; -1: nothing

    @property
    def fixed_bytes(self) -> Floats:
        """What depends on neither samples nor elements nor microbatches."""
        return self.unsharded_bytes + self.grad_bytes

    @property
    def sample_bytes(self) -> Floats:
        """Bytes per sample."""
        return self.input_bytes + self.graph_bytes

    @property
    def _bytes(self) -> Floats:
        return np.stack((self.fixed_bytes, self.sample_bytes, self.numel_bytes))

    def only(self, kept: Bools) -> "MemoryPeaks":
        """Some of the moments."""
        arrays = {name: each[kept] for name, each in self._arrays.items()}
        return MemoryPeaks(**arrays, runs=tuple(np.array(self.runs)[kept].tolist()))

    def and_also(self, others: "MemoryPeaks") -> "MemoryPeaks":
        """These moments and others."""
        pairs = zip(self._arrays.items(), others._arrays.values(), strict=True)
        arrays = {name: np.append(own, other) for (name, own), other in pairs}
        return MemoryPeaks(**arrays, runs=(*self.runs, *others.runs))

    @property
    def _arrays(self) -> dict[str, Floats]:
        names = [each.name for each in fields(self) if each.name != "runs"]
        return {name: getattr(self, name) for name in names}

    def fullest(self) -> "MemoryPeaks":
        """The moments that can be the peak. Left out are those that never need more than
        some other one, or than the larger of their two neighbours.
        """
        found = self.only(~self._between_neighbours())
        nbytes, runs = found._bytes, np.array(found.runs)
        # [i, j]: moment j needs at least as much as i, and comes first if they are equal.
        covers = (nbytes[:, None, :] >= nbytes[:, :, None]).all(axis=0)
        covers &= (runs[None, :] == runs[:, None]) | (runs[:, None] < 0)
        later = np.arange(len(runs))[None, :] >= np.arange(len(runs))[:, None]
        covers &= ~(covers.T & later)
        return found.only(~covers.any(axis=1))

    def _between_neighbours(self) -> Bools:
        """Which lie on or below the line between their neighbours, which run the same.

        Of a row of such moments the first or the last needs the most.
        """
        nbytes, runs = self._bytes, np.array(self.runs)
        is_between = np.zeros(len(runs), dtype=bool)
        middle = (nbytes[:, :-2] + nbytes[:, 2:]) / 2
        below = (nbytes[:, 1:-1] <= middle + 1e-9 * np.abs(middle)).all(axis=0)
        is_between[1:-1] = below & (runs[1:-1] == runs[:-2]) & (runs[1:-1] == runs[2:])
        return is_between


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """The predicted time and memory of one rank in a step."""

    forward_s: float  # compute only
    backward_s: float  # compute only, recomputation included
    optimizer_s: float
    stored_numel: int
    memory: MemoryParts
    memory_budget_bytes: int
    host_has_room: bool = True  # for what all ranks of the host keep there

    @property
    def fits(self) -> bool:
        """Whether the rank stays within its memory budget, and its host within its memory."""
        return self.host_has_room and self.memory.total_bytes <= self.memory_budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCost:
    """The cost of all turns of one class in one phase together."""

    unit_kind: str
    phase: Phase
    compute_s: float  # of the slowest rank
    comm_s: float  # of the collectives that overlap it
    seconds: float  # of the turns, compute and communication overlapped

    @property
    def is_paced_by_links(self) -> bool:
        """Whether the turns last as long as the collectives that overlap them."""
        return self.seconds <= self.comm_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The predicted cost of a whole step."""

    turns: tuple[TurnCost, ...]
    optimizer_s: float
    exposed_comm_s: float  # before the first turn and after the last
    overhead_s: float  # the runtime's own, in all turns
    ranks: tuple[RankCost, ...]

    @property
    def forward_s(self) -> float:
        """Seconds of all forward turns."""
        return sum(turn.seconds for turn in self.turns if turn.phase is Phase.FORWARD)

    @property
    def backward_s(self) -> float:
        """Seconds of all backward turns."""
        return sum(turn.seconds for turn in self.turns if turn.phase is Phase.BACKWARD)

    @property
    def step_time_s(self) -> float:
        """Seconds of one optimizer step."""
        beside_s = self.optimizer_s + self.exposed_comm_s + self.overhead_s
        return self.forward_s + self.backward_s + beside_s

    @property
    def distinct_ranks(self) -> list[RankCost]:
        """Of ranks that share a record of their cost, one."""
        return list({id(rank): rank for rank in self.ranks}.values())

    def within(self, budgets: Sequence[int]) -> "StepCost":
        """The same cost with these memory budgets, one per rank, instead of the cluster's."""
        if budgets == [rank.memory_budget_bytes for rank in self.ranks]:
            return self
        ranks = tuple(
            replace(rank, memory_budget_bytes=budget)
            for rank, budget in zip(self.ranks, budgets, strict=True)
        )
        return replace(self, ranks=ranks)
