"""Small random assignment problems, and an exhaustive search that shares no code with ours."""

import numpy as np

from shardhet.planner.problem.problem import Group, Problem
from shardhet.planner.search.search import Effort

SEARCHED = Effort(most_choices=0)  # however few choices there are
Row = tuple[float, ...]  # batch, one cost per phase, lines of the optimizer, room
Lines = tuple[float, ...]  # s, d, s, d, ...: x elements take the most of s x + d


def random_problem(
    rng: np.random.Generator,
    *,
    num_groups: int,
    num_devices: int,
    global_batch_size: int,
    memory_binds: bool,
    num_phases: int = 2,
    num_parts: int = 1,
    counts_optimizer: bool = True,
    optimizers_differ: bool = False,
) -> Problem:
    """Devices of different speed, memory and latency, with uneven curves.

    If ``optimizers_differ``, each may do the same with more room and another optimizer.

    Phases are forward and the backward of each of ``num_parts`` parts of the model, of which
    a device recomputes none or the first few; or, with one phase, all of it at once.
    """
    counts = np.ones(num_groups, dtype=int)
    for _ in range(num_devices - num_groups):
        counts[rng.integers(num_groups)] += 1
    groups, capacity = [], 0.0
    for count in counts:
        rows, memory = _random_rows(rng, global_batch_size, num_parts)
        table = np.array(rows)
        costs = table[:, 1:-1].T
        if num_phases == 1:
            costs = costs.sum(axis=0)[None]
        optimizer = rng.uniform(0.001, 0.02) if counts_optimizer else 0.0
        group = Group(
            int(count), table[:, 0].astype(np.int64), costs.copy(), table[:, -1], optimizer
        )
        if optimizers_differ:
            group = _with_another_optimizer(rng, group)
        groups.append(group.sorted()[0])
        capacity += count * memory
    part = rng.uniform(0.5, 0.97) if memory_binds else rng.uniform(0.01, 0.2)
    return Problem(tuple(groups), global_batch_size, capacity * part)


def _with_another_optimizer(rng: np.random.Generator, group: Group) -> Group:
    number, whole = len(group.batch), np.tile(group.batch, 2)
    costs, room = np.tile(group.costs, 2), np.tile(group.room, 2)
    room[number:] = np.minimum(room[number:] * rng.uniform(0.5, 4), rng.uniform(5, 80))
    own = np.zeros((2, 4, 2 * number))
    own[:] = group.optimizer
    # Copies of two sorts that compute hides in part, as those of rows to a device and back.
    per_numel = rng.uniform(0.001, 0.05) * np.array([1, *rng.uniform(1, 4, 3)])
    off_s = rng.uniform(0, 1, (4, number)) * (rng.random(4) < 0.8)[:, None]
    off_s[0] = 0.0
    own[:, :, number:] = np.stack((np.ones_like(off_s), off_s)) / per_numel[:, None]
    return Group(
        group.count, whole, costs, room, group.optimizer_s_per_numel, own_optimizer=own
    )


def optimizers_of(group: Group) -> list[Lines]:
    """The lines of every candidate."""
    shape = (2, group.optimizer.shape[1], len(group.batch))
    found = []
    for rates, ahead in np.moveaxis(np.broadcast_to(group.optimizer, shape), 2, 0):
        pairs = [(1 / rate, -numel / rate) for rate, numel in zip(rates, ahead, strict=True)]
        found.append(tuple(float(each) for pair in pairs for each in pair))
    return found


def _random_rows(
    rng: np.random.Generator, batch_size: int, num_parts: int
) -> tuple[list[Row], float]:
    speed, memory, per_sample = (
        np.exp(rng.normal(0, 0.7)),
        rng.uniform(5, 40),
        rng.uniform(0.1, 2),
    )
    largest = int(rng.integers(1, 7))
    noise = 1 + 0.1 * rng.normal(size=largest + 1)
    forward = speed * (np.arange(largest + 1) + rng.uniform(0, 1)) * noise.clip(0.5)
    forward[0] = 0.0
    noise = 1 + 0.05 * rng.normal(size=largest + 1)
    backward = forward * rng.uniform(1.6, 2.4) * noise.clip(0.5)
    rows: list[Row] = [(0, *[0.0] * (1 + num_parts), memory)]
    for batch in range(1, batch_size + 1):
        for size in range(1, min(batch, largest) + 1):
            whole, rest = divmod(batch, size)
            f = whole * forward[size] + forward[rest]
            b = whole * backward[size] + backward[rest]
            for number in range(num_parts + 1):  # of parts that are recomputed
                kept = batch * (1 - number / num_parts) + (size if number else 0)
                used = per_sample * (0.1 * batch + kept)
                parts = [(b + (i < number) * f) / num_parts for i in range(num_parts)]
                if used <= memory:
                    rows.append((batch, f, *parts, memory - used))
    return rows, memory


def devices_of(problem: Problem) -> list[tuple[int, list[Row]]]:
    """(group, its candidates without dominated ones) of every device."""
    devices = []
    for g, group in enumerate(problem.groups):
        rows = sorted(
            {
                (int(b), *map(float, costs), *lines, float(room))
                for b, costs, lines, room in zip(
                    group.batch, group.costs.T, optimizers_of(group), group.room, strict=True
                )
            }
        )
        kept = [row for row in rows if not any(_beats(other, row) for other in rows)]
        devices += [(g, kept)] * group.count
    return devices


def _beats(one: Row, other: Row) -> bool:
    return (
        one != other
        and one[0] == other[0]
        and all(a <= b for a, b in zip(one[1:-1], other[1:-1], strict=True))
        and one[-1] >= other[-1]
    )


def optimizer_seconds(rooms: list[float], lines: list[Lines], state: float) -> float | None:
    """The least possible time of the slowest optimizer; None where the state does not fit.

    What all store in u seconds is concave in u, so Newton's steps from 0 do not go too far.
    """
    seconds = 0.0
    while True:
        stored = rate = 0.0
        for room, own in zip(rooms, lines, strict=True):
            pairs = zip(own[::2], own[1::2], strict=True)
            reached = [((seconds - d) / s, 1 / s) for s, d in pairs if s > 0]
            numel, more = min([*reached, (room, 0.0)])
            stored, rate = stored + numel, rate + more
        if stored >= state * (1 - 1e-12):
            return seconds
        if not rate:
            return None
        seconds += (state - stored) / rate


class BruteForce:
    """Every combination of candidates that could cost no more than ``start``."""

    def __init__(self, problem: Problem, start: float) -> None:
        self.best = start
        self.was_reached = False
        self._state = problem.state_numel
        self._devices = devices_of(problem)
        size = len(self._devices)
        rows = [rows for _, rows in self._devices]
        self._batch_after = [
            sum(max(r[0] for r in rows[j]) for j in range(i, size)) for i in range(size + 1)
        ]
        self._room_after = [
            sum(max(r[-1] for r in rows[j]) for j in range(i, size)) for i in range(size + 1)
        ]
        phases = (0.0,) * problem.num_phases
        self._first_line = 1 + problem.num_phases  # of a row
        self._go(0, problem.global_batch_size, phases, 0, [], [])

    def _go(
        self,
        i: int,
        left: float,
        phases: tuple[float, ...],
        first: int,
        rooms: list[float],
        lines: list[Lines],
    ) -> None:
        if left > self._batch_after[i] or sum(rooms) + self._room_after[i] < self._state:
            return
        if i == len(self._devices):
            seconds = optimizer_seconds(rooms, lines, self._state)
            if left == 0 and seconds is not None and sum(phases) + seconds <= self.best:
                self.best = sum(phases) + seconds
                self.was_reached = True
            return
        group, rows = self._devices[i]
        is_alike = i > 0 and self._devices[i - 1][0] == group
        for k in range(first if is_alike else 0, len(rows)):
            row = rows[k]
            if row[0] > left:
                break
            costs, own = row[1 : self._first_line], row[self._first_line : -1]
            slowest = tuple(max(a, b) for a, b in zip(phases, costs, strict=True))
            if sum(slowest) <= self.best:
                of_next = [*rooms, row[-1]], [*lines, own]
                self._go(i + 1, left - row[0], slowest, k, *of_next)


def recomputed_objective(problem: Problem, choices: list[tuple[int, int, int]]) -> float | None:
    """The objective of (group, candidate, count), from the integers alone."""
    batch, rooms, lines, costs = 0, [], [], []
    for g, c, count in choices:
        group = problem.groups[g]
        batch += count * int(group.batch[c])
        rooms += [float(group.room[c])] * count
        lines += [optimizers_of(group)[c]] * count
        costs.append([float(cost) for cost in group.costs[:, c]])
    seconds = optimizer_seconds(rooms, lines, problem.state_numel)
    if batch != problem.global_batch_size or seconds is None:
        return None
    return sum(max(column) for column in zip(*costs, strict=True)) + seconds
