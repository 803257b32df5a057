"""Constraints that a user puts on a plan, besides those of the hardware."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any

from shardhet.planner.forms import BatchRounds
from shardhet.records.cluster import Cluster
from shardhet.records.codec import repeated
from shardhet.records.schedule import StepForm

if TYPE_CHECKING:
    from shardhet.pricing.hosts import HostPart
    from shardhet.pricing.part import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """The constraints on one device."""

    memory_budget_bytes: int | None = None  # less than the cluster's
    rank_batch_size: int | None = None  # exactly this many samples
    max_microbatch_size: int | None = None
    max_state_share: float | None = None  # of the whole state; 0: it stores nothing
    state_share: float | None = None  # exactly this part, up to rounding to rows
    recomputes: bool | None = None  # everything or nothing; None leaves it open
    host_bytes: float = inf  # at most so much of its host's memory


NO_LIMITS = DeviceLimits()
TOLERANCE = (
    5e-3  # of the step, by which a simpler plan may be slower: predictions are wrong by more
)
SUM_TOLERANCE = 1e-6  # on a sum of shares that are written as decimals


@dataclass(frozen=True, slots=True)
class Role:
    """What distinguishes devices for the planner; devices of one role are interchangeable."""

    device_kind: str | None
    budget_bytes: int
    limits: DeviceLimits  # without the budget
    host: "HostPart | None" = None  # where its optimizer may step; None: on the device only
    host_bytes: float = inf  # that it may take of the host's memory, if the others take none
    member: "Member | None" = None  # of a context group, which has all of its members or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Demands on single devices, on sets of devices, and on all devices."""

    limits: Mapping[int, DeviceLimits] = field(default_factory=dict)  # by position
    # sets of positions with the same microbatches, recomputation and share of the state
    equal: Sequence[Sequence[int]] = ()
    # By position, who computes the same samples, each its part of the tokens.
    context_groups: "Sequence[Mapping[int, Member]]" = ()
    may_share_samples: bool = False  # by tokens, in context groups that the planner chooses
    max_microbatch_size: int | None = None
    has_even_state: bool = False  # all devices store the same
    has_even_batches: bool = False  # all compute as many samples, or the first one more
    may_keep_inputs_on_host: bool = False  # of recomputed units, in the memory of their hosts
    # Of devices without an exact share: the optimizer steps there, at an equal part of a host's
    # speed, in any part of its memory.
    may_keep_optimizer_on_host: bool = False
    may_keep_frozen_weights: bool = True  # unsharded over steps, where they are computed with
    max_rounds: int | None = None  # of a step; None leaves it open
    form: StepForm | None = None  # exactly this one; None leaves it open
    has_one_level: bool = False  # of a stage: no two_level_units, and no resident_units
    rounds_in_flight: int = 1  # of a stage of a pipeline: it holds the activations of so many
    receives: bool = False  # a stage: whether it is a later one than the first
    hands_on_bytes: int = 0  # a stage: per sample, to the next one
    whole_matrices: tuple[str, ...] = ()  # units whose matrices have owners, for Muon

    def check(self, world_size: int) -> None:
        """Raise ``ValueError`` if they name missing devices or contradict each other."""
        for position in self.limits:
            check_position("limits", position, world_size)
        members = [position for each in self.equal for position in each]
        for position in members:
            check_position("equal", position, world_size)
        if twice := repeated(members):
            raise ValueError(
                f"plan: equal names devices {twice} more than once. Put each into one set."
            )
        for each in self.equal:
            claims = {self.limits.get(i, NO_LIMITS).recomputes for i in each} - {None}
            if len(claims) > 1:
                raise ValueError(
                    f"plan: devices {list(each)} must be equal but limits say of some that "
                    "they recompute and of others that they do not. Drop one demand."
                )
        for position, limits in self.limits.items():
            for name in ("max_state_share", "state_share"):
                share = getattr(limits, name)
                if share is not None and not 0 <= share <= 1:
                    raise ValueError(
                        f"plan: limits of device {position}: {name} is {share} but must lie "
                        "between 0 and 1."
                    )
            if limits.state_share is not None and limits.max_state_share is not None:
                raise ValueError(
                    f"plan: limits of device {position}: state_share is what it stores, "
                    "max_state_share the most that it does. Drop one of them."
                )
        self._check_state_shares(world_size)
        _check_whole_matrices(self)

    def check_batches(self, world_size: int, global_batch_size: int) -> None:
        """Raise ``ValueError`` if the batches that limits give cannot sum to the global one."""
        stated = self._stated("rank_batch_size")
        total = sum(stated.values())
        is_open = len(stated) < world_size
        if total > global_batch_size or (not is_open and total < global_batch_size):
            raise ValueError(
                f"plan: the batches that limits give sum to {total}, but global_batch_size is "
                f"{global_batch_size}. Change one of them, or leave a device's batch open."
            )

    def with_less_on_hosts(self) -> list["Constraints"]:
        """These, and those that allow less in the memory of hosts, the least first."""
        found: list[Constraints] = []
        for optimizer, inputs in product((False, True), repeat=2):
            less = replace(
                self,
                may_keep_optimizer_on_host=optimizer and self.may_keep_optimizer_on_host,
                may_keep_inputs_on_host=inputs and self.may_keep_inputs_on_host,
            )
            if less not in found:
                found.append(less)
        return found

    def of_round(self, rounds: BatchRounds, world_size: int) -> "Constraints | None":
        """Those on each of these rounds; None if batches cannot be cut into so many."""
        if self.has_even_batches:
            could_be_even = not rounds.global_batch_size % world_size
            if could_be_even and rounds.round_size % world_size:
                return None  # the first devices would compute more than the others
            return _with_batches(self, rounds.round_size, world_size)
        stated = self._stated("rank_batch_size")
        if rounds.number == 1 or not stated:
            return self
        if any(batch % rounds.number for batch in stated.values()):
            return None
        limits = dict(self.limits)
        for i, batch in stated.items():
            limits[i] = replace(
                limits.get(i, NO_LIMITS), rank_batch_size=batch // rounds.number
            )
        return replace(self, limits=limits)

    def rank_batch_size(self, position: int) -> int | None:
        """The batch that is demanded of the device, or of one that it must equal."""
        return self._stated("rank_batch_size").get(position)

    def _stated(self, name: str) -> dict[int, Any]:
        """What limits state by this name, of each device and of those that must equal it."""
        values = ((i, getattr(each, name)) for i, each in self.limits.items())
        stated = {i: value for i, value in values if value is not None}
        if stated:
            for positions in self.equal:
                of_set = [stated[i] for i in positions if i in stated]
                if of_set:
                    stated |= dict.fromkeys(positions, of_set[0])
        return stated

    def _check_state_shares(self, world_size: int) -> None:
        for each in self.equal:
            shares = [self.limits[i].state_share for i in each if i in self.limits]
            if len(stated := {share for share in shares if share is not None}) > 1:
                raise ValueError(
                    f"plan: devices {list(each)} must be equal but limits give them the state "
                    f"shares {sorted(stated)}. Give them the same one."
                )
        stated_shares = self._stated("state_share")
        total = sum(stated_shares.values())
        has_rest = len(stated_shares) < world_size
        if total > 1 + SUM_TOLERANCE or (not has_rest and total < 1 - SUM_TOLERANCE):
            raise ValueError(
                f"plan: the state shares that limits give sum to {total:g} but "
                f"{'may be at most' if has_rest else 'all devices together must store'} 1."
            )

    def state_shares(self, world_size: int) -> dict[int, float]:
        """The exact share of each device that has one, by position.

        The shares sum to 1 if every device has one.
        """
        stated = self._stated("state_share")
        shares = {i: stated[i] for i in sorted(stated) if i < world_size}
        total = sum(shares.values())
        if total > 1 - SUM_TOLERANCE:
            return {i: share / total for i, share in shares.items()}
        return shares

    def state_share(self, position: int) -> float | None:
        """The exact share that is demanded of the device, or of one that it must equal."""
        return self._stated("state_share").get(position)

    @property
    def needed(self) -> list[int]:
        """The positions of which samples or state are demanded."""
        stated = [self._stated("rank_batch_size"), self._stated("state_share")]
        return sorted({i for each in stated for i, value in each.items() if value})

    def not_idle(self, world_size: int) -> tuple[int, ...]:
        """The positions that may have samples or state; all if all must do alike."""
        batches = self._stated("rank_batch_size")
        shares = self._stated("max_state_share") | self._stated("state_share")
        idle = {i for i, batch in batches.items() if batch == 0 and shares.get(i) == 0}
        if self.has_even_state or self.has_even_batches:
            idle = set()
        return tuple(i for i in range(world_size) if i not in idle)

    def only(self, positions: Collection[int]) -> "Constraints":
        """The constraints on these devices, in a cluster that has no others."""
        place = {position: i for i, position in enumerate(sorted(positions))}
        sets = [tuple(place[i] for i in each if i in place) for each in self.equal]
        groups = (each for each in self.context_groups if each.keys() <= place.keys())
        return replace(
            self,
            context_groups=tuple({place[i]: m for i, m in e.items()} for e in groups),
            limits={place[i]: each for i, each in self.limits.items() if i in place},
            equal=tuple(each for each in sets if len(each) > 1),
        )

    def of_device(self, position: int) -> tuple[object, ...]:
        """What is demanded of a device, to compare it with others."""
        sets = tuple(i for i, each in enumerate(self.equal) if position in each)
        return self.limits.get(position, NO_LIMITS), sets

    def member(self, position: int) -> "Member | None":
        """The device as one of a context group, if it is in one."""
        return next((e[position] for e in self.context_groups if position in e), None)

    def roles(self, cluster: Cluster) -> list[Role]:
        """The role of every device, in the order of the cluster; equal roles are one object."""
        shares = self.state_shares(cluster.world_size)
        hosts, memory = _host_parts(self, cluster), host_bytes(self, cluster)
        kinds = (device.kind for device in cluster.devices)
        keys = list(zip(kinds, cluster.budgets, hosts, memory, strict=True))
        usual = {key: Role(*key[:2], NO_LIMITS, *key[2:]) for key in dict.fromkeys(keys)}
        roles, known = [*map(usual.__getitem__, keys)], {each: each for each in usual.values()}
        members = {i: member for each in self.context_groups for i, member in each.items()}
        for i in {*self.limits, *shares, *members}:
            role = replace(
                roles[i],
                budget_bytes=self.budget_bytes(cluster, i),
                limits=replace(
                    self.limits.get(i, NO_LIMITS),
                    memory_budget_bytes=None,
                    state_share=shares.get(i),
                    host_bytes=inf,
                ),
                host=None if i in shares else hosts[i],
                member=members.get(i),
            )
            roles[i] = known.setdefault(role, role)
        return roles

    def with_budgets(
        self, nbytes_by_position: Mapping[int, float], what: str = "memory_budget_bytes"
    ) -> "Constraints":
        """The same with these memory budgets, or ``host_bytes``, for some devices."""
        limits = dict(self.limits)
        for position, nbytes in nbytes_by_position.items():
            changed: dict[str, Any] = {what: nbytes}
            limits[position] = replace(limits.get(position, NO_LIMITS), **changed)
        return replace(self, limits=limits)

    def budget_bytes(self, cluster: Cluster, position: int) -> int:
        """The smaller of the cluster's budget and the demanded one."""
        budget = cluster.budgets[position]
        stated = self.limits.get(position, NO_LIMITS).memory_budget_bytes
        return budget if stated is None else min(budget, stated)

    def budgets(self, cluster: Cluster) -> list[int]:
        """``budget_bytes`` of every device, in the order of the cluster."""
        budgets = list(cluster.budgets)
        for i, limits in self.limits.items():
            if limits.memory_budget_bytes is not None:
                budgets[i] = min(budgets[i], limits.memory_budget_bytes)
        return budgets


def _with_batches(constraints: Constraints, round_size: int, world_size: int) -> Constraints:
    """The same batch of every device; the remainder goes to the first devices."""
    each, rest = divmod(round_size, world_size)
    limits = {
        position: replace(
            constraints.limits.get(position, NO_LIMITS),
            rank_batch_size=each + (position < rest),
        )
        for position in range(world_size)
    }
    # The remainder may separate devices that must be equal.
    equal = () if rest else constraints.equal
    return replace(constraints, limits=limits, equal=equal, has_even_batches=False)


def _host_parts(constraints: Constraints, cluster: Cluster) -> "list[HostPart | None]":
    """Where the optimizer of each device may step besides on the device."""
    if not constraints.may_keep_optimizer_on_host:
        return [None] * cluster.world_size
    from shardhet.pricing.hosts import HostPart  # imports numpy

    numbers = [(node, len(node.devices)) for node in cluster.nodes]
    return [HostPart.of(node, number) for node, number in numbers for _ in range(number)]


def _check_whole_matrices(constraints: Constraints) -> None:
    """Raise ``ValueError`` for constraints that owners of matrices are not chosen with."""
    shares = [each.state_share for each in constraints.limits.values()]
    for is_set, what in (
        (constraints.may_keep_optimizer_on_host, "optimizers on hosts"),
        (constraints.equal or constraints.has_even_state, "equal devices"),
        (any(share is not None for share in shares), "exact shares of the state"),
    ):
        if constraints.whole_matrices and is_set:
            raise ValueError(
                f"plan: whole_matrices together with {what} is not planned for. Drop one of "
                "them."
            )


def host_bytes(constraints: Constraints, cluster: Cluster) -> list[float]:
    """How much each device may take of its host's memory, if it may keep anything there."""
    if not (constraints.may_keep_optimizer_on_host or constraints.may_keep_inputs_on_host):
        return [inf] * cluster.world_size
    stated = [node.host_memory_bytes or inf for node in cluster.nodes for _ in node.devices]
    limited = [
        constraints.limits.get(i, NO_LIMITS).host_bytes for i in range(cluster.world_size)
    ]
    return list(map(min, stated, limited))


def check_position(what: str, position: int, world_size: int) -> None:
    """Raise ``ValueError`` if ``what`` names a device that the cluster does not have."""
    if not 0 <= position < world_size:
        raise ValueError(
            f"plan: {what} names device {position} but the cluster has devices 0 to "
            f"{world_size - 1}. Name one of them."
        )
