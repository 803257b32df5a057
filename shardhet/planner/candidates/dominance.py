"""Which candidates another one of the same batch beats in every respect."""

import numpy as np

from shardhet.planner.problem.problem import Bools, Floats


def dominated(costs: Floats, room: Floats) -> Bools:
    """Which candidates [b, n] are beaten in every respect by another of the same batch.

    Each is compared only with the fastest of those with more room, so some dominated
    candidates remain.
    """
    order = np.argsort(-room, axis=1, kind="stable")
    costs = np.take_along_axis(costs, order[None], axis=2)
    total = costs.sum(axis=0)
    fastest = np.minimum.accumulate(total, axis=1)
    columns = np.arange(total.shape[1])
    pivot = np.maximum.accumulate(np.where(total == fastest, columns, 0), axis=1)
    # The fastest column before each one.
    previous = np.concatenate((np.zeros_like(pivot[:, :1]), pivot[:, :-1]), axis=1)
    beaten: Bools = np.all(np.take_along_axis(costs, previous[None], axis=2) <= costs, axis=0)
    beaten[:, 0] = False
    result = np.zeros_like(beaten)
    np.put_along_axis(result, order, beaten, axis=1)
    return result
