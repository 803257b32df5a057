"""The common base of the prices of seconds and of bytes, and measured curves at all sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardhet.pricing.part import Member, part_of, part_of_samples
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.step_cost import MemoryPeaks
from shardhet.records.cluster import Cluster
from shardhet.records.plan import Plan, RankPlan, is_matched
from shardhet.records.profiles import Collectives, Curve, Profile
from shardhet.records.schedule import LaunchKind, StepForm
from shardhet.records.workload import Unit, UnitKind, Workload

Floats = NDArray[np.float64]
FORM_FIELDS = [each.name for each in fields(StepForm)]


def at_sizes(curve: Curve, largest: int) -> Floats:
    """[1 + largest] ``curve.at`` of every size; 0 at size 0."""
    last = curve.positions[-1]
    first = range(1, 1 + min(largest, int(last)))
    beyond = curve.values[-1] + curve.slope_beyond * (
        np.arange(1 + len(first), 1 + largest) - last
    )
    return np.concatenate(([0.0], [curve.at(size) for size in first], np.maximum(0.0, beyond)))


class UnitRun(NamedTuple):
    """How a unit runs."""

    kind: str
    is_recomputed: bool
    num_tiles: int


class FewRounds(NamedTuple):
    """Collectives of a step of at most three rounds."""

    beside_s: Floats  # [rounds, classes, 2] beside forward and backward
    exposed: list[tuple[int, float]]  # rounds and seconds of launches that overlap nothing
    root_s: float


@dataclass(slots=True)
class KnownOfWorkload:
    """What was computed of a workload alone, which is the same on any devices."""

    # Moments in which a rank may hold the most, by form and what it does with units.
    moments: dict[tuple[object, ...], MemoryPeaks] = field(default_factory=dict)
    # Samples that fit, likewise, and by what is left to them.
    fitting: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    # How many units run in each way, by patterns.
    runs: dict[tuple[object, ...], Mapping[UnitRun, int]] = field(default_factory=dict)
    # Units of one kind that the same ranks recompute, by what ranks recompute.
    alike: dict[tuple[tuple[str, ...], ...], list[list[int]]] = field(default_factory=dict)
    # What devices may do with units, by number of steps and what hosts may hold.
    policies: dict[tuple[int, bool, bool], tuple[RankPlan, ...]] = field(default_factory=dict)


@lru_cache(maxsize=32)
def _known_of(workload: Workload) -> KnownOfWorkload:
    return KnownOfWorkload()


@dataclass(slots=True)
class Known:
    """What was computed of a workload and a profile, for plans of any form."""

    of: tuple[Workload, Profile] | None = None
    of_workload: KnownOfWorkload = field(init=False)
    # Seconds by device kind, unit kind and microbatches.
    seconds: dict[tuple[str | None, str, tuple[int, ...]], tuple[float, float]] = field(
        default_factory=dict
    )
    running_bytes: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    # [2, 1 + sizes] forward and backward by device kind, unit kind and largest microbatch.
    curves_s: dict[tuple[str | None, str, int], Floats] = field(default_factory=dict)
    # Whether larger microbatches need no less, by patterns, device kind and largest microbatch.
    needs_more: dict[tuple[object, ...], bool] = field(default_factory=dict)
    # Collectives of at most three rounds, by their form and what their price depends on.
    few_rounds: dict[tuple[object, ...], FewRounds] = field(default_factory=dict)
    # Seconds of launches by unit, by unevenness and what else their price depends on.
    launches: dict[tuple[object, ...], dict[LaunchKind, list[float]]] = field(
        default_factory=dict
    )
    # Shares of the last plan, and the elements that they are.
    stored: tuple[tuple[float, ...], list[int]] | None = None
    # Scenarios of parts of the cluster, and what is known of each, by positions.
    parts: dict[tuple[int, ...], tuple[Scenario, "Known"]] = field(default_factory=dict)
    # What is known of members of context groups.
    members: dict[Member, "Known"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.of is not None:
            self.of_workload = _known_of(self.of[0])


@dataclass(frozen=True)
class Priced:
    """Base class: a scenario and what follows from it, for plans of one form (``StepForm``)."""

    scenario: Scenario
    reshard_after_forward: bool = True  # else units stay unsharded until their backward
    num_rounds: int = 1
    reshard_after_backward: bool = True
    reduce_each_round: bool = True
    two_level_units: tuple[str, ...] = ()  # as in ``Plan``
    resident_units: tuple[str, ...] = ()  # likewise
    in_flight: int = 1  # rounds whose activations are held at once, as in a stage of a pipeline
    receives: bool = False  # whether another stage hands over the inputs of the first unit
    hands_on_bytes: int = 0  # per sample, to the next stage
    member: Member | None = None  # of a context group, whose part of each sample is priced
    beside_idle: bool = False  # whether other devices take no part
    known: Known = field(default_factory=Known, repr=False, compare=False)

    def __post_init__(self) -> None:
        of = self.known.of
        if of is None or of[0] is not self.workload or of[1] is not self.profile:
            object.__setattr__(self, "known", Known((self.workload, self.profile)))

    @property
    def form(self) -> StepForm:
        """The form of the plans that are priced."""
        return StepForm.of(self)

    def in_form(self, form: StepForm) -> Self:
        """The same scenario for plans of another form."""
        if form == self.form:
            return self
        return replace(self, **{name: getattr(form, name) for name in FORM_FIELDS})

    def among(self, positions: Sequence[int]) -> Self:
        """The same prices where only the devices at these positions take part.

        Collectives run among devices that have samples or rows; the others wait for nobody.
        """
        key, parts = tuple(positions), self.known.parts
        if len(key) == self.cluster.world_size:
            return self
        if key not in parts:
            part = part_of(self.scenario, key)
            parts[key] = part, Known((part.workload, part.profile))
        scenario, known = parts[key]
        return replace(self, scenario=scenario, known=known)

    def member_at(self, plan: Plan, position: int) -> Member | None:
        """The device as one of a context group of the plan; None if it computes alone."""
        group = plan.context_group(position)
        if len(group) == 1:
            return None
        shares = plan.token_shares(position)
        return self.member_of(dict(zip(group, shares, strict=True)), position, plan.ranks)

    def member_of(
        self, group: Mapping[int, float], position: int, ranks: Sequence[RankPlan] = ()
    ) -> Member:
        """The device as one of those that have these parts of the tokens of samples.

        Without their ``ranks``, all of them recompute the same units.
        """
        if not any(kind.kv_bytes for kind in self.workload.kinds):
            raise ValueError(
                "plan: it has context groups, but the workload does not say how large keys and "
                "values are. Describe or measure the model anew."
            )
        recomputed = tuple(ranks[i].recomputed_units for i in group if ranks)
        return Member(
            token_share=group[position],
            device_kind=self.cluster.devices[position].kind,
            collectives=self.among(tuple(group)).profile.collectives,
            unevenness=max(group.values()) * len(group),
            recomputed=() if len(set(recomputed)) < 2 else recomputed,
        )

    def of_member(self, member: Member | None) -> Self:
        """The same prices where only this part of each sample is computed; None: all of it."""
        if member is None:
            return self
        if member not in self.known.members:
            part = part_of_samples(self.scenario, member)
            self.known.members[member] = Known((part.workload, part.profile))
        known = self.known.members[member]
        assert known.of is not None
        scenario = Scenario(self.cluster, *known.of)
        return replace(self, scenario=scenario, known=known, member=member)

    def of_rank(self, plan: Plan, position: int) -> Self:
        """The prices of what a device computes in a plan."""
        return self.of_member(self.member_at(plan, position))

    def keeps_received(self, rank: RankPlan, unit_fqn: str) -> bool:
        """Whether the rank recomputes a unit with the keys and values that it has received,
        as members of its group that do not recompute it send them once.
        """
        of_members = () if self.member is None else self.member.recomputed
        all_do = all(is_matched(unit_fqn, patterns) for patterns in of_members)
        return not all_do and rank.recomputes(unit_fqn)

    def _own_part(self, kind: UnitKind) -> float:
        """What of a unit's forward is not the exchange of a context group."""
        member = self.member
        if member is None or not kind.kv_bytes:
            return 1.0
        whole_s = self.profile.unit(member.device_kind, kind.name).forward_s.at(1)
        return 1 - member.exchange_s(kind.kv_bytes)[0] / whole_s if whole_s else 1.0

    def curves_s(self, device_kind: str | None, unit_kind: str, largest: int) -> Floats:
        """[2, 1 + largest] seconds of a unit's forward and backward by microbatch size."""
        key, known = (device_kind, unit_kind, largest), self.known.curves_s
        if key not in known:
            unit = self.profile.unit(device_kind, unit_kind)
            curves = (unit.forward_s, unit.backward_s)
            known[key] = np.array([at_sizes(curve, largest) for curve in curves])
        return known[key]

    @property
    def may_tile(self) -> bool:
        """Whether sequences are so long that tiles are worth a try."""
        return any(kind.token_wise for kind in self.workload.kinds)

    def num_tiles(self, rank: RankPlan, unit_fqn: str) -> int:
        """Into how many tiles a rank cuts the sequences of a unit."""
        if not rank.tiles(unit_fqn):
            return 1
        return -(-self.workload.tokens_per_sample // rank.tokens_per_tile)

    def tiled_part(self, rank: RankPlan, unit_fqn: str, kind: UnitKind) -> float:
        """What of a unit's forward its tiles compute once more in backward, besides the unit.

        Tiles are taken to be so large that their kernels are as fast as any.
        """
        if kind.token_wise is None or self.num_tiles(rank, unit_fqn) < 2:
            return 0.0
        part = kind.token_wise.forward_flops / max(1, kind.forward_flops)
        return 0.0 if part >= 1 and rank.recomputes(unit_fqn) else part * self._own_part(kind)

    def again_part(self, rank: RankPlan, unit_fqn: str, kind: UnitKind) -> float:
        """What of a unit's forward is computed once more in backward."""
        own = self._own_part(kind) if self.keeps_received(rank, unit_fqn) else 1.0
        return rank.recomputes(unit_fqn) * own + self.tiled_part(rank, unit_fqn, kind)

    def kind_for(self, rank: RankPlan, unit: Unit) -> UnitKind:
        """The unit's kind, in tiles if the rank computes it so."""
        return self.workload.kind_of(unit).in_tiles(self.run_of(rank, unit).num_tiles)

    def run_of(self, rank: RankPlan, unit: Unit) -> UnitRun:
        return UnitRun(unit.kind, rank.recomputes(unit.fqn), self.num_tiles(rank, unit.fqn))

    @staticmethod
    def treated(rank: RankPlan) -> tuple[object, ...]:
        """What of a rank says how its units run."""
        tiles = (rank.tiled_units, rank.tokens_per_tile) if rank.tiled_units else ()
        return (rank.recomputed_units, tiles)

    def for_plan(self, plan: Plan) -> Self:
        """The same scenario for plans of the form of ``plan``, and its patterns of units."""
        return replace(
            self.in_form(StepForm.of(plan)),
            two_level_units=plan.two_level_units,
            resident_units=plan.resident_units,
        )

    @property
    def is_alone(self) -> bool:
        """Whether there is one device, which computes with the rows that it stores.

        Beside idle ones it gathers them.
        """
        return self.cluster.world_size == 1 and not self.beside_idle

    def resident_bytes_of(self, unit: Unit) -> int:
        """Bytes of the unit's frozen parameters that stay unsharded over steps.

        The rows of a lone device are what it computes with, if their dtype is that.
        """
        kind = self.workload.kind_of(unit)
        stays = self.is_alone and kind.frozen_as_stored
        stays = stays or is_matched(unit.fqn, self.resident_units)
        return self.workload.frozen_bytes(kind) if stays else 0

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of frozen parameters that every computing rank keeps unsharded."""
        return sum(map(self.resident_bytes_of, self.workload.units))

    @cached_property
    def inside_bytes(self) -> int:
        """Bytes of rows, on all devices, that are a part of what stays where it computes."""
        return sum(
            self.resident_bytes_of(unit)
            for unit in self.workload.units
            if self.workload.kind_of(unit).frozen_as_stored
        )

    def sent_kind(self, unit: Unit) -> UnitKind:
        """The unit's kind as far as it is gathered in every step."""
        kind, resident = self.workload.kind_of(unit), self.resident_bytes_of(unit)
        if not resident:
            return kind
        return replace(kind, gathered_bytes=self.workload.gathered_bytes(kind) - resident)

    def collectives_of(self, unit: UnitKind) -> Collectives:
        """The collectives of a kind of unit: in two levels if all units of the kind are."""
        in_two_levels = self.profile.two_levels
        if in_two_levels is None or unit.name not in self._two_level_kinds:
            return self.profile.collectives
        return in_two_levels

    @cached_property
    def _two_level_kinds(self) -> frozenset[str]:
        in_one = {
            unit.kind
            for unit in self.workload.units
            if not is_matched(unit.fqn, self.two_level_units)
        }
        return frozenset(kind.name for kind in self.workload.kinds if kind.name not in in_one)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the scenario."""
        return self.scenario.cluster

    @property
    def workload(self) -> Workload:
        """The workload of the scenario."""
        return self.scenario.workload

    @property
    def profile(self) -> Profile:
        """The profile of the scenario."""
        return self.scenario.profile

    @cached_property
    def visited_units(self) -> tuple[Unit, ...]:
        """The units that compute (all but the root), in order of execution."""
        return tuple(unit for unit in self.workload.units if unit.fqn)

    @cached_property
    def root_kinds(self) -> tuple[UnitKind, ...]:
        """The root, which is unsharded for the whole step, if the model has one."""
        return tuple(self.sent_kind(unit) for unit in self.workload.units if not unit.fqn)
