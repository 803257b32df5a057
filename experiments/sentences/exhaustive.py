"""All plans of equal rounds that take no longer than a limit, by going through them.

It shares the prices with the planner (``CostModel``) and nothing else.  What a device may do in
a round is listed; devices are then put together one after the other, and what is already too
slow, or leaves no room for the state, is dropped.  A plan counts once it is priced with its
shares rounded to rows, and fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import inf

import numpy as np

from shardhet.planner.candidates.recompute import recompute_choices
from shardhet.planner.forms import BatchRounds
from shardhet.planner.problem.problem import Bools, Floats, Ints
from shardhet.pricing.cost import CostModel
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.step_cost import StepCost
from shardhet.pricing.turns import taking_part
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import StepForm

NUM_STEPS = 4  # of a kind of unit that may be recomputed in part
LEAST_MIXED = 16  # microbatches up to this size, or twice what was measured, are mixed
MOST_JOINED = 10_000_000  # numbers in one table of combinations
Sizes = tuple[int, ...]


class TooManyError(RuntimeError):
    """There are too many combinations to go through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What plans are asked for."""

    scenario: Scenario
    batch: int
    max_rounds: int | None
    max_microbatch_size: int | None

    @property
    def budgets(self) -> list[int]:
        """Bytes of each device."""
        cluster = self.scenario.cluster
        return [cluster.memory_budget_bytes(i) for i in range(cluster.world_size)]

    def forms(self) -> Iterator[StepForm]:
        """Those of equal rounds."""
        for number in range(1, min(self.batch, self.max_rounds or self.batch) + 1):
            if self.batch % number == 0:
                yield from BatchRounds(number, self.batch).forms()


@dataclass(frozen=True, slots=True)
class Splits:
    """How a device may cut batches, [n] each, and what that takes in one unit of each kind."""

    sizes: Sequence[Sizes]
    batch: Ints
    largest: Ints
    seconds: dict[str, tuple[Floats, Floats]]  # of forward and backward


@dataclass(frozen=True, slots=True)
class Table:
    """What devices may do together, [n] each."""

    batch: Ints
    seconds: Floats  # [n, J] of the turns of the step, slowed by what overlaps them
    room: Floats  # [n, devices] elements of state
    recomputed: Ints  # units of all devices
    picks: Ints  # [n, sets] of which row of each set's own table

    def only(self, kept: Bools | Ints) -> "Table":
        """Some rows."""
        return Table(
            self.batch[kept],
            self.seconds[kept],
            self.room[kept],
            self.recomputed[kept],
            self.picks[kept],
        )


@dataclass(frozen=True, slots=True)
class Combination:
    """What all devices do."""

    form: StepForm
    min_s: float  # no plan that does this is faster
    recomputed: int
    ranks: tuple[RankPlan, ...]  # without shares


class Exhaustive:
    """Combinations under one set of wishes."""

    def __init__(
        self,
        asked: Asked,
        *,
        limit_s: float,
        part: float = 1.0,
        is_alike: bool = False,
        active: tuple[int, ...] | None = None,
    ) -> None:
        """Of at most ``limit_s``, that fill at most a part of every budget.

        With ``is_alike``, devices of one kind and capacity do the same.  In plans that are
        realized no device is idle, or all but those at ``active`` are; None: any may be.
        """
        self.asked, self.limit_s, self.active = asked, limit_s, active
        self.budgets = [int(part * each) for each in asked.budgets]
        devices = asked.scenario.cluster.devices
        alike: dict[object, list[int]] = {}
        for i, each in enumerate(devices):
            alike.setdefault(each if is_alike else i, []).append(i)
        self.sets = [tuple(each) for each in alike.values()]
        profile = asked.scenario.profile
        self.rates = np.array(  # elements per second of each device's optimizer
            [
                1 / (profile.device(each.kind).optimizer_seconds_per_element + 1e-15)
                for each in devices
            ]
        )

    @cached_property
    def combinations(self) -> list[Combination]:
        """All of them, the fastest first."""
        found = [each for form in self.asked.forms() for each in self._of_form(form)]
        return sorted(found, key=lambda each: each.min_s)

    def realized(self, combination: Combination) -> tuple[Plan, StepCost] | None:
        """The plan with its price; None if no shares that are tried fit, rounded to rows."""
        model = CostModel(self.asked.scenario).in_form(combination.form)
        lines = [model.lines_of(rank) for rank in combination.ranks]
        fits = [
            ((budget - own) / per_numel).min()
            for (own, per_numel), budget in zip(lines, self.budgets, strict=True)
        ]
        room = np.maximum(0.0, fits)
        for positions in self.sets:
            room[list(positions)] = room[list(positions)].min()
        whole = model.workload.numel
        spare = np.maximum(0.0, room - 2 * max(k.max_row_numel for k in model.workload.kinds))
        for limits, rates in ((room, self.rates), (spare, self.rates), (room, room)):
            if limits.sum() < whole:
                continue
            shares = np.minimum(limits, _level(limits[None], rates, whole)[0] * rates)
            shares /= shares.sum()
            ranks = tuple(
                RankPlan(
                    device=rank.device,
                    microbatch_sizes=rank.microbatch_sizes,
                    state_share=float(share),
                    recomputed_units=rank.recomputed_units,
                )
                for rank, share in zip(combination.ranks, shares, strict=True)
            )
            plan = Plan(ranks=ranks, **asdict(combination.form))
            predicted = model.predict(plan).within(self.budgets)
            stored = [rank.stored_numel for rank in predicted.ranks]
            active = taking_part(ranks, stored)
            is_asked = self.active in (None, active) or len(active) == len(ranks)
            if is_asked and all(rank.fits for rank in predicted.ranks):
                return plan, predicted
        return None

    def _of_form(self, form: StepForm) -> Iterator[Combination]:
        model = CostModel(self.asked.scenario).in_form(form)
        lister = _Lister(self, model)
        tables = [lister.table(each) for each in self.sets]
        if not all(len(each.batch) for each in tables):
            return
        joined = tables[0]
        most_after = [
            sum(int(each.batch.max(initial=0)) for each in tables[i + 1 :])
            for i in range(len(tables))
        ]
        for i, table in enumerate(tables):
            joined = table if i == 0 else self._joined(lister, joined, table)
            left = lister.round_size - joined.batch
            joined = joined.only((left >= 0) & (left <= most_after[i]))
            if not len(joined.batch):
                return
        joined = joined.only(joined.room.sum(axis=1) >= model.workload.numel)
        if not len(joined.batch):
            return
        order = [i for each in self.sets for i in each]
        rates = self.rates[order]
        optimizer_s = _level(joined.room, rates, model.workload.numel)
        min_s = lister.step_s(joined.seconds) + optimizer_s
        for k in np.nonzero(min_s <= self.limit_s)[0]:
            yield Combination(
                form,
                float(min_s[k]),
                int(joined.recomputed[k]),
                lister.ranks(tables, joined.picks[k]),
            )

    def _joined(self, lister: "_Lister", one: Table, other: Table) -> Table:
        """Every row of one beside every row of the other, but for those too slow or large."""
        parts = []
        for batch in np.unique(other.batch):
            few = other.only(other.batch == batch)
            fitting = one.only(one.batch <= lister.round_size - batch)
            if not len(fitting.batch):
                continue
            if len(few.batch) * fitting.seconds.size > MOST_JOINED:
                raise TooManyError
            a, b = (each.ravel() for each in np.indices((len(fitting.batch), len(few.batch))))
            seconds = np.maximum(fitting.seconds[a], few.seconds[b])
            kept = lister.step_s(seconds) <= self.limit_s
            a, b = a[kept], b[kept]
            parts.append(
                Table(
                    fitting.batch[a] + few.batch[b],
                    seconds[kept],
                    np.concatenate((fitting.room[a], few.room[b]), axis=1),
                    fitting.recomputed[a] + few.recomputed[b],
                    np.concatenate((fitting.picks[a], few.picks[b]), axis=1),
                )
            )
        return Table(
            np.concatenate([each.batch for each in parts]),
            np.concatenate([each.seconds for each in parts]),
            np.concatenate([each.room for each in parts]),
            np.concatenate([each.recomputed for each in parts]),
            np.concatenate([each.picks for each in parts]),
        )


class _Lister:
    """Lists what devices may do in the rounds of one form."""

    def __init__(self, of: Exhaustive, model: CostModel) -> None:
        self._of, self._model = of, model
        self.round_size = of.asked.batch // model.num_rounds
        self._choices = recompute_choices(model, NUM_STEPS)
        turns = model.turns(unevenness=0.0, recomputed=self._choices)
        self._fixed_s = turns.exposed_comm_s + model.overhead_s
        # Per turn: unit, units and rounds in which it is alike, phase, seconds of collectives.
        self._turns = [
            (each.kind.name, each.unit_fqn, each.num_units * rounds.num_rounds, phase, comm_s)
            for each in turns.classes
            for rounds in each.rounds
            for phase, comm_s in enumerate(rounds.comm_s)
        ]
        self._comm_s = np.array([each[-1] for each in self._turns])
        self._own: dict[tuple[int, ...], list[tuple[Sizes, tuple[str, ...]]]] = {}

    def step_s(self, seconds: Floats) -> Floats:
        """[n] seconds of the step but for the optimizer, from those of turns [n, J]."""
        found: Floats = np.maximum(seconds, self._comm_s).sum(axis=1) + self._fixed_s
        return found

    def table(self, positions: tuple[int, ...]) -> Table:
        """What each of these devices may do, all alike."""
        model, of, number = self._model, self._of, len(positions)
        device = of.asked.scenario.cluster.devices[positions[0]]
        asked = of.asked
        splits = _splits(asked.scenario, device.kind, asked.batch, asked.max_microbatch_size)
        fitting = np.nonzero(splits.batch * number <= self.round_size)[0]
        found, self._own[positions] = [], []
        for patterns in self._choices:
            rank = RankPlan(microbatch_sizes=(), state_share=0.0, recomputed_units=patterns)
            some = fitting if patterns == () else fitting[splits.batch[fitting] > 0]
            [room] = model.room_for_state(
                [rank],
                device.kind,
                min(of.budgets[i] for i in positions),
                batches=splits.batch[some],
                sizes=splits.largest[some],
                host_bytes=inf,
            )
            some, room = some[room >= 0], room[room >= 0]
            seconds = self._seconds(device.kind, splits, some, rank)
            first = len(self._own[positions])
            self._own[positions] += [(splits.sizes[k], patterns) for k in some]
            table = Table(
                splits.batch[some] * number,
                seconds,
                np.repeat(room[:, None], number, axis=1),
                np.where(splits.batch[some] > 0, model.num_recomputed(rank) * number, 0),
                first + np.arange(len(some))[:, None],
            )
            found.append(table.only(self.step_s(seconds) <= of.limit_s))
        whole = Table(
            np.concatenate([each.batch for each in found]),
            np.concatenate([each.seconds for each in found]),
            np.concatenate([each.room for each in found]),
            np.concatenate([each.recomputed for each in found]),
            np.concatenate([each.picks for each in found]),
        )
        return whole.only(_undominated(whole))

    def _seconds(self, kind: str | None, splits: Splits, some: Ints, rank: RankPlan) -> Floats:
        excess = self._model.profile.device(kind).overlap_slowdown
        columns = []
        for name, fqn, number, phase, comm_s in self._turns:
            forward_s, backward_s = splits.seconds[name]
            alone_s = forward_s if phase == 0 else backward_s
            if phase == 1 and rank.recomputes(fqn):
                alone_s = alone_s + forward_s
            seconds = number * alone_s[some]
            columns.append(np.where(seconds > 0, seconds + excess * comm_s, 0.0))
        return np.stack(columns, axis=1)

    def ranks(self, tables: Sequence[Table], picks: Ints) -> tuple[RankPlan, ...]:
        """What one row says of every device."""
        devices = self._of.asked.scenario.cluster.devices
        found: dict[int, RankPlan] = {}
        for positions, pick in zip(self._of.sets, picks, strict=True):
            sizes, patterns = self._own[positions][pick]
            for i in positions:
                found[i] = RankPlan(
                    device=devices[i],
                    microbatch_sizes=sizes,
                    state_share=0.0,
                    recomputed_units=patterns if sizes else (),
                )
        return tuple(found[i] for i in range(len(devices)))


def _undominated(table: Table) -> Ints:
    """Rows that no other of the same batch equals or beats in everything."""
    everything = np.column_stack((table.seconds, -table.room[:, :1], table.recomputed))
    kept: list[int] = []
    for batch in np.unique(table.batch):
        rows = np.nonzero(table.batch == batch)[0]
        rows = rows[np.argsort(everything[rows].sum(axis=1), kind="stable")]
        best: list[int] = []
        for row in rows:
            if not best or not (everything[best] <= everything[row]).all(axis=1).any():
                best.append(row)
        kept += best
    return np.array(kept, dtype=np.int64)


def _level(room: Floats, rates: Floats, whole: float) -> Floats:
    """[n] the least t at which min(room [n, devices], t * rates) sums to the whole."""
    times = room / rates
    order = np.argsort(times, axis=1)
    sorted_s = np.take_along_axis(times, order, axis=1)
    full = np.take_along_axis(room, order, axis=1)
    before = np.cumsum(full, axis=1) - full  # in those that are full earlier
    rate = np.cumsum(rates[order][:, ::-1], axis=1)[:, ::-1]  # of the others
    is_enough = before + sorted_s * rate >= whole * (1 - 1e-12)
    k = np.where(is_enough.any(axis=1), is_enough.argmax(axis=1), room.shape[1] - 1)[:, None]
    found = (whole - np.take_along_axis(before, k, 1)) / np.take_along_axis(rate, k, 1)
    return found[:, 0]


@lru_cache(maxsize=8)
def _splits(scenario: Scenario, kind: str | None, batch: int, most: int | None) -> Splits:
    """Alike but the last, or as is fastest with microbatches up to some size."""
    workload, largest = scenario.workload, min(batch, most or batch)
    names = [kind.name for kind in workload.kinds]
    units = {name: scenario.profile.unit(kind, name) for name in names}
    curves = {
        name: (at_sizes(each.forward_s, largest), at_sizes(each.backward_s, largest))
        for name, each in units.items()
    }
    whole_s = sum(
        workload.num_units_by_kind[name] * (forward_s + backward_s)
        for name, (forward_s, backward_s) in curves.items()
    )
    measured = max(each.points[-1].microbatch_size for each in units.values())
    found: dict[Sizes, None] = {(): None}
    fastest: list[tuple[float, Sizes]] = [(0.0, ())] + [(np.inf, ())] * batch
    for size in range(1, largest + 1):
        for number in range(size, batch + 1):
            whole, rest = divmod(number, size)
            found[(size,) * whole + ((rest,) if rest else ())] = None
        if size > max(LEAST_MIXED, 2 * measured):
            continue
        for number in range(size, batch + 1):
            before_s, sizes = fastest[number - size]
            with_size_s = before_s + float(whole_s[size])
            if with_size_s < fastest[number][0] * (1 - 1e-12):
                fastest[number] = (with_size_s, (size, *sizes))
                found[size, *sizes] = None
    every = list(found)
    return Splits(
        sizes=every,
        batch=np.array([sum(each) for each in every]),
        largest=np.array([max(each, default=0) for each in every]),
        seconds={
            name: tuple(  # type: ignore[misc]
                np.array([curve[list(each)].sum() for each in every]) for curve in of_unit
            )
            for name, of_unit in curves.items()
        },
    )
