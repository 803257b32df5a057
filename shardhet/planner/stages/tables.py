"""What rounds of stages take at least, for all ranges of units and many pipelines at once.

Tables are [1 + units, 1 + units], by the first unit of a stage and the one after its last;
where there is no such stage, or its state does not fit on the devices, they are infinite.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, groupby
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

from shardhet.planner.stages.bound import Floats, Speeds
from shardhet.planner.stages.groups import Positions, Stages
from shardhet.records.schedule import StepForm
from shardhet.simulator.pipeline import (
    handed_back_bytes,
    handed_on_bytes,
    least_step_s,
    order_of_phases,
    stages_free_s,
)

Ints = NDArray[np.int64]
MAX_CUTS = 20_000  # of a number of stages; of more, some are looked at
MOST_AT_ONCE = 2**16  # pipelines: arrays of them stay in a cache
FORWARD_PART = 1 / 3  # of a round, about: backward computes two gradients


@dataclass(frozen=True)
class Tables:
    """Tables of the stages of one problem."""

    speeds: Speeds
    room_of: Callable[[Positions], float]  # elements whose state fits on some devices
    _fits: dict[Positions, NDArray[np.bool_]] = field(default_factory=dict)
    _least_s: dict[tuple[Positions, StepForm], Floats] = field(default_factory=dict)

    def least_round_s(self, positions: Positions, form: StepForm) -> Floats:
        """Seconds of a round at least, if all these devices take part: compute or transfers.

        The transfers that overlap nothing are none of a round's (``Speeds.exposed_s``).
        """
        key = positions, form
        if key not in self._least_s:
            size = self.speeds.round_size(form.num_rounds)
            longer_s = np.maximum(
                self.speeds.rounds_s(positions, size),
                self.speeds.overlapped_s(positions, form) / form.num_rounds,
            )
            self._least_s[key] = np.where(self._fit(positions), longer_s, inf)
        return self._least_s[key]

    def about_s(self, positions: Positions, num_rounds: int) -> Floats:
        """[2, ...] about the seconds of a forward and of a backward.

        Units are gathered in the first round and reduced in the last.  Rounds are taken to be
        alike, each with its part of what the first and the last wait for their transfers.
        """
        size = self.speeds.round_size(num_rounds)
        compute_s = self.speeds.rounds_s(positions, size)
        transfers_s = self.speeds.gathers_and_reductions_s(positions, unevenness=1.0)
        both_s = FORWARD_PART * compute_s, (1 - FORWARD_PART) * compute_s
        found = [
            own_s + np.maximum(0.0, waited_s - own_s) / num_rounds
            for own_s, waited_s in zip(both_s, transfers_s, strict=True)
        ]
        return np.where(self._fit(positions), found, inf)

    def _fit(self, positions: Positions) -> NDArray[np.bool_]:
        if positions not in self._fits:
            kind_of = self.speeds.scenario.workload.kind_of
            numels = [0, *accumulate(kind_of(unit).numel for unit in self.speeds.units)]
            stage = np.subtract.outer(numels, numels).T
            is_stage = np.triu(np.ones(stage.shape, dtype=bool), 1)
            self._fits[positions] = is_stage & (stage <= self.room_of(positions))
        return self._fits[positions]


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Orders of equally many stages with cuts; indices of both choose pipelines."""

    tables: Tables
    orders: Sequence[Stages]
    groups: Sequence[Positions]  # of all orders
    places: Ints  # [orders, stages] of the stages' devices in ``groups``
    cuts: Sequence[tuple[int, ...]]  # the first unit of every stage but the first
    first: Ints  # [cuts, stages] units
    stop: Ints
    # Of messages from each stage to the next.
    latency_s: Floats  # [orders, stages - 1]
    byte_s: Floats  # likewise
    nbytes: tuple[Floats, Floats]  # [cuts, stages - 1] per sample: there, and back

    @classmethod
    def of(
        cls,
        tables: Tables,
        orders: Sequence[Stages],
        all_cuts: Sequence[tuple[int, ...]] | None = None,
    ) -> "Pipelines":
        """These orders with the given cuts; None: with all, or if there are many with some that
        are evenly chosen.
        """
        speeds, number = tables.speeds, len(orders[0])
        groups = list(dict.fromkeys(each for stages in orders for each in stages))
        place_of = {positions: i for i, positions in enumerate(groups)}
        all_cuts = all_cuts or some_cuts(len(speeds.units), number)
        cuts = np.array(all_cuts, dtype=np.int64)
        links = [
            [speeds.link(stages[i], stages[i + 1]) for i in range(number - 1)]
            for stages in orders
        ]
        workload = speeds.scenario.workload
        there, back = (
            np.array([float(nbytes(workload, unit)) for unit in speeds.units])
            for nbytes in (handed_on_bytes, handed_back_bytes)
        )
        return cls(
            tables=tables,
            orders=orders,
            groups=groups,
            places=np.array([[place_of[each] for each in stages] for stages in orders]),
            cuts=all_cuts,
            first=np.insert(cuts, 0, 0, axis=1),
            stop=np.insert(cuts, number - 1, len(speeds.units), axis=1),
            latency_s=np.array([[link.latency_s for link, _ in each] for each in links]),
            byte_s=np.array(
                [[1 / (link.bandwidth_bytes_per_s * n) for link, n in each] for each in links]
            ),
            nbytes=(there[cuts], back[cuts]),
        )

    @property
    def num_stages(self) -> int:
        """Of each order."""
        return self.places.shape[1]

    @property
    def has_all_cuts(self) -> bool:
        """Whether no cuts were left out."""
        num_places = len(self.tables.speeds.units) - 1
        return len(self.cuts) == comb(num_places, self.num_stages - 1)

    def of_stages(self, by_group: Floats, order: Ints, cut: Ints) -> list[Floats]:
        """What tables [groups, ...] say of each stage of the chosen pipelines."""
        return [self.of_stage(by_group, i, order, cut) for i in range(self.num_stages)]

    def of_stage(self, by_group: Floats, i: int, order: Ints, cut: Ints) -> Floats:
        """The same of one stage."""
        return np.asarray(
            by_group[self.places[order, i], self.first[cut, i], self.stop[cut, i]]
        )

    def hops_s(
        self, num_rounds: int, order: Ints, cut: Ints
    ) -> tuple[list[Floats], list[Floats]]:
        """Seconds of a round from each stage to the next, and back."""
        size = self.tables.speeds.round_size(num_rounds)

        def seconds(nbytes: Floats, i: int) -> Floats:
            moving_s = size * nbytes[cut, i] * self.byte_s[order, i]
            return (nbytes[cut, i] > 0) * self.latency_s[order, i] + moving_s

        there, back = self.nbytes
        places = range(self.num_stages - 1)
        return [seconds(there, i) for i in places], [seconds(back, i) for i in places]

    def min_s(
        self,
        rounds_s: Sequence[Floats],
        num_rounds: int,
        order: Ints,
        cut: Ints,
        in_flight: Sequence[int] | None = None,
    ) -> Floats:
        """Seconds of a step at least, given those of a round of each stage."""
        hops_s = self.hops_s(num_rounds, order, cut)
        exposed_s = np.array([self.tables.speeds.exposed_s(each) for each in self.groups])
        per_step_s = [
            exposed_s[self.places[order, i], self.first[cut, i]] for i in range(self.num_stages)
        ]
        return np.asarray(
            least_step_s(rounds_s, per_step_s, hops_s, num_rounds, in_flight, np.maximum)
        )

    def least_in_form_s(
        self, form: StepForm, in_flight: Sequence[int] | None, order: Ints, cut: Ints
    ) -> Floats:
        """The same of a form, if all devices of the stages take part."""
        by_group = np.array([self.tables.least_round_s(each, form) for each in self.groups])
        rounds_s = self.of_stages(by_group, order, cut)
        return self.min_s(rounds_s, form.num_rounds, order, cut, in_flight)

    def about_s(
        self, num_rounds: int, in_flight: tuple[int, ...], order: Ints, cut: Ints
    ) -> Floats:
        """About the seconds of a step."""
        by_group = np.array([self.tables.about_s(each, num_rounds) for each in self.groups])
        forward_s, backward_s = (self.of_stages(by_group[:, i], order, cut) for i in range(2))
        free_s = stages_free_s(
            list(zip(forward_s, backward_s, strict=True)),
            self.hops_s(num_rounds, order, cut),
            order_of_phases(in_flight, num_rounds),
            np.maximum,
        )
        return np.maximum.reduce(free_s)

    def all_least_s(self, form: StepForm) -> Iterator[tuple[Ints, Floats]]:
        """Some orders and [orders, cuts] seconds of a step at least, until all have come."""
        cuts = np.arange(len(self.first))
        number = max(1, MOST_AT_ONCE // len(cuts))
        for start in range(0, len(self.orders), number):
            some = np.arange(start, min(start + number, len(self.orders)))
            yield some, self.least_in_form_s(form, None, some[:, None], cuts)


def pipelines_of(tables: Tables, orders: Sequence[Stages]) -> list[Pipelines]:
    """All orders, by their number of stages."""
    by_length = groupby(sorted(orders, key=len), key=len)
    return [Pipelines.of(tables, list(each)) for _, each in by_length]


def some_cuts(num_units: int, num_stages: int) -> list[tuple[int, ...]]:
    """All cuts of units into stages, or between every second, third ... unit only."""
    number = next(n for n in range(num_units - 1, 0, -1) if comb(n, num_stages - 1) <= MAX_CUTS)
    places = sorted({1 + i * (num_units - 1) // number for i in range(number)})
    return list(combinations(places, num_stages - 1))
