"""What no plan can beat, with stages or without: the compute of all devices together.

A device takes at least its least seconds per sample for each unit that it computes, so with
x_ku the samples of units of kind u that all n_k devices of kind k compute,

    minimise T   such that   sum_u t_ku x_ku <= n_k T,   sum_k x_ku >= B n_u

Memory, links and the optimizer are left out.  ``Speeds`` bounds pipelines of given stages.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.stages.groups import Positions, Stages
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.setting import Setting
from shardhet.records.workload import Unit
from shardhet.simulator.pipeline import hop_s, link_between

BISECTIONS = 40


def seconds_per_sample(setting: Setting, largest: int) -> dict[str | None, dict[str, float]]:
    """The least seconds per sample of forward and backward, by kind of device and of unit."""
    sizes = np.arange(1, 1 + min(largest, MAX_MICROBATCH_SIZE))
    found: dict[str | None, dict[str, float]] = {}
    for kind in dict.fromkeys(device.kind for device in setting.cluster.devices):
        found[kind] = {}
        for name in {unit.kind for unit in setting.workload.units if unit.fqn}:
            unit = setting.profile.unit(kind, name)
            both = at_sizes(unit.forward_s, len(sizes)) + at_sizes(unit.backward_s, len(sizes))
            found[kind][name] = float((both[1:] / sizes).min())
    return found


@dataclass(frozen=True)
class Speeds:
    """How fast groups of devices compute units at best, and cuts that follow from it."""

    setting: Setting
    smaller: Callable[[Positions], Setting]  # the setting of some devices
    units: Sequence[Unit]  # that compute
    global_batch_size: int
    _known_s: dict[Positions, list[float]] = field(default_factory=dict)

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

    def sample_s(self, positions: Positions, first: int, stop: int) -> float:
        """Seconds per sample that some devices compute these units at best."""
        return sum(self._unit_s(positions)[first:stop])

    def balanced_cuts(self, stages: Stages) -> tuple[int, ...]:
        """Cuts with which stages compute about equally long."""
        return self._balanced(stages)[1]

    def hop_s(self, one: Positions, other: Positions, num_samples: int) -> float:
        """Seconds of so many samples from one stage to another, at the thinnest cut."""
        kinds = {unit.kind for unit in self.units[1:]}
        least = min(self.setting.workload.kind_by_name[kind].input_bytes for kind in kinds)
        return hop_s(link_between(self.setting.cluster, one, other), num_samples * least)

    def _balanced(self, stages: Stages) -> tuple[float, tuple[int, ...]]:
        """Seconds per sample that no cuts go below, and cuts that take hardly longer."""
        seconds = [self._unit_s(each) for each in stages]
        low, high = 0.0, sum(map(sum, seconds))
        cuts = even_cuts([1.0] * len(stages), len(self.units))
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


def even_cuts(weights: Sequence[float], number: int) -> tuple[int, ...]:
    """Cuts with which so many units are dealt out in proportion to weights, one at least."""
    total = sum(weights)
    cuts = [round(number * each / total) for each in accumulate(weights)][:-1]
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
