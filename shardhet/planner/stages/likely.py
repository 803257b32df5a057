"""How fast stages are expected to be, before any of them is planned.

A stage is taken to need as long as its compute, or its transfers if these take longer.  Where
all its devices take part, it needs no less.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise
from math import ceil, comb, inf, log2

from shardhet.planner.stages.bound import Speeds
from shardhet.planner.stages.groups import Positions, Stages
from shardhet.records.schedule import StepForm
from shardhet.simulator.pipeline import StageTimes, least_pipeline_s, pipeline_s

MAX_EXPECTED = 24  # cuts of each, by which they are compared
FORWARD_PART = 1 / 3  # of a round, about: backward computes two gradients
NUM_ROUNDS_TRIED = 4  # at the start
# Whether units are resharded after every use or once a step, and reduced every round or once.
FORMS = tuple(
    StepForm(reshard_after_forward=r, reshard_after_backward=r, reduce_each_round=reduces)
    for r in (True, False)
    for reduces in (True, False)
)
MORE_IN_FLIGHT = 4  # times what a pipeline without links needs, at most


@dataclass(frozen=True, slots=True)
class Trial:
    """A pipeline of given stages that is tried."""

    cuts: tuple[int, ...]  # the first unit of every stage but the first
    form: StepForm
    more: int = 0  # rounds in flight beyond those that a pipeline without links needs

    def in_flight(self, num_stages: int) -> list[int]:
        """Rounds in flight of each stage, falling to one."""
        return [
            min(self.form.num_rounds, 1 + (num_stages - 1 - i) * (1 + self.more))
            for i in range(num_stages)
        ]


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of the stages of one problem."""

    speeds: Speeds
    rounds: tuple[int, ...]  # numbers that divide the batch
    # Whether devices have room for the state of units, from the first to before the last.
    has_room: Callable[[Positions, int, int], bool]

    def likeliest(self, orders: Sequence[Stages]) -> Iterator[tuple[float, Stages]]:
        """Orders of stages by about the seconds of a step, which come with them.

        None is looked at closely before its bound is the least.
        """
        waiting = [
            (
                min(
                    self._bounded_cuts(stages, n)[0][0] for n in self.start_rounds(len(stages))
                ),
                i,
            )
            for i, stages in enumerate(orders)
        ]
        heapify(waiting)
        known: set[int] = set()
        while waiting:
            seconds, i = heappop(waiting)
            if i in known:
                yield seconds, orders[i]
            else:
                known.add(i)
                heappush(waiting, (max(seconds, self.expected_s(orders[i])), i))

    def expected_s(self, stages: Stages) -> float:
        """About the seconds of a step of the best of some cuts and rounds."""
        rounds = self.start_rounds(len(stages))
        return min(self._best_of_some(stages, number)[0] for number in rounds)

    def likely_cuts(self, stages: Stages) -> tuple[int, ...]:
        """The cuts that are expected to be fastest: no neighbour is, in as many rounds."""
        best, num_rounds = min(
            (self._best_of_some(stages, number), number)
            for number in self.start_rounds(len(stages))
        )
        stride = first_stride(len(self.speeds.units))
        while stride:
            moved = moved_cuts(best[1], stride, len(self.speeds.units))
            found = min(
                (
                    (self._about_s(stages, each, num_rounds), each)
                    for each in moved
                    if self._may_fit(stages, each)
                ),
                default=best,
            )
            if found < best:
                best = found
            else:
                stride //= 2
        return best[1]

    def _best_of_some(self, stages: Stages, num_rounds: int) -> tuple[float, tuple[int, ...]]:
        """The best of some cuts, after about the seconds of a step."""
        bounded = self._bounded_cuts(stages, num_rounds)
        best = inf, bounded[0][1]
        for least_s, cuts in bounded:
            if least_s >= best[0]:
                break
            best = min(best, (self._about_s(stages, cuts, num_rounds), cuts))
        return best

    def _bounded_cuts(
        self, stages: Stages, num_rounds: int
    ) -> list[tuple[float, tuple[int, ...]]]:
        """Some cuts with what a step of them takes at least, the best first."""
        number, form = len(self.speeds.units), replace(FORMS[-1], num_rounds=num_rounds)
        num_places = next(
            n for n in range(number - 1, 0, -1) if comb(n, len(stages) - 1) <= MAX_EXPECTED
        )
        places = sorted({1 + i * (number - 1) // num_places for i in range(num_places)})
        cuts = [self.speeds.balanced_cuts(stages), *combinations(places, len(stages) - 1)]
        return sorted(
            (self.least_s(stages, each, form) if self._may_fit(stages, each) else inf, each)
            for each in dict.fromkeys(cuts)
        )

    def _may_fit(self, stages: Stages, cuts: tuple[int, ...]) -> bool:
        bounds = pairwise((0, *cuts, len(self.speeds.units)))
        return all(
            self.has_room(positions, first, stop)
            for positions, (first, stop) in zip(stages, bounds, strict=True)
        )

    def least_s(self, stages: Stages, cuts: tuple[int, ...], form: StepForm) -> float:
        """No step is faster in which all devices of these stages take part."""
        times, hops_s = self._least_times(stages, cuts, form)
        return least_pipeline_s(times, hops_s, form.num_rounds)

    def _about_s(self, stages: Stages, cuts: tuple[int, ...], num_rounds: int) -> float:
        """Seconds of a step that gathers units in its first round and reduces in its last.

        Its rounds are taken to be alike, each with its part of what the first and the last
        wait for their transfers.
        """
        size, times = self.speeds.global_batch_size // num_rounds, []
        for positions, bounds in zip(
            stages, pairwise((0, *cuts, len(self.speeds.units))), strict=True
        ):
            compute_s = self.speeds.round_s(positions, *bounds, size)
            gathers_s, reductions_s = self.speeds.gathers_and_reductions_s(positions, *bounds)
            forward_s, backward_s = FORWARD_PART * compute_s, (1 - FORWARD_PART) * compute_s
            times.append(
                StageTimes(
                    forward_s + max(0.0, gathers_s - forward_s) / num_rounds,
                    backward_s + max(0.0, reductions_s - backward_s) / num_rounds,
                )
            )
        hops_s = [self.speeds.hop_s(*each, size) for each in pairwise(stages)]
        form = replace(FORMS[-1], num_rounds=num_rounds)
        trials = [Trial(cuts, form, more) for more in self.more_in_flight(stages, form)]
        return min(
            pipeline_s(times, hops_s, in_flight=held, num_rounds=num_rounds)
            for held in (each.in_flight(len(stages)) for each in trials)
        )

    def _least_times(
        self, stages: Stages, cuts: tuple[int, ...], form: StepForm
    ) -> tuple[list[StageTimes], list[float]]:
        """What all devices of each stage and the links between them take at least."""
        size = self.speeds.global_batch_size // form.num_rounds
        times = []
        for positions, bounds in zip(
            stages, pairwise((0, *cuts, len(self.speeds.units))), strict=True
        ):
            compute_s = self.speeds.round_s(positions, *bounds, size)
            transfers_s = self.speeds.transfers_s(positions, *bounds, form)
            times.append(StageTimes(max(compute_s, transfers_s / form.num_rounds), 0.0))
        return times, [self.speeds.hop_s(*each, size) for each in pairwise(stages)]

    def start_rounds(self, num_stages: int) -> list[int]:
        """About as many as keep stages busy."""
        wanted = 4 * num_stages
        return sorted(self.rounds, key=lambda n: abs(log2(n / wanted)))[:NUM_ROUNDS_TRIED]

    def more_in_flight(self, stages: Stages, form: StepForm) -> set[int]:
        """No further rounds in flight, and as many as hide messages both ways."""
        size = self.speeds.global_batch_size // form.num_rounds
        messages_s = max(2 * self.speeds.hop_s(*each, size) for each in pairwise(stages))
        round_s = max(self.speeds.least_step_s(stages), 1e-9) / form.num_rounds
        return {0, min(MORE_IN_FLIGHT, ceil(messages_s / round_s))}


def first_stride(num_units: int) -> int:
    """By how many units cuts are moved at first."""
    return max(1, num_units // 8)


def moved_cuts(cuts: tuple[int, ...], stride: int, num_units: int) -> list[tuple[int, ...]]:
    """Each cut moved both ways by so many units, and all of them together."""
    alone = [tuple(int(i == j) for i in range(len(cuts))) for j in range(len(cuts))]
    moved = [
        tuple(cut + sign * stride * each for cut, each in zip(cuts, steps, strict=True))
        for steps in (*alone, (1,) * len(cuts))
        for sign in (-1, 1)
    ]
    return [
        each
        for each in dict.fromkeys(moved)
        if all(one < other for one, other in pairwise((0, *each, num_units)))
    ]
