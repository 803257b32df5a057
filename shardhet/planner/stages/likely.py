"""How fast stages are expected to be, before any of them is planned.

A stage is taken to need as long as its compute, or its transfers if these take longer.  Where
all its devices take part, it needs no less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, log2

import numpy as np

from shardhet.planner.stages.groups import Stages
from shardhet.planner.stages.tables import Pipelines, Tables
from shardhet.records.schedule import StepForm

MAX_EXPECTED = 16  # cuts of each, by which they are compared
NUM_ROUNDS_TRIED = 4  # at the start
# Whether units are resharded after every use or once a step, and reduced every round or once.
FORMS = tuple(
    StepForm(reshard_after_forward=r, reshard_after_backward=r, reduce_each_round=reduces)
    for r in (True, False)
    for reduces in (True, False)
)
ONLY = np.zeros(1, dtype=np.int64)  # the index of one pipeline
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


@dataclass(frozen=True)
class Expected:
    """What is expected of the stages of one problem."""

    tables: Tables
    rounds: tuple[int, ...]  # numbers that divide the batch
    # About the seconds of a step with the likely cuts of an order, by number of rounds.
    _likely: dict[Stages, dict[int, tuple[float, tuple[int, ...]]]] = field(
        default_factory=dict
    )

    def likeliest(self, pipelines: Sequence[Pipelines]) -> list[tuple[float, Stages]]:
        """Orders of stages by about the seconds of a step, which come with them."""
        for each in pipelines:
            for number in self.start_rounds(each.num_stages):
                self._expect(each, number)
        orders = [stages for each in pipelines for stages in each.orders]
        found = [
            (min(about_s for about_s, _ in self._likely[stages].values()), i)
            for i, stages in enumerate(orders)
        ]
        return [(about_s, orders[i]) for about_s, i in sorted(found)]

    def likely_cuts(self, stages: Stages, num_rounds: int) -> tuple[int, ...]:
        """The cuts that are expected to be fastest, in so many rounds."""
        if num_rounds not in self._likely.get(stages, {}):
            self._expect(Pipelines.of(self.tables, [stages]), num_rounds)
        return self._likely[stages][num_rounds][1]

    def _expect(self, pipelines: Pipelines, num_rounds: int) -> None:
        """Find the likely cuts of every order: of those that no bound shows to be slow."""
        number = pipelines.num_stages
        forms = replace(FORMS[-1], num_rounds=num_rounds)
        trials = [Trial((), forms, more) for more in range(MORE_IN_FLIGHT + 1)]
        held = dict.fromkeys(tuple(each.in_flight(number)) for each in trials)
        for some, min_s in pipelines.all_least_s(forms):
            most = min(MAX_EXPECTED, min_s.shape[1])
            cuts = np.argpartition(min_s, most - 1, axis=1)[:, :most]
            about_s = np.minimum.reduce(
                [pipelines.about_s(num_rounds, each, some[:, None], cuts) for each in held]
            )
            rows = np.arange(len(some))
            best = about_s.argmin(axis=1)
            for i, seconds, cut in zip(
                some, about_s[rows, best], cuts[rows, best], strict=True
            ):
                found = float(seconds), pipelines.cuts[cut]
                self._likely.setdefault(pipelines.orders[i], {})[num_rounds] = found

    def min_s(self, stages: Stages, trial: Trial) -> float:
        """No step is faster in which all devices of these stages take part."""
        one = Pipelines.of(self.tables, [stages], [trial.cuts])
        held = trial.in_flight(len(stages))
        return float(one.least_in_form_s(trial.form, held, ONLY, ONLY).item())

    def start_rounds(self, num_stages: int) -> list[int]:
        """About as many as keep stages busy."""
        wanted = 4 * num_stages
        return sorted(self.rounds, key=lambda n: abs(log2(n / wanted)))[:NUM_ROUNDS_TRIED]

    def more_in_flight(self, stages: Stages, trial: Trial) -> set[int]:
        """No further rounds in flight, and as many as hide messages both ways."""
        speeds, number = self.tables.speeds, trial.form.num_rounds
        one = Pipelines.of(self.tables, [stages], [trial.cuts])
        there_s, back_s = one.hops_s(number, ONLY, ONLY)
        messages_s = float(np.add(there_s, back_s).max())
        together = speeds.rounds_s(tuple(sorted(sum(stages, ()))), speeds.round_size(number))
        return {0, min(MORE_IN_FLIGHT, ceil(messages_s / max(together[0, -1], 1e-9)))}


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
