"""The predicted cost of a step: seconds and bytes of its turns, its ranks and the whole.

``shardhet.pricing.cost`` creates these records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardhet.records.schedule import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes that one rank holds at its fullest moment, by purpose."""

    state_bytes: int  # parameters, gradients and optimizer state that it stores
    shard_buffer_bytes: int  # copies of its shards that are being communicated
    unsharded_bytes: int  # gathered parameters of the current and the next unit
    grad_bytes: int  # unsharded gradients of the current unit and the one being reduced
    boundary_bytes: int  # inputs of every unit for the whole rank batch, and their gradients
    activation_bytes: int  # graphs that are kept, and what the running microbatch needs
    reserved_bytes: int  # of the process besides its tensors
    host_bytes: int = 0  # in the memory of the host, which is not the device's

    @property
    def total_bytes(self) -> int:
        """The sum of all parts on the device."""
        return (
            self.state_bytes
            + self.shard_buffer_bytes
            + self.unsharded_bytes
            + self.grad_bytes
            + self.boundary_bytes
            + self.activation_bytes
            + self.reserved_bytes
        )


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

    def within(self, budgets: Sequence[int]) -> "StepCost":
        """The same cost with these memory budgets, one per rank, instead of the cluster's."""
        if budgets == [rank.memory_budget_bytes for rank in self.ranks]:
            return self
        ranks = tuple(
            replace(rank, memory_budget_bytes=budget)
            for rank, budget in zip(self.ranks, budgets, strict=True)
        )
        return replace(self, ranks=ranks)
