"""The assignment with the least compute, for so few devices that no solver is needed.

Device by device, all sums of batch, compute w and room a are kept that may still be part of the
best assignment.  Of sums with the same batch, those that compute more and leave less room than
another are dropped, as are those that cannot reach the batch or the state with any candidates
of the devices that are left.  A multiplier mu on the room gives a bound for the others:

    compute >= w + min over the rest of sum (w_c - mu a_c) + mu (S - a)

Importing a solver takes longer than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardhet.planner.problem import Bools, Floats, Ints

MAX_DEVICES = 16
MAX_BATCH = 512
MAX_SUMS = 400_000  # of one device, before any are dropped
STEPS = 12  # of the multiplier
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Device:
    """What one device may do, candidate by candidate."""

    batch: Ints
    compute_s: Floats
    room: Floats


def least_compute(
    devices: Sequence[Device], global_batch_size: int, state_numel: float
) -> list[int] | None:
    """The candidate of each device, with the least compute in all; of equal ones, more room.

    None if there is no such assignment, or if it takes too long to find.
    """
    if len(devices) > MAX_DEVICES or global_batch_size > MAX_BATCH:
        return None
    wanted = state_numel * (1 - ROUNDING)
    most_room = _suffixes([-each.room for each in devices], devices, global_batch_size)
    if not -most_room[0][global_batch_size] >= wanted:
        return None
    start = _start(devices, global_batch_size, wanted)
    if start is None:
        return None
    multiplier, most_s = start
    weighed = [each.compute_s - multiplier * each.room for each in devices]
    least = _suffixes(weighed, devices, global_batch_size)
    sums = _Sums(np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1))
    steps: list[tuple[Ints, Ints]] = []
    for i, device in enumerate(devices):
        if len(sums.batch) * len(device.batch) > MAX_SUMS:
            return None
        larger, left = sums.with_one_more(device, global_batch_size)
        fits = larger.room - most_room[i + 1][left] >= wanted
        bound_s = larger.compute_s - multiplier * (larger.room - wanted) + least[i + 1][left]
        fits &= bound_s <= most_s * (1 + ROUNDING)
        kept = np.flatnonzero(fits & (left >= 0))
        kept = kept[larger.only(kept).undominated()]
        steps.append(np.divmod(kept, len(device.batch)))
        sums = larger.only(kept)
    if not len(sums.batch):
        return None
    at = int(np.lexsort((-sums.room, sums.compute_s))[0])
    found = []
    for before, candidate in reversed(steps):
        found.append(int(candidate[at]))
        at = int(before[at])
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Batch, compute and room of the first devices together, of several assignments."""

    batch: Ints
    compute_s: Floats
    room: Floats

    def with_one_more(self, device: Device, global_batch_size: int) -> tuple["_Sums", Ints]:
        """All sums with each candidate of one more device, and the batch that is left."""
        batch = np.add.outer(self.batch, device.batch).ravel()
        larger = _Sums(
            batch,
            np.add.outer(self.compute_s, device.compute_s).ravel(),
            np.add.outer(self.room, device.room).ravel(),
        )
        # Index -1, of too large a batch, is dropped later.
        return larger, np.maximum(global_batch_size - batch, -1)

    def only(self, kept: Ints) -> "_Sums":
        """These sums."""
        return _Sums(self.batch[kept], self.compute_s[kept], self.room[kept])

    def undominated(self) -> Ints:
        """Those with more room than all of the same batch that compute no more."""
        order = np.lexsort((-self.room, self.compute_s, self.batch))
        batch, room = self.batch[order], self.room[order]
        span = 1 + 2 * float(np.abs(room).max(initial=0.0))
        most = np.maximum.accumulate(room + span * batch)
        is_better: Bools = np.ones(len(order), dtype=bool)
        is_better[1:] = (room + span * batch)[1:] > most[:-1]
        return order[is_better]


def _suffixes(
    values: Sequence[Floats], devices: Sequence[Device], global_batch_size: int
) -> list[Floats]:
    """[i][j] the least sum of values with which the devices from i on compute j samples."""
    least = np.full(global_batch_size + 1, np.inf)
    least[0] = 0.0
    found = [least]
    for value, device in zip(reversed(values), reversed(devices), strict=True):
        with_more = np.full(global_batch_size + 1, np.inf)
        for each, batch in zip(value.tolist(), device.batch.tolist(), strict=True):
            if batch <= global_batch_size:
                shifted = found[-1][: global_batch_size + 1 - batch] + each
                np.minimum(with_more[batch:], shifted, out=with_more[batch:])
        found.append(with_more)
    return found[::-1]


def _start(
    devices: Sequence[Device], global_batch_size: int, wanted: float
) -> tuple[float, float] | None:
    """A multiplier on the room, and the compute of an assignment that has enough of it."""
    low = 0.0
    spent_s, room = _best_for(devices, global_batch_size, low)
    if room >= wanted:
        return low, spent_s
    scale = max(float(each.compute_s.max()) for each in devices)
    high = scale / max(1.0, max(float(each.room.max()) for each in devices))
    for _ in range(STEPS):
        spent_s, room = _best_for(devices, global_batch_size, high)
        if room >= wanted:
            break
        low, high = high, 8 * high
    else:
        return None
    most_s = spent_s
    for _ in range(STEPS):
        middle = (low + high) / 2
        spent_s, room = _best_for(devices, global_batch_size, middle)
        if room >= wanted:
            high, most_s = middle, min(most_s, spent_s)
        else:
            low = middle
    return high, most_s


def _best_for(
    devices: Sequence[Device], global_batch_size: int, multiplier: float
) -> tuple[float, float]:
    """Compute and room of the assignment with the least compute less weighed room."""
    values = [each.compute_s - multiplier * each.room for each in devices]
    least = _suffixes(values, devices, global_batch_size)
    spent_s, room, left = 0.0, 0.0, global_batch_size
    for i, (value, device) in enumerate(zip(values, devices, strict=True)):
        fits = device.batch <= left
        totals = np.where(fits, value + least[i + 1][left - device.batch * fits], np.inf)
        at = int(totals.argmin())
        spent_s += float(device.compute_s[at])
        room += float(device.room[at])
        left -= int(device.batch[at])
    return spent_s, room
