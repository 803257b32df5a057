"""What a plan is asked to keep to besides what the hardware allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardhet.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What is demanded of one device."""

    memory_budget_bytes: int | None = None  # less than the cluster's
    rank_batch_size: int | None = None  # exactly this many samples
    max_microbatch_size: int | None = None
    max_state_share: float | None = None  # of the whole state; 0: it stores nothing
    recomputes: bool | None = None  # everything, or nothing; None leaves it open


NO_LIMITS = DeviceLimits()


@dataclass(frozen=True, slots=True)
class Role:
    """What tells devices apart for the planner; equal ones are interchangeable."""

    device_kind: str | None
    budget_bytes: int
    limits: DeviceLimits  # without the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """Demands on single devices, on sets of them, and on all."""

    limits: Mapping[int, DeviceLimits] = field(default_factory=dict)  # by position
    # sets of positions with the same microbatches, recomputation and share of the state
    equal: Sequence[Sequence[int]] = ()
    max_microbatch_size: int | None = None
    has_even_state: bool = False  # all devices store the same

    def check(self, world_size: int) -> None:
        """Raise ``ValueError`` naming a position that is not there, or in two sets."""
        for position in self.limits:
            _check_position("limits", position, world_size)
        members = [position for each in self.equal for position in each]
        for position in members:
            _check_position("equal", position, world_size)
        repeated = sorted({each for each in members if members.count(each) > 1})
        if repeated:
            raise ValueError(
                f"plan: equal names devices {repeated} more than once. Put each into one set."
            )
        for each in self.equal:
            claims = {self.limits.get(i, NO_LIMITS).recomputes for i in each} - {None}
            if len(claims) > 1:
                raise ValueError(
                    f"plan: devices {list(each)} must be equal but limits say of some that "
                    "they recompute and of others that they do not. Drop one demand."
                )
        for position, limits in self.limits.items():
            share = limits.max_state_share
            if share is not None and not 0 <= share <= 1:
                raise ValueError(
                    f"plan: limits of device {position}: max_state_share is {share} but must "
                    "lie between 0 and 1."
                )

    def bundles(self, world_size: int) -> list[tuple[int, ...]]:
        """All positions, in sets that act as one, by their first members."""
        sets = [tuple(sorted(each)) for each in self.equal if each]
        members = {position for each in sets for position in each}
        alone = [(position,) for position in range(world_size) if position not in members]
        return sorted([*sets, *alone])

    def role(self, cluster: Cluster, position: int) -> Role:
        """What the device at ``position`` is to the planner."""
        limits = self.limits.get(position, NO_LIMITS)
        return Role(
            cluster.devices[position].kind,
            self.budget_bytes(cluster, position),
            replace(limits, memory_budget_bytes=None),
        )

    def with_budgets(self, nbytes_by_position: Mapping[int, int]) -> "Demands":
        """The same with these budgets demanded of some devices."""
        limits = {
            position: replace(self.limits.get(position, NO_LIMITS), memory_budget_bytes=nbytes)
            for position, nbytes in nbytes_by_position.items()
        }
        return replace(self, limits={**self.limits, **limits})

    def budget_bytes(self, cluster: Cluster, position: int) -> int:
        """The cluster's budget, or the smaller one that is demanded."""
        budget = cluster.memory_budget_bytes(position)
        stated = self.limits.get(position, NO_LIMITS).memory_budget_bytes
        return budget if stated is None else min(budget, stated)


def _check_position(what: str, position: int, world_size: int) -> None:
    if not 0 <= position < world_size:
        raise ValueError(
            f"plan: {what} names device {position} but the cluster has devices 0 to "
            f"{world_size - 1}. Name one of them."
        )
