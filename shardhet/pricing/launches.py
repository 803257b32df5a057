"""Seconds of the transfers that a step launches, by kind.

A new kind of launch adds a function here, or in a file of its own, and a line to ``PRICES``.
"""

from collections.abc import Callable

from shardhet.pricing.priced import Priced
from shardhet.records.profiles import Curve
from shardhet.records.schedule import GATHER, REDUCE, LaunchKind

# Seconds for ``numel`` elements of a unit, with the unevenness of ``TurnPrices.unevenness``.
LaunchPrice = Callable[[Priced, int, float], float]


def gather_s(priced: Priced, numel: int, unevenness: float) -> float:
    """Seconds of gathering the parameters."""
    collectives = priced.profile.collectives
    weight = collectives.gather_unevenness_weight
    nbytes = numel * priced.workload.param_itemsize * (1 - weight + weight * unevenness)
    return _collective_s(priced, collectives.gather_s, nbytes)


def reduce_s(priced: Priced, numel: int, unevenness: float) -> float:
    """Seconds of reducing the gradients."""
    collectives = priced.profile.collectives
    weight = collectives.reduce_unevenness_weight
    nbytes = numel * priced.workload.reduce_itemsize * (1 - weight + weight * unevenness)
    return _collective_s(priced, collectives.reduce_s, nbytes)


def _collective_s(priced: Priced, curve: Curve | None, nbytes: float) -> float:
    if curve is None or priced.cluster.world_size == 1:
        return 0.0
    return curve.at(nbytes)


PRICES: dict[LaunchKind, LaunchPrice] = {GATHER: gather_s, REDUCE: reduce_s}
