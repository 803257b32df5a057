"""Seconds of the transfers that a step launches, by kind.

A new kind of launch adds a function here, or in a file of its own, and a line to ``PRICES``.
"""

from collections.abc import Callable
from dataclasses import replace

from shardhet.pricing.priced import Priced
from shardhet.records.plan import EVERY_UNIT
from shardhet.records.profiles import Curve
from shardhet.records.schedule import GATHER, REDUCE, LaunchKind
from shardhet.records.workload import UnitKind

# Seconds for one unit, with the unevenness of ``TurnPrices.unevenness``.
LaunchPrice = Callable[[Priced, UnitKind, float], float]


def gather_s(priced: Priced, unit: UnitKind, unevenness: float) -> float:
    """Seconds of gathering the parameters."""
    collectives = priced.collectives_of(unit)
    weight = collectives.gather_unevenness_weight
    nbytes = priced.workload.gathered_bytes(unit) * (1 - weight + weight * unevenness)
    if not nbytes and unit.numel:
        return 0.0  # all of it is resident
    return _collective_s(priced, collectives.gather_s, nbytes)


def reduce_s(priced: Priced, unit: UnitKind, unevenness: float) -> float:
    """Seconds of reducing the gradients, which frozen parameters do not have."""
    if not unit.trained_numel:
        return 0.0  # nothing is launched
    collectives = priced.collectives_of(unit)
    weight = collectives.reduce_unevenness_weight
    whole_bytes = unit.trained_numel * priced.workload.reduce_itemsize
    nbytes = whole_bytes * (1 - weight + weight * unevenness)
    return _collective_s(priced, collectives.reduce_s, nbytes)


def fastest_levels(priced: Priced) -> tuple[str, ...]:
    """Patterns of the units whose collectives are faster in two levels, if shares are even."""
    if priced.profile.two_levels is None:
        return ()
    in_two = replace(priced, two_level_units=EVERY_UNIT)

    def seconds(prices: Priced, kind: UnitKind) -> float:
        return 2 * gather_s(prices, kind, 1.0) + reduce_s(prices, kind, 1.0)

    workload = priced.workload
    kinds = {unit.kind: priced.sent_kind(unit) for unit in workload.units}
    faster = {
        name for name, kind in kinds.items() if seconds(in_two, kind) < seconds(priced, kind)
    }
    units = tuple(unit.fqn for unit in workload.units if unit.kind in faster)
    return EVERY_UNIT if len(units) == len(workload.units) else units


def _collective_s(priced: Priced, curve: Curve | None, nbytes: float) -> float:
    if curve is None or priced.cluster.world_size == 1:
        return 0.0
    return curve.at(nbytes)


PRICES: dict[LaunchKind, LaunchPrice] = {GATHER: gather_s, REDUCE: reduce_s}
