"""Whose parameters and gradients a computing rank holds in every turn of a step."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardhet.records.schedule.ops import ops_of
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
    turns, ops = iter(schedule.turns), ops_of(schedule)
    unsharded, grads = np.zeros(num_units, dtype=bool), np.zeros(num_units, dtype=bool)
    rows = np.zeros(num_units, dtype=np.int64)
    held = []
    for op in ops[:-2]:  # the last reductions have not ended
        for i in op.after:
            if ops[i].kind is REDUCE:
                grads[ops[i].unit], rows[ops[i].unit] = False, 1
        if isinstance(op.kind, Phase):
            grads[op.unit] |= op.kind is Phase.BACKWARD
            held.append((unsharded.copy(), grads.copy(), rows.copy()))
            unsharded[op.unit] &= not next(turns).reshards
        elif op.kind is GATHER:
            unsharded[op.unit] = True
        elif op.kind is REDUCE:
            rows[op.unit] += 1
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
