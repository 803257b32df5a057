"""Seconds and bytes of one kind of device under one set of limits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from shardhet.planner.candidates.splits import LeastSplits, Splits
from shardhet.planner.forms import BatchRounds
from shardhet.planner.problem.demands import Role
from shardhet.planner.problem.problem import Floats, Ints
from shardhet.planner.problem.state_numels import StateNumels
from shardhet.pricing.cost import CostModel
from shardhet.pricing.turns import TurnClass, Turns
from shardhet.records.plan import EVERY_UNIT, RankPlan
from shardhet.records.schedule import Phase, StepForm

MAX_MICROBATCH_SIZE = 2048  # larger ones are not looked at


class PortShares(NamedTuple):
    """How much of the state a device stores, as part of all, if collectives are to be fast."""

    least: float = 0.0  # if it computes
    most: float = inf  # if it computes
    most_idle: float = inf


@dataclass(frozen=True, slots=True)
class Terms:
    """What the candidates of all devices have in common."""

    model: CostModel
    turns: Turns
    treatments: tuple[RankPlan, ...]
    state: StateNumels
    stored: PortShares
    rounds: BatchRounds
    has_endless_memory: bool
    max_microbatch_size: int | None

    @property
    def least_bytes_per_sample(self) -> int:
        """What any device needs for each of its samples."""
        return min(map(self.model.bytes_per_sample, self.treatments))

    def largest_microbatch_size(self, role: Role) -> int:
        """The largest size to consider: what fits if everything is recomputed."""
        model = self.model
        if self.has_endless_memory:  # but no larger microbatches than in any form
            model = model.in_form(StepForm())
        limits = (self.max_microbatch_size, role.limits.max_microbatch_size)
        stated = [each for each in limits if each is not None]
        sizes = np.arange(1, 1 + min(self.rounds.round_size, MAX_MICROBATCH_SIZE, *stated))
        needed = np.min(  # the last needs the least, or the last without the host
            [
                model.working_bytes(role.device_kind, each, sizes, sizes)
                for each in self.treatments
                if each.recomputed_units == EVERY_UNIT
            ],
            axis=0,
        )
        return int(sizes[needed <= role.budget_bytes].max(initial=1))


class Way(NamedTuple):
    """What a device does with units, and how the room for state is counted."""

    choice: int  # index into treatments
    # Of an optimizer on the host: of rows whose copies compute hides; or of more, whose copies
    # nothing hides.
    hides_copies: bool = True


class Worth(NamedTuple):
    """What batches b in splits n cost a device, and the room that they leave."""

    costs: Floats  # [D, b, n]
    room: Floats  # [b, n]
    compute_s: Floats  # [b, n]
    optimizer_s: float  # per element of state


class _Backward(NamedTuple):
    """Seconds of backward, [classes, b, n]."""

    visit_s: Floats  # of a unit, without communication
    turns_s: Floats  # all of a step


class RoleTimes:
    """Seconds and bytes of one kind of device under one set of limits, by microbatch size."""

    def __init__(self, terms: Terms, role: Role, largest: int, *, is_together: bool) -> None:
        """With microbatches of at most ``largest``.

        ``is_together``: other devices must store the same, up to rows.
        """
        model, device_kind = terms.model, role.device_kind
        self.optimizer_s = model.profile.device(device_kind).optimizer_seconds_per_element
        self._is_together = is_together
        self._terms = terms
        self._role = role
        self._sizes = np.arange(1, 1 + largest)
        # By kind of unit, [2, 1 + sizes]: forward and backward of one unit by microbatch
        # size; size 0 takes no time.
        self._seconds: dict[str, Floats] = {}
        self.num_measured = 1
        whole = np.zeros(1 + largest)
        for name, number in model.workload.num_units_by_kind.items():
            if any(each.kind.name == name for each in terms.turns.classes):
                unit = model.profile.unit(device_kind, name)
                self.num_measured = max(self.num_measured, unit.points[-1].microbatch_size)
                self._seconds[name] = model.curves_s(device_kind, name, largest)
                whole += number * self._seconds[name].sum(axis=0)
        self.whole_s = whole  # [1 + sizes] of a microbatch in all units
        # [2 kinds, 1 + sizes]
        self.curves_s: Floats = np.concatenate([*self._seconds.values()])
        # Of a sample, and of a microbatch, of each round.
        in_rounds = terms.rounds.in_whole_ones
        self.least_seconds_per_sample = in_rounds * float((whole[1:] / self._sizes).min())
        self.least_seconds = in_rounds * float(whole[1:].min())

    @cached_property
    def needs_more_if_larger(self) -> bool:
        """Whether larger microbatches need no less memory, whatever is recomputed."""
        return all(
            self._terms.model.needs_more_if_larger(
                rank, self._role.device_kind, len(self._sizes)
            )
            for rank in self._terms.treatments
        )

    def of_choices(
        self, ways: Sequence[Way], batches: Ints, splits: Splits | LeastSplits, tried: Ints
    ) -> Iterator[Worth]:
        """What each way is worth, for the splits ``tried`` [b, n].

        The phases are the forward of every kind of unit, then the backward of every class.
        The forward of all classes of a kind is a single phase, because all of them are
        longest on the same rank: the sum of their maxima is the maximum of their sum.
        """
        all_seconds = splits.seconds(self.curves_s, batches, tried)
        sizes = splits.largest[tried]
        seconds = {
            name: all_seconds[2 * i : 2 * i + 2]  # [2, b, n] of one round
            for i, name in enumerate(self._seconds)
        }
        classes = self._terms.turns.classes
        in_rounds = self._terms.rounds.in_whole_ones
        alone_s = in_rounds * sum(  # [b, n]
            each.num_units * seconds[each.kind.name].sum(axis=0) for each in classes
        )
        # By what is on the host: costs of forward, and of backward with and without forward
        # again, [classes, b, n]: visits of units without communication, and all turns.
        known: dict[tuple[str, ...], tuple[list[Floats], tuple[_Backward, _Backward]]] = {}
        for way in ways:
            rank, compute_s = self._terms.treatments[way.choice], alone_s
            on_host = rank.inputs_on_host
            if on_host not in known:
                known[on_host] = (
                    self._forward_costs(rank, batches, seconds),
                    self._backward(rank, batches, seconds),
                )
            of_forward, of_backward = known[on_host]
            costs, visits_s = [*of_forward], np.zeros(())
            for i, each in enumerate(classes):
                is_again = rank.recomputes(each.unit_fqn)
                visit_s, turns_s = of_backward[is_again]
                costs.append(turns_s[i])
                if is_again:
                    forward_s, _ = seconds[each.kind.name]
                    compute_s = compute_s + in_rounds * each.num_units * forward_s
                if rank.optimizer_on_host:
                    visits_s = visits_s + in_rounds * each.num_units * visit_s[i]
            most: Floats | float = inf
            optimizer_s = self.optimizer_s
            if rank.optimizer_on_host:
                assert self._role.host is not None
                optimizer_s = self._terms.model.host_seconds_per_numel(
                    self._role.host, hides_copies=way.hides_copies
                )
                if way.hides_copies:
                    ahead_s = in_rounds * self._alone_forward_s(rank, batches, seconds)
                    most = self._terms.model.hidden_numel(self._role.host, ahead_s, visits_s)
            room = self._room(rank, batches, sizes, most)
            yield Worth(np.array(costs), room, compute_s, optimizer_s)

    def _alone_forward_s(
        self, rank: RankPlan, batches: Ints, seconds: Mapping[str, Floats]
    ) -> Floats:
        """[b, n] seconds of forward of a round, without communication."""
        return sum(
            (
                each.num_units
                * self._beside_copies(rank, each, batches, seconds[each.kind.name][0])
                for each in self._terms.turns.classes
            ),
            start=np.zeros(()),
        )

    def _forward_costs(
        self, rank: RankPlan, batches: Ints, seconds: Mapping[str, Floats]
    ) -> list[Floats]:
        """[b, n] seconds of forward by kind of unit."""
        found = {name: np.zeros(each.shape[1:]) for name, each in seconds.items()}
        classes = self._terms.turns.classes
        visits_s = [
            self._beside_copies(rank, each, batches, seconds[each.kind.name][0])
            for each in classes
        ]
        turns_s = self._in_rounds(np.stack(visits_s), Phase.FORWARD)
        for i, each in enumerate(classes):
            found[each.kind.name] += turns_s[i]
        return [*found.values()]

    def _backward(
        self, rank: RankPlan, batches: Ints, seconds: Mapping[str, Floats]
    ) -> tuple["_Backward", "_Backward"]:
        """Of a round: without and with forward again."""

        def of(*, is_again: bool) -> _Backward:
            visits_s = []
            for each in self._terms.turns.classes:
                forward_s, backward_s = seconds[each.kind.name]
                alone_s = backward_s + forward_s if is_again else backward_s
                visits_s.append(self._beside_copies(rank, each, batches, alone_s))
            visit_s = np.stack(visits_s)
            return _Backward(visit_s, self._in_rounds(visit_s, Phase.BACKWARD))

        return of(is_again=False), of(is_again=True)

    def _beside_copies(
        self, rank: RankPlan, turns: TurnClass, batches: Ints, compute_s: Floats
    ) -> Floats:
        """[b, n] seconds of a visit and of copies of its inputs, as if all devices of a host
        copied.
        """
        if not rank.inputs_on_host:
            return compute_s
        per_sample_s = self._terms.model.copy_s_per_sample(rank, turns.unit_fqn)
        return np.maximum(compute_s, per_sample_s * batches[:, None])

    def _in_rounds(self, visit_s: Floats, phase: Phase) -> Floats:
        """[classes, b, n] seconds of all turns of each class, of whose units a visit computes
        so long.
        """
        excess = self._terms.model.profile.device(self._role.device_kind).overlap_excess
        classes = self._terms.turns.classes
        compute_s = np.array([[[each.num_units]] for each in classes]) * visit_s
        found: Floats = np.zeros(())
        for of_classes in zip(*(each.rounds for each in classes), strict=True):
            number = float(of_classes[0].num_rounds)
            if of_classes[0].is_last:  # it may have fewer samples
                number += self._terms.rounds.in_whole_ones - self._terms.rounds.number
            comm_s = np.array([[[each.comm_s[phase is Phase.BACKWARD]]] for each in of_classes])
            slowed = number * compute_s
            if excess:
                slowed = np.where(compute_s > 0, slowed + excess * comm_s, 0.0)
            # Compute that ends before its communication is hidden by it.
            found = found + np.maximum(slowed, comm_s)
        return found

    def _room(self, rank: RankPlan, batches: Ints, sizes: Ints, most: Floats | float) -> Floats:
        """At most ``most`` elements of state that fit besides each batch and size."""
        role, state = self._role, self._terms.state
        left = self._terms.model.room_for_state(
            rank,
            role.device_kind,
            role.budget_bytes,
            batches=batches[:, None],
            sizes=sizes,
            host=role.host,
        )
        if self._terms.has_endless_memory:
            left = np.full(left.shape, state.whole + 2 * state.row)
        left = np.minimum(left, most)
        if role.limits.max_state_share is not None:
            # ``Problem.rounded`` takes row_numel off all room, so it is added here.
            cap = role.limits.max_state_share * state.whole
            left = np.minimum(left, cap + state.row)
        if role.limits.state_share is not None:
            # An exact share is not part of the state that the search distributes.
            left = left - role.limits.state_share * state.whole
            left = np.minimum(left + state.slack, state.row)
        else:
            left = self._within_ports(left, batches)
        if state.even is not None:
            # ``Problem.rounded`` need not take off what rounding has added already.
            is_enough = left + 2 * state.slack >= state.even
            return np.where(is_enough, state.even + state.row, -1.0)
        if self._is_together:
            left = left + state.slack
        return np.where(left >= 0, left, -1.0)

    def _within_ports(self, left: Floats, batches: Ints) -> Floats:
        """The room of which collectives can make use; -1 where it is less than they need."""
        stored, row_numel = self._terms.stored, self._terms.state.row
        if stored == PortShares():
            return left
        least, most, most_idle = (each * self._terms.model.workload.numel for each in stored)
        computes = batches[:, None] > 0
        # ``Problem.rounded`` takes row_numel off all room, so it is added here.
        within = np.minimum(left, np.where(computes, most, most_idle) + row_numel)
        return np.where(computes & (left < least), -1.0, within)
