"""Seconds of several systems that take turns in the same processes.

Launches of one program on a shared machine differ by more than systems do; in one process a
slow second meets all of them.  A turn is a few steps, of which the first is left out: the
caches hold another system's tensors then.  The order is there and back again, so that who
goes first in one round goes last in the next.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system in training; ``step`` is called by all ranks together."""

    name: str
    step: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """For how long."""

    num_rounds: int  # besides the first, which warms up
    num_steps: int  # of a turn, besides the first


def take_turns(contestants: Sequence[Contestant], rounds: Rounds) -> dict[str, list[float]]:
    """Seconds of every counted step on the rank where it took longest, by contestant."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    for turn in range(-1, rounds.num_rounds):
        for each in contestants if turn % 2 else contestants[::-1]:
            steps_s = _time_turn(each, rounds.num_steps + 1)
            if turn >= 0:
                seconds[each.name] += steps_s[1:]
    return seconds


def _time_turn(contestant: Contestant, num_steps: int) -> list[float]:
    durations = torch.empty(num_steps, dtype=torch.float64)
    for step in range(num_steps):
        dist.barrier()  # so that no step pays for a rank that comes late from the last one
        start_s = time.perf_counter()
        contestant.step()
        durations[step] = time.perf_counter() - start_s
    dist.all_reduce(durations, op=dist.ReduceOp.MAX)
    return durations.tolist()
