"""What no plan can beat, with stages or without: the compute of all devices together.

A device takes at least its least seconds per sample for each unit that it computes, so with
x_ku the samples of units of kind u that all n_k devices of kind k compute,

    minimise T   such that   sum_u t_ku x_ku <= n_k T,   sum_k x_ku >= B n_u

Memory, links and the optimizer are left out.  ``Speeds`` bounds pipelines of given stages: of
n samples a device computes in microbatches of at most n, each no faster per sample than the
fastest of these, so that rounds of few samples are slow.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.stages.groups import Positions, Stages
from shardhet.pricing.launches import gather_s, reduce_s
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.setting import Setting
from shardhet.pricing.turns import TurnPrices
from shardhet.records.cluster import Link
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import hop_s, link_between

BISECTIONS = 40
Floats = NDArray[np.float64]


def seconds_by_size(setting: Setting, largest: int) -> dict[str | None, dict[str, Floats]]:
    """[1 + sizes] of forward and backward, by kind of device and of unit."""
    size = min(largest, MAX_MICROBATCH_SIZE)
    found: dict[str | None, dict[str, Floats]] = {}
    for kind in dict.fromkeys(device.kind for device in setting.cluster.devices):
        found[kind] = {}
        for name in {unit.kind for unit in setting.workload.units if unit.fqn}:
            unit = setting.profile.unit(kind, name)
            both = at_sizes(unit.forward_s, size) + at_sizes(unit.backward_s, size)
            found[kind][name] = both
    return found


def seconds_per_sample(setting: Setting, largest: int) -> dict[str | None, dict[str, float]]:
    """The least seconds per sample of forward and backward, by kind of device and of unit."""
    return {
        kind: {name: float((s[1:] / np.arange(1, len(s))).min()) for name, s in by_name.items()}
        for kind, by_name in seconds_by_size(setting, largest).items()
    }


@dataclass(frozen=True)
class Speeds:
    """How fast groups of devices compute units at best, and cuts that follow from it."""

    setting: Setting
    smaller: Callable[[Positions], Setting]  # the setting of some devices
    units: Sequence[Unit]  # that compute
    global_batch_size: int
    _known_s: dict[Positions, list[float]] = field(default_factory=dict)
    # Devices of each kind, with seconds by size of each kind of unit.
    _known_curves: dict[Positions, list[tuple[int, dict[str, Floats]]]] = field(
        default_factory=dict
    )
    # Of each unit, a gather and a reduction.
    _known_transfers_s: dict[Positions, list[list[float]]] = field(default_factory=dict)
    _known_balanced: dict[Stages, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    _known_links: dict[tuple[Positions, Positions], tuple[Link, int]] = field(
        default_factory=dict
    )
    # How many units of each kind are between two.
    _known_kinds: dict[tuple[int, int], tuple[tuple[str, int], ...]] = field(
        default_factory=dict
    )
    _known_rounds_s: dict[tuple[object, ...], float] = field(default_factory=dict)

    def least_of_any_s(self) -> float:
        """Seconds that every step takes at least, with stages or without.

        Each device is as fast as alone: of many, the slowest sets the pace, which derived times
        count.
        """
        from scipy.optimize import linprog  # imported here: half a second

        positions = {device.kind: i for i, device in enumerate(self.setting.cluster.devices)}
        least: dict[str | None, dict[str, float]] = {}
        for i in positions.values():
            least |= seconds_per_sample(self.smaller((i,)), self.global_batch_size)
        numbers = Counter(device.kind for device in self.setting.cluster.devices)
        units = Counter(unit.kind for unit in self.units)
        times = np.array([[of_kind[unit] for unit in units] for of_kind in least.values()])
        num_kinds, num_units = times.shape
        on_devices = np.kron(np.eye(num_kinds), np.ones(num_units)) * times.ravel()
        of_units = np.tile(np.eye(num_units), num_kinds)
        found = linprog(
            [0.0] * times.size + [1.0],
            A_ub=np.block(
                [
                    [on_devices, -np.array([[numbers[kind]] for kind in least])],
                    [-of_units, np.zeros((num_units, 1))],
                ]
            ),
            b_ub=[0.0] * num_kinds + [-self.global_batch_size * n for n in units.values()],
            method="highs",
        )
        return float(found.fun)

    def least_step_s(self, stages: Stages) -> float:
        """Seconds of a step in which only compute and messages take time, cut at best."""
        # One sample more takes no latency more.
        link_s = max(self.hop_s(*each, 2) - self.hop_s(*each, 1) for each in pairwise(stages))
        compute_s, _ = self._balanced(stages)
        return self.global_batch_size * max(compute_s, link_s)

    def round_s(self, positions: Positions, first: int, stop: int, num_samples: int) -> float:
        """Seconds that some devices compute so many samples of these units, or more.

        They are the least in which all devices together reach the number.
        """
        if (first, stop) not in self._known_kinds:
            units = Counter(unit.kind for unit in self.units[first:stop])
            self._known_kinds[first, stop] = tuple(sorted(units.items()))
        key = positions, self._known_kinds[first, stop], num_samples
        if key not in self._known_rounds_s:
            self._known_rounds_s[key] = self._round_s(*key)
        return self._known_rounds_s[key]

    def _round_s(
        self, positions: Positions, units: tuple[tuple[str, int], ...], num_samples: int
    ) -> float:
        if positions not in self._known_curves:
            setting = self.smaller(positions)
            numbers = Counter(device.kind for device in setting.cluster.devices)
            curves = seconds_by_size(setting, self.global_batch_size)
            self._known_curves[positions] = [(numbers[k], curves[k]) for k in curves]
        samples = np.arange(1, 1 + num_samples)
        seconds, weights = [], []
        for number, curve_by_kind in self._known_curves[positions]:
            microbatch_s = sum(n * curve_by_kind[kind] for kind, n in units)
            assert not isinstance(microbatch_s, int)
            per_sample_s = microbatch_s[1:] / np.arange(1, len(microbatch_s))
            least_s = np.minimum.accumulate(per_sample_s)
            whole_s = samples * least_s[np.minimum(samples, len(least_s)) - 1]
            seconds.append(np.minimum.accumulate(whole_s[::-1])[::-1])
            weights.append(np.full(num_samples, number))
        by_time = np.concatenate(seconds)
        order = np.argsort(by_time, kind="stable")
        reached = np.cumsum(np.concatenate(weights)[order])
        return float(by_time[order[np.searchsorted(reached, num_samples)]])

    def transfers_s(self, positions: Positions, first: int, stop: int, form: StepForm) -> float:
        """Seconds in which some devices gather and reduce these units in all rounds of a step.

        Of units that are gathered for every use, the last of a round stays for backward, and
        the first for the next round.
        """
        gathers_s, reductions_s = (each[first:stop] for each in self._of_transfers_s(positions))
        whole_s = sum(gathers_s)
        if form.reshard_after_backward:
            whole_s = form.num_rounds * (2 * whole_s - gathers_s[0] - gathers_s[-1])
        return whole_s + sum(reductions_s) * (form.num_rounds if form.reduce_each_round else 1)

    def gathers_and_reductions_s(
        self, positions: Positions, first: int, stop: int
    ) -> tuple[float, float]:
        """Seconds in which some devices gather these units once, and reduce them once."""
        gathers_s, reductions_s = self._of_transfers_s(positions)
        return sum(gathers_s[first:stop]), sum(reductions_s[first:stop])

    def _of_transfers_s(self, positions: Positions) -> list[list[float]]:
        if positions not in self._known_transfers_s:
            prices, kind_of = (
                TurnPrices(self.smaller(positions)),
                self.setting.workload.kind_by_name,
            )
            kinds = {unit.kind for unit in self.units}
            by_kind = [
                {kind: price(prices, kind_of[kind], 1.0) for kind in kinds}
                for price in (gather_s, reduce_s)
            ]
            self._known_transfers_s[positions] = [
                [each[unit.kind] for unit in self.units] for each in by_kind
            ]
        return self._known_transfers_s[positions]

    def balanced_cuts(self, stages: Stages) -> tuple[int, ...]:
        """Cuts with which stages compute about equally long."""
        return self._balanced(stages)[1]

    def hop_s(self, one: Positions, other: Positions, num_samples: int) -> float:
        """Seconds of so many samples from one stage to another, at the thinnest cut."""
        kinds = {unit.kind for unit in self.units[1:]}
        least = min(self.setting.workload.kind_by_name[kind].input_bytes for kind in kinds)
        if (one, other) not in self._known_links:
            self._known_links[one, other] = link_between(self.setting.cluster, one, other)
        return hop_s(self._known_links[one, other], num_samples * least)

    def _balanced(self, stages: Stages) -> tuple[float, tuple[int, ...]]:
        """Seconds per sample that no cuts go below, and cuts that take hardly longer."""
        if stages not in self._known_balanced:
            self._known_balanced[stages] = self._balance(stages)
        return self._known_balanced[stages]

    def _balance(self, stages: Stages) -> tuple[float, tuple[int, ...]]:
        seconds = [self._unit_s(each) for each in stages]
        low, high = 0.0, sum(map(sum, seconds))
        cuts = even_cuts([1.0] * len(stages), [1.0] * len(self.units))
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            found = cuts_within(seconds, middle)
            if found is None:
                low = middle
            else:
                high, cuts = middle, found
        return low, cuts

    def _unit_s(self, positions: Positions) -> list[float]:
        """Seconds per sample of each unit, on all devices of a stage together."""
        if positions not in self._known_s:
            setting = self.smaller(positions)
            least = seconds_per_sample(setting, self.global_batch_size)
            devices = setting.cluster.devices

            def together_s(kind: str) -> float:
                each = [least[device.kind][kind] for device in devices]
                return 1 / sum(1 / s for s in each) if all(each) else 0.0

            by_kind = {kind: together_s(kind) for kind in {unit.kind for unit in self.units}}
            self._known_s[positions] = [by_kind[unit.kind] for unit in self.units]
        return self._known_s[positions]


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


def cuts_within(seconds: Sequence[Sequence[float]], most_s: float) -> tuple[int, ...] | None:
    """Cuts with which no stage takes longer; None if there are none.

    ``seconds`` has those of every unit, for each stage.  Every stage takes as many units as it
    can, and leaves one at least to each after it.
    """
    number, start = len(seconds[0]), 0
    cuts = []
    for i, of_units in enumerate(seconds):
        stop, used = start, 0.0
        most = number - (len(seconds) - 1 - i)
        while stop < most and used + of_units[stop] <= most_s:
            used += of_units[stop]
            stop += 1
        if stop == start:
            return None
        start = stop
        cuts.append(stop)
    return tuple(cuts[:-1]) if start == number else None
