"""What no plan can beat, with stages or without: the compute of all devices together.

A device takes at least its least seconds per sample for each unit that it computes, so with
x_ku the samples of units of kind u that all n_k devices of kind k compute,

    minimise T   such that   sum_u t_ku x_ku <= n_k T,   sum_k x_ku >= B n_u

Memory, links and the optimizer are left out.  ``Speeds`` bounds pipelines of given stages: of
n samples a device computes in microbatches of at most n, each no faster per sample than the
fastest of these, so that rounds of few samples are slow.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.stages.groups import Positions
from shardhet.pricing.launches import gather_s, reduce_s
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.turns import TurnPrices
from shardhet.records.cluster import Link
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import link_between

Floats = NDArray[np.float64]


def seconds_by_size(scenario: Scenario, largest: int) -> dict[str | None, dict[str, Floats]]:
    """[1 + sizes] of forward and backward, by kind of device and of unit."""
    size = min(largest, MAX_MICROBATCH_SIZE)
    found: dict[str | None, dict[str, Floats]] = {}
    for kind in dict.fromkeys(device.kind for device in scenario.cluster.devices):
        found[kind] = {}
        for name in {unit.kind for unit in scenario.workload.units if unit.fqn}:
            unit = scenario.profile.unit(kind, name)
            both = at_sizes(unit.forward_s, size) + at_sizes(unit.backward_s, size)
            found[kind][name] = both
    return found


def seconds_per_sample(scenario: Scenario, largest: int) -> dict[str | None, dict[str, float]]:
    """The least seconds per sample of forward and backward, by kind of device and of unit."""
    return {
        kind: {name: float((s[1:] / np.arange(1, len(s))).min()) for name, s in by_name.items()}
        for kind, by_name in seconds_by_size(scenario, largest).items()
    }


def together_s(scenario: Scenario, num_samples: int) -> float:
    """The least seconds in which all devices together compute so many whole samples."""
    units = Counter(unit.kind for unit in scenario.workload.units if unit.fqn)
    numbers = np.array([[float(units[name]) for name in sorted(units)]])
    curves = seconds_by_size(scenario, num_samples)
    return float(_together_s(scenario, curves, numbers, num_samples)[0])


def is_divided(scenario: Scenario, num_samples: int) -> bool:
    """Whether samples are so many that parts of one count as well."""
    return num_samples > MAX_MICROBATCH_SIZE * scenario.cluster.world_size


def _together_s(
    scenario: Scenario,
    curves: Mapping[str | None, Mapping[str, Floats]],
    numbers: Floats,  # [stages, kinds of unit]
    num_samples: int,
) -> Floats:
    """[stages] the same of stages with so many units of each kind; 0.0 of none.

    Where parts of a sample count as well, that is less by next to nothing.
    """
    kinds = Counter(device.kind for device in scenario.cluster.devices)
    alone_s: list[Floats] = []  # [stages, sizes] per sample, of no larger microbatches
    for kind in kinds:
        of_units = np.array([curves[kind][name] for name in sorted(curves[kind])])
        sizes = np.arange(1, min(1 + num_samples, of_units.shape[1]))
        alone_s.append(np.minimum.accumulate(numbers @ of_units[:, sizes] / sizes, axis=1))
    if is_divided(scenario, num_samples):
        with np.errstate(divide="ignore"):
            pairs = zip(kinds.values(), alone_s, strict=True)
            return np.asarray(num_samples / sum(n / each[:, -1] for n, each in pairs))
    samples = np.arange(1, 1 + num_samples)
    by_kind: list[Floats] = []
    for min_s in alone_s:
        whole_s = samples * min_s[:, np.minimum(samples, min_s.shape[1]) - 1]
        by_kind.append(np.minimum.accumulate(whole_s[:, ::-1], axis=1)[:, ::-1])
    # Dealt out evenly they take no less than the least; what takes longer is not needed.
    even = -(-num_samples // scenario.cluster.world_size) - 1
    enough_s = np.maximum.reduce([whole_s[:, even] for whole_s in by_kind])
    most = [int((s <= enough_s[:, None]).sum(axis=1).max()) for s in by_kind]
    by_time = np.hstack([s[:, :n] for s, n in zip(by_kind, most, strict=True)])
    # Each device computes one sample more at each of these times.
    weights = np.repeat(list(kinds.values()), most)
    order = np.argsort(by_time, axis=1, kind="stable")
    place = (np.cumsum(weights[order], axis=1) >= num_samples).argmax(axis=1)
    rows = np.arange(len(numbers))
    return np.asarray(by_time[rows, order[rows, place]])


def together_on_kinds_s(
    times: Floats,  # [kinds of devices, kinds of units], seconds per sample
    devices: Sequence[int],  # of each kind
    units: Sequence[int],  # of each kind
    num_samples: int,
) -> float:
    """The T of the programme at the top of this file, in which samples may be divided.

    It is solved for one device of each kind, in slowest units and even shares of the samples:
    HiGHS breaks rows by up to 1e-7 and drops coefficients of 1e-9 and less (scipy 1.17), which
    would be whole steps of microseconds.
    """
    from scipy.optimize import linprog  # imported here: half a second

    (num_kinds, num_units), world_size = times.shape, sum(devices)
    slowest_s = float(times.max()) or 1.0
    on_device = np.kron(np.eye(num_kinds), np.ones(num_units)) * (times / slowest_s).ravel()
    of_unit = np.tile(np.eye(num_units), num_kinds) * np.repeat(devices, num_units) / world_size
    found = linprog(
        [0.0] * times.size + [1.0],
        A_ub=np.block(
            [[on_device, -np.ones((num_kinds, 1))], [-of_unit, np.zeros((num_units, 1))]]
        ),
        b_ub=[0.0] * num_kinds + [-float(n) for n in units],
        method="highs",
    )
    return float(found.fun) * slowest_s * num_samples / world_size


@dataclass(frozen=True)
class Speeds:
    """How fast groups of devices compute units at best, and cuts that follow from it."""

    scenario: Scenario
    smaller: Callable[[Positions], Scenario]  # the scenario of some devices
    units: Sequence[Unit]  # that compute
    global_batch_size: int
    # By kind of device and of unit.
    _known_curves: dict[Positions, dict[str | None, dict[str, Floats]]] = field(
        default_factory=dict
    )
    # [1 + units] of the gather and of the reduction of each unit, by unevenness.
    _known_transfers_s: dict[tuple[Positions, float], tuple[Floats, Floats]] = field(
        default_factory=dict
    )
    _known_links: dict[tuple[Positions, Positions], tuple[Link, int]] = field(
        default_factory=dict
    )
    _known_rounds_s: dict[tuple[Positions, int], Floats] = field(default_factory=dict)
    _known_numbers: list[tuple[Floats, NDArray[np.int64]]] = field(default_factory=list)

    def round_size(self, num_rounds: int) -> int:
        """Samples of each of so many rounds."""
        return self.global_batch_size // num_rounds

    def least_of_any_s(self) -> float:
        """Seconds that every step takes at least, with stages or without.

        Each device is as fast as alone: of many, the slowest sets the pace, which derived times
        count.
        """
        positions = {device.kind: i for i, device in enumerate(self.scenario.cluster.devices)}
        least: dict[str | None, dict[str, float]] = {}
        for i in positions.values():
            least |= seconds_per_sample(self.smaller((i,)), self.global_batch_size)
        numbers = Counter(device.kind for device in self.scenario.cluster.devices)
        units = Counter(unit.kind for unit in self.units)
        times = np.array([[of_kind[unit] for unit in units] for of_kind in least.values()])
        counts = [numbers[kind] for kind in least]
        return together_on_kinds_s(times, counts, [*units.values()], self.global_batch_size)

    def rounds_s(self, positions: Positions, num_samples: int) -> Floats:
        """Seconds that some devices compute so many samples, or more, by first unit and stop.

        They are the least in which all devices together reach the number.
        """
        key = positions, num_samples
        if key not in self._known_rounds_s:
            numbers, which = self._numbers()
            self._known_rounds_s[key] = self._of_numbers_s(*key, numbers)[which]
        return self._known_rounds_s[key]

    def _numbers(self) -> tuple[Floats, NDArray[np.int64]]:
        """Different numbers of units by kind, and which a stage has by first unit and stop."""
        if not self._known_numbers:
            kinds = {kind: i for i, kind in enumerate(sorted({e.kind for e in self.units}))}
            before = np.zeros((1 + len(self.units), len(kinds)))
            for i, unit in enumerate(self.units):
                before[i + 1 :, kinds[unit.kind]] += 1
            between = np.maximum(before[None, :] - before[:, None], 0.0)
            numbers, which = np.unique(
                between.reshape(-1, len(kinds)), axis=0, return_inverse=True
            )
            self._known_numbers.append((numbers, which.reshape(between.shape[:2])))
        return self._known_numbers[0]

    def _of_numbers_s(self, positions: Positions, num_samples: int, numbers: Floats) -> Floats:
        """The same of stages with these ``numbers`` of units by kind."""
        scenario = self.smaller(positions)
        if positions not in self._known_curves:
            self._known_curves[positions] = seconds_by_size(scenario, self.global_batch_size)
        return _together_s(scenario, self._known_curves[positions], numbers, num_samples)

    def overlapped_s(self, positions: Positions, form: StepForm) -> Floats:
        """Seconds of transfers beside turns in all rounds at least, by first unit and stop.

        Of units that are gathered for every use, the last of a round stays for backward, and
        the first for the next round.  ``exposed_s`` has what no turn is beside.
        """
        gathers_s, reductions_s = self.gathers_and_reductions_s(positions, unevenness=0.0)
        gather_s, reduction_s = self._transfers_s(positions, 0.0)
        if form.reshard_after_backward:
            stay_s = gather_s[:, None] + np.roll(gather_s, 1)[None]
            beside_s = form.num_rounds * (2 * gathers_s - stay_s)
        else:
            beside_s = gathers_s - gather_s[:, None]
        number = form.num_rounds if form.reduce_each_round else 1
        return np.maximum(0.0, beside_s + number * reductions_s - reduction_s[:, None])

    def exposed_s(self, positions: Positions) -> Floats:
        """[1 + units] seconds of transfers that overlap nothing, at least, by first unit.

        They are its first gather and its last reduction: once a step, whatever its form.
        """
        gather_s, reduction_s = self._transfers_s(positions, 0.0)
        return gather_s + reduction_s

    def gathers_and_reductions_s(
        self, positions: Positions, *, unevenness: float
    ) -> tuple[Floats, Floats]:
        """Seconds in which some devices gather units once, and reduce them once.

        Both are by first unit and stop.  They are least with an ``unevenness`` of 0.
        """
        before_s = [
            np.append(0.0, np.cumsum(each_s[:-1]))
            for each_s in self._transfers_s(positions, unevenness)
        ]
        gathers_s, reductions_s = (each_s[None] - each_s[:, None] for each_s in before_s)
        return gathers_s, reductions_s

    def _transfers_s(self, positions: Positions, unevenness: float) -> tuple[Floats, Floats]:
        """[1 + units] seconds of the gather and of the reduction of each, and 0.0."""
        key = positions, unevenness
        if key not in self._known_transfers_s:
            prices = TurnPrices(self.smaller(positions))
            kinds = [self.scenario.workload.kind_of(unit) for unit in self.units]
            gathers_s, reductions_s = (
                np.array([*(price(prices, kind, unevenness) for kind in kinds), 0.0])
                for price in (gather_s, reduce_s)
            )
            self._known_transfers_s[key] = gathers_s, reductions_s
        return self._known_transfers_s[key]

    def link(self, one: Positions, other: Positions) -> tuple[Link, int]:
        """What carries messages from one stage to another, and how many of it."""
        if (one, other) not in self._known_links:
            self._known_links[one, other] = link_between(self.scenario.cluster, one, other)
        return self._known_links[one, other]


def even_cuts(weights: Sequence[float], sizes: Sequence[float]) -> tuple[int, ...]:
    """Cuts with which units of these sizes are dealt out in proportion to weights.

    Each gets one at least.
    """
    number, whole = len(sizes), sum(weights)
    reached = [0.0, *accumulate(sizes)]
    wanted = [reached[-1] * each / whole for each in accumulate(weights)][:-1]
    cuts = [min(range(number), key=lambda i: abs(reached[i] - each)) for each in wanted]
    for i in range(len(cuts)):
        cuts[i] = max(cuts[i], (cuts[i - 1] if i else 0) + 1)
    for i in reversed(range(len(cuts))):
        cuts[i] = min(cuts[i], number - len(cuts) + i)
    return tuple(cuts)
