"""Whose parameters and gradients a computing rank holds in every turn of a step."""

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardhet.records.schedule.passes import straight_schedule
from shardhet.records.schedule.turns import GATHER, REDUCE, Phase, StepForm

MAX_ROUNDS = 3  # those between the first and the last are alike
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUnits:
    """By turn: whose tensors are alive, in steps of at most ``MAX_ROUNDS`` rounds."""

    unit: Ints  # [turns]
    round: Ints  # [turns]
    is_backward: Bools  # [turns]
    unsharded: Bools  # [turns, units]
    grads: Bools  # [turns, units] whole gradients
    num_rows: Ints  # [turns, units] parts of sums: rows of the gradient, and of one to come
    last_grads: Bools  # [units] while the last reductions are on their way


@lru_cache(maxsize=64)
def held_units(num_units: int, form: StepForm) -> HeldUnits:
    """Walk the schedule of a step of such a form."""
    form = replace(form, num_rounds=min(form.num_rounds, MAX_ROUNDS))
    schedule = straight_schedule(num_units, form)
    unsharded, grads = np.zeros(num_units, dtype=bool), np.zeros(num_units, dtype=bool)
    rows = np.zeros(num_units, dtype=np.int64)
    in_flight: deque[int] = deque()
    held = []

    def finish(unit: int) -> None:
        grads[unit], rows[unit] = False, 1

    for i, turn in enumerate(schedule.turns):
        for launch in schedule.launched_by(i):
            unsharded[launch.unit] |= launch.kind is GATHER
        if turn.phase is Phase.BACKWARD:
            while turn.unit in in_flight:
                finish(in_flight.popleft())
            grads[turn.unit] = True
        held.append((unsharded.copy(), grads.copy(), rows.copy()))
        unsharded[turn.unit] &= not turn.reshards
        if REDUCE in turn.after:
            while len(in_flight) >= (REDUCE.max_in_flight or num_units):
                finish(in_flight.popleft())
            in_flight.append(turn.unit)
            rows[turn.unit] += 1
    each = [np.array(values) for values in zip(*held, strict=True)]
    return HeldUnits(
        unit=np.array([turn.unit for turn in schedule.turns]),
        round=np.array([turn.round for turn in schedule.turns]),
        is_backward=np.array([turn.phase is Phase.BACKWARD for turn in schedule.turns]),
        unsharded=each[0],
        grads=each[1],
        num_rows=each[2],
        last_grads=grads,
    )
