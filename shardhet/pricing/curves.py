"""Curves of a profile at many sizes of microbatches at once."""

import numpy as np
from numpy.typing import NDArray

from shardhet.records.profiles import Curve


def at_sizes(curve: Curve, largest: int) -> NDArray[np.float64]:
    """[1 + largest] ``curve.at`` of every size; 0 at size 0."""
    last = curve.positions[-1]
    first = range(1, 1 + min(largest, int(last)))
    beyond = curve.values[-1] + curve.slope_beyond * (
        np.arange(1 + len(first), 1 + largest) - last
    )
    return np.concatenate(([0.0], [curve.at(size) for size in first], np.maximum(0.0, beyond)))
