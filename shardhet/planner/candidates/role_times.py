"""Seconds and bytes of one kind of device under one set of limits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from shardhet.planner.candidates.fitting import fitting_batches
from shardhet.planner.forms import BatchRounds
from shardhet.planner.problem.constraints import Role
from shardhet.planner.problem.problem import Bools, Floats, Ints
from shardhet.planner.problem.state_numels import StateNumels
from shardhet.pricing.cost import CostModel
from shardhet.pricing.hosts import NUM_LINES
from shardhet.pricing.turns import TurnClass, Turns
from shardhet.records.plan import EVERY_UNIT, RankPlan
from shardhet.records.schedule import Phase, StepForm

MAX_MICROBATCH_SIZE = 2048  # larger ones are not looked at
TANGENTS = 4  # that bound a batch
ROUNDING = 1e-12


class LinkShares(NamedTuple):
    """How much of the state a device stores, as part of all, if collectives are to be fast."""

    least: float = 0.0  # if it computes
    most: float = inf  # if it computes
    most_idle: float = inf


@dataclass(frozen=True)
class Terms:
    """What the candidates of all devices have in common."""

    model: CostModel
    turns: Turns
    policies: tuple[RankPlan, ...]
    state: StateNumels
    stored: LinkShares
    rounds: BatchRounds
    has_endless_memory: bool
    max_microbatch_size: int | None

    def of(self, role: Role) -> "Terms":
        """Those of a device that may be a member of a context group."""
        return replace(self, model=self.model.of_member(role.member)) if role.member else self

    @cached_property
    def are_recomputed(self) -> Bools:
        """[treatments, classes] whether the units of a class are recomputed."""
        classes = self.turns.classes
        found = [[rank.recomputes(each.unit_fqn) for each in classes] for rank in self.policies]
        return np.array(found)

    @cached_property
    def tiled_parts(self) -> Floats:
        """[treatments, classes] what of a unit's forward its tiles compute once more."""
        parts = [
            [self.model.tiled_part(each, of.unit_fqn, of.kind) for of in self.turns.classes]
            for each in self.policies
        ]
        return np.array(parts, dtype=np.float64)

    @cached_property
    def of_rounds(self) -> tuple[tuple[Floats, Floats, Floats], ...]:
        """By phase: [R, 1, 1, 1] how many rounds of each sort there are, in whole ones, [R,
        classes, 1, 1] seconds of their communication and [classes, 1, 1] units of each class.
        """
        classes, rounds = self.turns.classes, self.rounds
        sorts = list(zip(*(each.rounds for each in classes), strict=True))
        number = np.array([float(each[0].num_rounds) for each in sorts])
        # The last may have fewer samples.
        number[[each[0].is_last for each in sorts]] += rounds.in_whole_ones - rounds.number
        units = np.array([float(each.num_units) for each in classes])
        comm_s = np.array([[each.comm_s for each in of_sort] for of_sort in sorts])
        return tuple(
            (
                number[:, None, None, None],
                comm_s[:, :, phase, None, None],
                units[:, None, None],
            )
            for phase in range(2)
        )

    @cached_property
    def comm_s(self) -> Floats:
        """[2 classes] seconds of collectives beside forward, and beside backward."""
        return np.concatenate([comm_s.sum(axis=(0, 2, 3)) for _, comm_s, _ in self.of_rounds])

    @cached_property
    def least_bytes_per_sample(self) -> int:
        """What any device needs for each of its samples."""
        return min(map(self.model.bytes_per_sample, self.policies))

    def largest_microbatch_size(self, role: Role) -> int:
        """The largest size to consider: what fits if everything is recomputed."""
        model = self.model
        if self.has_endless_memory:  # but no larger microbatches than in any form
            model = replace(model, resident_units=()).in_form(StepForm())
        limits = (self.max_microbatch_size, role.limits.max_microbatch_size)
        stated = [each for each in limits if each is not None]
        largest = min(self.rounds.round_size, MAX_MICROBATCH_SIZE, *stated)
        # One of those needs the least.
        ranks = [each for each in self.policies if each.recomputed_units == EVERY_UNIT]
        sizes = np.arange(1, 1 + MAX_MICROBATCH_SIZE)
        samples = fitting_batches(model, ranks, role.device_kind, role.budget_bytes, sizes)
        fits: Bools = np.any(samples * (1 + ROUNDING) >= sizes, axis=0)
        return int(sizes[:largest][fits[:largest]].max(initial=1))


class Worth(NamedTuple):
    """What W treatments cost a device with batches b in splits n, and the room they leave."""

    costs: Floats  # [D, b, W, n]
    room: Floats  # [b, W, n]
    compute_s: Floats  # [b, W, n]
    optimizer: Floats  # [2, K, b, W, n] see ``Group``; without lines if there is no host


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
        # By kind of unit, [2, 1 + sizes]: forward and backward of one; size 0 takes no time.
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

    @property
    def unit_names(self) -> Iterable[str]:
        """The kinds of unit."""
        return self._seconds

    def least_unit_s(self, name: str) -> Floats:
        """[2] seconds of a sample in one unit of a kind: forward and backward."""
        return np.asarray((self._seconds[name][:, 1:] / self._sizes).min(axis=1))

    @cached_property
    def needs_more_if_larger(self) -> bool:
        """Whether larger microbatches need no less memory, whatever is recomputed."""
        return all(
            self._terms.model.needs_more_if_larger(
                rank, self._role.device_kind, len(self._sizes)
            )
            for rank in self._terms.policies
        )

    def most_within(self, most: int, left_s: float, least_s: Floats) -> int:
        """The largest batch up to ``most`` that may fit, and may take at most ``left_s``; the
        phases of all classes take at least ``least_s`` [2 classes].
        """
        if not most or not self.needs_more_if_larger:
            return most
        return self._bound.most_within(most, left_s, least_s)

    @cached_property
    def _bound(self) -> "_BatchBound":
        return _BatchBound(self._terms, self._role, self._seconds, len(self._sizes))

    def of_choices(
        self, choices: Ints, batches: Ints, sizes: Ints, all_seconds: Floats
    ) -> Worth:
        """What ``choices`` [W] of treatments are worth, for splits with largest microbatches
        of ``sizes`` [b, n].

        ``all_seconds`` [K, b, n] are those of the splits by the ``curves_s`` of the device.

        The phases are the forward of every kind of unit, then the backward of every class.
        The forward of all classes of a kind is a single phase, because all of them are
        longest on the same rank: the sum of their maxima is the maximum of their sum.
        """
        seconds = {
            name: all_seconds[2 * i : 2 * i + 2]  # [2, b, n] of one round
            for i, name in enumerate(self._seconds)
        }
        classes = self._terms.turns.classes
        in_rounds = self._terms.rounds.in_whole_ones
        shape = (len(batches), len(choices), sizes.shape[1])
        costs = np.empty((len(seconds) + len(classes), *shape))
        compute_s = np.empty(shape)
        compute_s[:] = in_rounds * sum(  # [b, 1, n]
            each.num_units * seconds[each.kind.name].sum(axis=0)[:, None] for each in classes
        )
        again = self._terms.are_recomputed[choices]  # [W, classes]
        parts = again + self._terms.tiled_parts[choices]
        for each, part in zip(classes, parts.T, strict=True):
            forward_s = seconds[each.kind.name][0][:, None]
            compute_s += in_rounds * each.num_units * part[:, None] * forward_s
        ranks = [self._terms.policies[choice] for choice in choices]
        by_inputs: dict[object, list[int]] = {}
        for i, rank in enumerate(ranks):
            by_inputs.setdefault((rank.inputs_on_host, rank.tiled_units), []).append(i)
        optimizer = np.zeros((2, NUM_LINES if self._role.host else 0, *shape))
        optimizer[0] = 1 / self.optimizer_s if self.optimizer_s else inf
        for alike in by_inputs.values():
            rank = ranks[alike[0]]
            for phase, phase_s in enumerate(self._forward_costs(rank, batches, seconds)):
                costs[phase][:, alike] = phase_s[:, None]
            of_backward = self._backward(rank, batches, seconds)
            turns_s = np.stack([each.turns_s for each in of_backward])  # [2, classes, b, n]
            for i in range(len(classes)):
                chosen = turns_s[again[alike, i].astype(int), i]  # [alike, b, n]
                costs[len(seconds) + i][:, alike] = np.moveaxis(chosen, 0, 1)
            for i in [i for i in alike if ranks[i].optimizer_on_host]:
                optimizer[:, :, :, i] = self._on_host(
                    rank, batches, seconds, of_backward, again[i]
                )
        return Worth(costs, self._room(ranks, batches, sizes), compute_s, optimizer)

    def _on_host(
        self,
        rank: RankPlan,
        batches: Ints,
        seconds: Mapping[str, Floats],
        of_backward: Sequence[_Backward],
        are_again: Bools,
    ) -> Floats:
        """[2, K, b, n] of the optimizer, see ``Group``; ``are_again`` [classes]."""
        assert self._role.host is not None
        in_rounds = self._terms.rounds.in_whole_ones
        ahead_s = in_rounds * self._alone_forward_s(rank, batches, seconds)
        visits_s = np.zeros(())
        for j, each in enumerate(self._terms.turns.classes):
            visit_s = of_backward[int(are_again[j])].visit_s[j]
            visits_s = visits_s + in_rounds * each.num_units * visit_s
        per_numel_s, off_s = self._terms.model.host_optimizer(
            self._role.host, ahead_s, visits_s
        )
        return np.stack((np.ones_like(off_s), off_s)) / per_numel_s[:, None, None]

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
        model = self._terms.model

        def of(*, is_again: bool) -> _Backward:
            visits_s = []
            for each in self._terms.turns.classes:
                forward_s, backward_s = seconds[each.kind.name]
                part = model.tiled_part(rank, each.unit_fqn, each.kind) + is_again
                alone_s = backward_s + part * forward_s
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
        number, comm_s, num_units = self._terms.of_rounds[phase is Phase.BACKWARD]
        excess = self._terms.model.profile.device(self._role.device_kind).overlap_slowdown
        compute_s = num_units * visit_s
        slowed = number * compute_s  # [rounds, classes, b, n]
        if excess:
            slowed += (compute_s > 0) * (excess * comm_s)
        # Compute that ends before its communication is hidden by it.
        found: Floats = np.maximum(slowed, comm_s, out=slowed).sum(axis=0)
        return found

    def _room(self, ranks: Sequence[RankPlan], batches: Ints, sizes: Ints) -> Floats:
        """[b, W, n] elements of state that fit besides each batch and size."""
        role, state = self._role, self._terms.state
        left = np.moveaxis(
            self._terms.model.room_for_state(
                ranks,
                role.device_kind,
                role.budget_bytes,
                batches=batches[:, None],
                sizes=sizes,
                host_bytes=role.host_bytes,
            ),
            0,
            1,
        )
        if self._terms.has_endless_memory:
            left = np.full(left.shape, state.whole + 2 * state.row)
        if role.limits.max_state_share is not None:
            # ``Problem.rounded`` takes row_numel off all room, so it is added here.
            cap = role.limits.max_state_share * state.whole
            left = np.minimum(left, cap + state.row)
        if role.limits.state_share is not None:
            # An exact share is not part of the state that the search distributes.
            left = left - role.limits.state_share * state.whole
            left = np.minimum(left + state.slack, state.row)
        else:
            left = self._within_link_shares(left, batches)
        if state.even is not None:
            # ``Problem.rounded`` need not take off what rounding has added already.
            is_enough = left + 2 * state.slack >= state.even
            return np.where(is_enough, state.even + state.row, -1.0)
        if self._is_together:
            left = left + state.slack
        return np.where(left >= 0, left, -1.0)

    def _within_link_shares(self, left: Floats, batches: Ints) -> Floats:
        """The room of which collectives can make use; -1 where it is less than they need."""
        stored, row_numel = self._terms.stored, self._terms.state.row
        if stored == LinkShares():
            return left
        least, most, most_idle = (each * self._terms.model.workload.numel for each in stored)
        computes = batches[:, None, None] > 0
        # ``Problem.rounded`` takes row_numel off all room, so it is added here.
        within = np.minimum(left, np.where(computes, most, most_idle) + row_numel)
        return np.where(computes & (left < least), -1.0, within)


class _BatchBound:
    """How many samples a device may compute in some time, in microbatches of any size."""

    def __init__(
        self, terms: Terms, role: Role, seconds: Mapping[str, Floats], largest: int
    ) -> None:
        """``seconds`` [2, 1 + largest] are of a microbatch, by kind of unit."""
        self._terms, self._role, self._seconds, self._largest = terms, role, seconds, largest
        # Sizes of microbatches, each of which stands for those up to the next.
        self._powers: Ints = np.asarray(2 ** np.arange(largest.bit_length()))

    def most_within(self, most: int, left_s: float, least_s: Floats) -> int:
        """``RoleTimes.most_within``, where larger microbatches need more.

        A batch of b samples takes  sum over phases of  max(least, b seconds + slowed),  which
        is convex in b: where a tangent meets ``left_s`` is not below the largest batch.
        """
        seconds, slowed_s = self._least_seconds
        seconds = seconds[:, :, : most.bit_length()]
        samples = np.minimum(self._fitting[:, : seconds.shape[2]], most)
        least_s = least_s[:, None, None]
        for _ in range(TANGENTS):
            phases_s = samples * seconds + slowed_s[:, None, None]
            is_own = phases_s > least_s
            over_s = np.where(is_own, phases_s, least_s).sum(axis=0) - left_s
            per_sample_s = np.where(is_own, seconds, 0.0).sum(axis=0)
            most_over = np.divide(  # samples; all of them where none is fast enough
                over_s, per_sample_s, out=np.full(over_s.shape, inf), where=per_sample_s > 0
            )
            samples = np.maximum(0.0, samples - np.where(over_s > 0, most_over, 0.0))
        return int(samples.max() * (1 + ROUNDING))

    @cached_property
    def _fitting(self) -> Floats:
        """[treatments, sizes] samples that fit at most in microbatches of so many or more."""
        terms, role, state = self._terms, self._role, self._terms.state
        if terms.has_endless_memory:
            return np.full((len(terms.policies), len(self._powers)), inf)
        stored = (role.limits.state_share or 0.0) * state.whole
        if not stored:
            stored = max(state.even or 0.0, terms.stored.least * terms.model.workload.numel)
        asked = (terms.model, terms.policies, role.device_kind, role.budget_bytes, self._powers)
        stored -= 2 * state.slack
        return fitting_batches(*asked, stored_numel=stored, host_bytes=role.host_bytes)

    @cached_property
    def _least_seconds(self) -> tuple[Floats, Floats]:
        """[2 classes, treatments, sizes] seconds that each sample of a round adds at least to
        the phases of each class, and [2 classes] what collectives add.

        A microbatch takes per sample as long as the fastest below the next size.
        """
        terms, forward_s, backward_s = self._terms, [], []
        sizes = np.arange(1, 1 + self._largest)
        last = np.minimum(2 * self._powers - 1, self._largest) - 1
        for i, of_turn in enumerate(terms.turns.classes):
            per_sample = self._seconds[of_turn.kind.name][:, 1:] / sizes
            least = np.minimum.accumulate(per_sample, axis=1)[:, last] * of_turn.num_units
            again = terms.are_recomputed[:, i, None] * least[0]
            forward_s.append(np.broadcast_to(least[0], again.shape))
            backward_s.append(least[1] + again)
        seconds = terms.rounds.in_whole_ones * np.array([*forward_s, *backward_s])
        excess = terms.model.profile.device(self._role.device_kind).overlap_slowdown
        return seconds, excess * terms.comm_s * (seconds > 0).all(axis=(1, 2))
