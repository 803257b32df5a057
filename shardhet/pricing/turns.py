"""Seconds of a turn: the compute of its ranks and the transfers that overlap it.

A turn is one visit of a unit in one phase.  Ranks meet at every turn, because all of them take
part in each gather.  What is launched since the turn before, and not for it, overlaps a turn's
compute.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import NamedTuple

import numpy as np

from shardhet.pricing.launches import PRICES
from shardhet.pricing.matrices import OwnedState, stored_whole
from shardhet.pricing.priced import FewRounds, Floats, Priced
from shardhet.records.layout import stored_numels
from shardhet.records.ops import ops_of
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import LaunchKind, Phase, StepForm, straight_schedule
from shardhet.records.workload import UnitKind

PHASES = tuple(Phase)
MOST_FEW_ROUNDS = 256  # of different unevenness, that are kept


class OverlappedComm(NamedTuple):
    """Collectives of a step, by sorts of rounds: the first, those between, and the last."""

    num_rounds: tuple[int, ...]  # of each sort
    comm_s: Floats  # [sorts, classes, 2] beside all forward and all backward turns
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsOfRounds:
    """The collectives beside the turns of a class, in rounds that have the same ones."""

    num_rounds: int
    is_last: bool  # of the step: it may have fewer samples
    forward_comm_s: float  # overlaps the forward turns of all units and rounds together
    backward_comm_s: float

    @property
    def comm_s(self) -> tuple[float, float]:
        """Seconds beside forward and beside backward."""
        return self.forward_comm_s, self.backward_comm_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClass:
    """Units of one kind that the same ranks recompute, and the collectives beside them."""

    kind: UnitKind
    num_units: int
    unit_fqn: str  # of one of them: a rank that recomputes it recomputes all
    rounds: tuple[TurnsOfRounds, ...]  # the first round, those between, and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """All classes of turns of a step, and the communication that overlaps no compute."""

    classes: tuple[TurnClass, ...]
    exposed_comm_s: float

    @property
    def comm_s(self) -> float:
        """All communication of the step, overlapped or not."""
        beside = sum(sum(each.comm_s) for turns in self.classes for each in turns.rounds)
        return beside + self.exposed_comm_s


@dataclass(frozen=True)
class TurnPrices(Priced):
    """Seconds of turns and collectives in a scenario."""

    @property
    def overhead_s(self) -> float:
        """The runtime's own time in all turns of a step."""
        num_turns = len(Phase) * len(self.visited_units) * self.num_rounds
        return num_turns * self.profile.unit_overhead_s

    def unit_seconds(
        self, device_kind: str | None, unit_kind: str, microbatch_sizes: Iterable[int]
    ) -> tuple[float, float]:
        """Seconds of one unit's forward and backward on a rank's microbatches."""
        sizes = tuple(microbatch_sizes)
        key, known = (device_kind, unit_kind, sizes), self.known.seconds
        if key not in known:
            unit = self.profile.unit(device_kind, unit_kind)
            known[key] = (
                sum(unit.forward_s.at(size) for size in sizes),
                sum(unit.backward_s.at(size) for size in sizes),
            )
        return known[key]

    def beside_comm_s(self, device_kind: str | None, compute_s: float, comm_s: float) -> float:
        """Seconds of compute while ``comm_s`` of collectives overlap it.

        ``compute_s`` is what the same compute takes alone; where there is none, there is
        nothing that the collectives could slow down.
        """
        if not compute_s:
            return 0.0
        return compute_s + self.profile.device(device_kind).overlap_slowdown * comm_s

    def unevenness(self, shares: Sequence[float], computes: Sequence[bool]) -> float:
        """The bytes at the busiest port with direct messages, relative to those of a ring.

        With R devices of which R' receive, owner i sends s_i (R' - r_i) and receives
        r_i (1 - s_i) of a unit's bytes (r_i is 1 if i receives, else 0); a ring moves
        (R - 1) / R of them past every device.
        """
        world_size = len(shares)
        if world_size == 1:
            return 0.0
        of, receives = np.asarray(shares), np.asarray(computes, dtype=np.float64)
        busiest = np.maximum(of * (receives.sum() - receives), receives * (1 - of)).max()
        return float(busiest * world_size / (world_size - 1))

    def turns(
        self,
        *,
        unevenness: float,
        recomputed: Sequence[Sequence[str]] = (),
    ) -> Turns:
        """The classes of turns of a step.

        ``recomputed`` holds the distinct lists of patterns that ranks recompute by.  Units of
        one kind form a class if every list treats them alike.
        """
        beside = self.beside(unevenness=unevenness, recomputed=recomputed)
        last = len(beside.num_rounds) - 1
        return Turns(
            classes=tuple(
                TurnClass(
                    kind=self.workload.kind_of(self.visited_units[members[0]]),
                    num_units=len(members),
                    unit_fqn=self.visited_units[members[0]].fqn,
                    rounds=tuple(
                        TurnsOfRounds(
                            num_rounds=number,
                            is_last=i == last,
                            forward_comm_s=comm_s[j][0],
                            backward_comm_s=comm_s[j][1],
                        )
                        for i, (number, comm_s) in enumerate(
                            zip(beside.num_rounds, beside.comm_s.tolist(), strict=True)
                        )
                    ),
                )
                for j, members in enumerate(self._alike(recomputed))
            ),
            exposed_comm_s=beside.exposed_s,
        )

    def launch_seconds(self, plan: Plan) -> dict[LaunchKind, list[float]]:
        """Seconds of every kind of launch for each visited unit under a plan."""
        stored = self.stored_by(plan).numels
        active = taking_part(plan.ranks, stored)
        among = self.among(active)
        return among._launch_seconds(among.unevenness_of(plan.ranks, stored, active))

    def unevenness_of(
        self, ranks: Sequence[RankPlan], stored: Sequence[int], active: Sequence[int]
    ) -> float:
        """The unevenness of ranks that store so many elements, of which some take part."""
        return self.unevenness(
            [stored[i] / self.workload.numel for i in active],
            [bool(ranks[i].microbatch_sizes) for i in active],
        )

    def _alike(self, recomputed: Sequence[Sequence[str]]) -> list[list[int]]:
        """Indices of units of one kind that the same ranks recompute, class by class."""
        key = tuple(map(tuple, recomputed))
        known = self.known.of_workload.alike
        if key not in known:
            known[key] = self._found_alike(key)
        return known[key]

    def _found_alike(self, recomputed: tuple[tuple[str, ...], ...]) -> list[list[int]]:
        ranks = [
            RankPlan(microbatch_sizes=(), state_share=0.0, recomputed_units=patterns)
            for patterns in recomputed
        ]
        members: dict[tuple[str, tuple[bool, ...]], list[int]] = {}
        for i, unit in enumerate(self.visited_units):
            signature = tuple(rank.recomputes(unit.fqn) for rank in ranks)
            members.setdefault((unit.kind, signature), []).append(i)
        return list(members.values())

    def _mean_by_kind(self, seconds: Sequence[float]) -> list[float]:
        """For every visited unit, the mean over the units of its kind.

        The time of a step then does not depend on how like turns are put into classes.
        """
        found = [0.0] * len(seconds)
        for of_kind in self._units_by_kind:
            mean_s = fmean([seconds[i] for i in of_kind])
            for i in of_kind:
                found[i] = mean_s
        return found

    @cached_property
    def _units_by_kind(self) -> list[list[int]]:
        by_kind: dict[str, list[int]] = {}
        for i, unit in enumerate(self.visited_units):
            by_kind.setdefault(unit.kind, []).append(i)
        return [*by_kind.values()]

    @cached_property
    def _sent_kinds(self) -> list[UnitKind]:
        return [self.sent_kind(unit) for unit in self.visited_units]

    def _launch_seconds(self, unevenness: float) -> dict[LaunchKind, list[float]]:
        key = (unevenness, *self._launched_alike)
        if key not in self.known.launches:
            if len(self.known.launches) >= MOST_FEW_ROUNDS:
                self.known.launches.clear()
            self.known.launches[key] = self._found_launch_seconds(unevenness)
        return self.known.launches[key]

    @property
    def _launched_alike(self) -> tuple[object, ...]:
        """What the seconds of launches depend on besides the workload and the profile."""
        return self.two_level_units, self.resident_units, self.cluster.world_size == 1

    def _found_launch_seconds(self, unevenness: float) -> dict[LaunchKind, list[float]]:
        alike = [(unit.kind, self.resident_bytes_of(unit)) for unit in self.visited_units]
        sent = dict(zip(alike, self._sent_kinds, strict=True))
        found: dict[LaunchKind, list[float]] = {}
        for kind, price in PRICES.items():
            seconds = {each: price(self, of_unit, unevenness) for each, of_unit in sent.items()}
            found[kind] = [seconds[each] for each in alike]
        return found

    def beside(
        self, *, unevenness: float, recomputed: Sequence[Sequence[str]] = ()
    ) -> OverlappedComm:
        """What overlaps the turns of each class of ``turns``, by rounds that are alike, and
        seconds of launches that overlap none.

        All rounds between the first and the last are alike.
        """
        num_rounds = min(self.num_rounds, 3)
        numbers = [1] * num_rounds
        numbers[num_rounds // 2] += self.num_rounds - num_rounds
        few = self._few_rounds(
            replace(self.form, num_rounds=num_rounds),
            unevenness,
            tuple(map(tuple, recomputed)),
        )
        return OverlappedComm(
            num_rounds=tuple(numbers),
            comm_s=np.array(numbers)[:, None, None] * few.beside_s,
            exposed_s=sum(numbers[n] * seconds for n, seconds in few.exposed) + few.root_s,
        )

    def kinds_of_classes(self) -> list[tuple[str, int]]:
        """The kind of unit of each class of ``turns`` of which all units are treated alike, and
        how many units it has.
        """
        return [(self.visited_units[each[0]].kind, len(each)) for each in self._alike(())]

    def _few_rounds(
        self, form: StepForm, unevenness: float, recomputed: tuple[tuple[str, ...], ...]
    ) -> FewRounds:
        """Of so few rounds that none is like another; kept, as more rounds have the same."""
        key = (form, unevenness, recomputed, *self._launched_alike)
        known = self.known.few_rounds
        if key not in known:
            if len(known) >= MOST_FEW_ROUNDS:
                known.clear()
            known[key] = self._found_few_rounds(form, unevenness, recomputed)
        return known[key]

    def _found_few_rounds(
        self, form: StepForm, unevenness: float, recomputed: Sequence[Sequence[str]]
    ) -> FewRounds:
        seconds_of = self._launch_seconds(unevenness)
        seconds = [seconds_of[kind] for kind in PRICES]
        num_units = len(self.visited_units)
        overlapping, exposed = _launches(num_units, form)
        beside_s = [[[0.0] * num_units for _ in PHASES] for _ in range(form.num_rounds)]
        for number, phase, unit, kind, of_unit in overlapping:
            beside_s[number][phase][unit] += seconds[kind][of_unit]
        of_phases = PHASES.index(Phase.FORWARD), PHASES.index(Phase.BACKWARD)
        of_rounds = [[self._mean_by_kind(each[i]) for i in of_phases] for each in beside_s]
        return FewRounds(
            beside_s=np.array(
                [
                    [
                        [sum(of_phase[i] for i in members) for of_phase in of_phases_s]
                        for members in self._alike(recomputed)
                    ]
                    for of_phases_s in of_rounds
                ]
            ),
            exposed=[(number, seconds[kind][unit]) for number, kind, unit in exposed],
            root_s=sum(
                price(self, kind, unevenness)
                for price in PRICES.values()
                for kind in self.root_kinds
                if kind.numel
            ),
        )

    def stored_by(self, plan: Plan) -> OwnedState:
        """What each device stores under a plan."""
        if not plan.whole_matrices:
            return OwnedState(self.stored_numels(plan.state_shares))
        return stored_whole(plan, self.workload)

    def stored_numels(self, state_shares: Sequence[float]) -> list[int]:
        """Elements that each device stores, with every border between rows."""
        shares = tuple(state_shares)
        if self.known.stored is None or self.known.stored[0] != shares:
            self.known.stored = shares, stored_numels(self.workload.layouts(), shares)
        return self.known.stored[1]


def taking_part(ranks: Sequence[RankPlan], stored: Sequence[int]) -> tuple[int, ...]:
    """The positions that have samples or store elements.

    No other one receives rows, contributes gradients or has a part of their sums.
    """
    pairs = enumerate(zip(ranks, stored, strict=True))
    return tuple(i for i, (rank, numel) in pairs if rank.microbatch_sizes or numel)


@lru_cache(maxsize=64)
def _launches(
    num_units: int, form: StepForm
) -> tuple[list[tuple[int, int, int, int, int]], list[tuple[int, int, int]]]:
    """Round, phase and unit of the turn that each launch overlaps, its kind and its unit.

    And round, kind and unit of launches that overlap none.  Phases and kinds are indices into
    ``PHASES`` and ``PRICES``, which take less time to look up.
    """
    schedule, kinds = straight_schedule(num_units, form), list(PRICES)
    turns, number = iter(schedule.turns), 0
    launched: dict[int, tuple[int, int]] = {}  # since the last turn, by op: kind and unit
    overlapping, exposed = [], list[tuple[int, int, int]]()
    for i, op in enumerate(ops_of(schedule)):
        if isinstance(op.kind, LaunchKind):
            launched[i] = kinds.index(op.kind), op.unit
        elif isinstance(op.kind, Phase):
            number = next(turns).round
            exposed += [(number, *launched.pop(j)) for j in op.after if j in launched]
            beside = (number, PHASES.index(op.kind), op.unit)
            overlapping += [(*beside, *each) for each in launched.values()]
            launched.clear()
    return overlapping, [*exposed, *((number, *each) for each in launched.values())]
