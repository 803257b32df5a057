"""The pipelines that the search passed over: each is priced, or a bound says it is no faster.

Bounds are of the compute, the transfers and the messages of stages, and of what is known of
stages with fewer units or with less in flight.  The search stops where too many
pipelines are left, or too many stages would have to be planned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Protocol

import numpy as np

from shardhet.planner.stages.groups import Stages
from shardhet.planner.stages.likely import FORMS, MORE_IN_FLIGHT, Trial
from shardhet.planner.stages.plans import StagePlans
from shardhet.planner.stages.tables import Ints, Pipelines, Tables

MOST_LEFT = 2**18  # pipelines, each in any form and with any number of rounds in flight
MOST_PLANNED = 1500  # stages


class Search(Protocol):
    """What is known of a problem."""

    tables: Tables
    plans: StagePlans
    rounds: tuple[int, ...]

    def seconds_of(self, stages: Stages, trial: Trial, cutoff_s: float = inf) -> float:
        """Seconds of a step, or no less than ``cutoff_s``."""


@dataclass(frozen=True)
class _Left:
    """Pipelines of a number of stages and of rounds that no bound rejects."""

    pipelines: Pipelines
    num_rounds: int
    order: Ints
    cut: Ints
    min_s: float


@dataclass(frozen=True, slots=True)
class RestFound:
    """What came of a look at the rest."""

    best: tuple[float, Trial, Stages] | None  # the fastest that is faster than what was known
    is_all: bool  # no other is faster


def best_of_rest(
    search: Search, pipelines: Sequence[Pipelines], cutoff_s: float, least_gain: float
) -> RestFound:
    """The fastest pipeline, if it takes less than ``cutoff_s``."""
    rest = _Rest(search, cutoff_s, least_gain, search.plans.num_solved + MOST_PLANNED)
    left: list[_Left] = []
    for each in chain.from_iterable(map(rest.left_of, pipelines)):
        left.append(each)
        if sum(len(each.order) for each in left) > MOST_LEFT:
            return RestFound(None, is_all=False)
    # While none is known that fits, those that need the least memory come first.
    fits = cutoff_s < inf
    left.sort(key=lambda each: each.min_s if fits else -each.num_rounds)
    for each in left:
        for trial in _trials(each.num_rounds, each.pipelines.num_stages, frugal=not fits):
            rest.try_all(each, trial)
    is_all = all(each.has_all_cuts for each in pipelines)
    return RestFound(rest.best, is_all=is_all and search.plans.num_solved < rest.most_solved)


def _trials(num_rounds: int, num_stages: int, *, frugal: bool) -> Iterator[Trial]:
    """Forms and rounds in flight, without cuts: those that differ.

    With one round it is the same how often units are reduced.  The ``frugal`` forms come
    first, or else those that transfer the least.
    """
    seen = set()
    for form in FORMS if frugal else reversed(FORMS):
        for more in range(MORE_IN_FLIGHT + 1):
            trial = Trial((), replace(form, num_rounds=num_rounds), more)
            reduces = num_rounds > 1 and form.reduce_each_round
            key = form.reshard_after_forward, reduces, *trial.in_flight(num_stages)
            if key not in seen:
                seen.add(key)
                yield trial


@dataclass
class _Rest:
    search: Search
    cutoff_s: float
    least_gain: float  # as part of a step
    most_solved: int
    best: tuple[float, Trial, Stages] | None = None

    def left_of(self, pipelines: Pipelines) -> Iterator[_Left]:
        """Those that may be faster, by rounds; of more than ``MOST_LEFT``, some."""
        for number in self.search.rounds:
            found: list[tuple[Ints, Ints]] = []
            min_s, number_found = inf, 0
            for some, each_s in pipelines.all_least_s(replace(FORMS[-1], num_rounds=number)):
                order, cut = np.nonzero(each_s < self.cutoff_s)
                found.append((some[order], cut))
                min_s = min(min_s, float(each_s.min()))
                number_found += len(order)
                if number_found > MOST_LEFT:
                    break
            orders, cuts = (np.concatenate(each) for each in zip(*found, strict=True))
            if len(orders):
                yield _Left(pipelines, number, orders, cuts, min_s)

    def try_all(self, left: _Left, trial: Trial) -> None:
        """Price those that may be faster in such a form, the least bounds first.

        What is learned of stages is used for the bounds of the others.
        """
        pipelines, plans = left.pipelines, self.search.plans
        order, cut = left.order, left.cut
        form, in_flight = trial.form, trial.in_flight(pipelines.num_stages)
        own_s = [self.search.tables.least_round_s(each, form) for each in pipelines.groups]
        while plans.num_solved < self.most_solved:
            rounds_s = []
            for i, held in enumerate(in_flight):
                known_s = [plans.known_s(each, form, held) for each in pipelines.groups]
                rounds_s.append(pipelines.of_stage(np.maximum(own_s, known_s), i, order, cut))
            min_s = pipelines.min_s(rounds_s, form.num_rounds, order, cut, in_flight)
            kept = np.nonzero(min_s < self.cutoff_s)[0]
            kept = kept[np.argsort(min_s[kept], kind="stable")]
            order, cut = order[kept], cut[kept]
            tried = self._try(left, trial, order, cut)
            if tried == len(order):
                return
            order, cut = order[tried:], cut[tried:]

    def _try(self, left: _Left, trial: Trial, order: Ints, cut: Ints) -> int:
        """Price pipelines until stages have been planned for one; returns how many."""
        pipelines, plans = left.pipelines, self.search.plans
        before = plans.num_solved
        for tried, (i, j) in enumerate(zip(order, cut, strict=True)):
            if plans.num_solved > before:
                return tried
            stages, one = pipelines.orders[i], replace(trial, cuts=pipelines.cuts[j])
            seconds = self.search.seconds_of(stages, one, self.cutoff_s)
            if seconds < self.cutoff_s:
                self.best = seconds, one, stages
                self.cutoff_s = seconds * (1 - self.least_gain)
        return len(order)
