"""What a rank does for each kind of launch of the schedule.

A new kind of launch adds a ``Run`` here, or in a file of its own, and a line to ``RUNS``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardhet.fsdp.observer import Activity
from shardhet.fsdp.unit import FSDPUnit
from shardhet.records.schedule import GATHER, REDUCE, LaunchKind


@dataclass(frozen=True, slots=True)
class Run:
    """What a rank does for one kind of launch."""

    launch: Callable[[FSDPUnit], None]
    wait: Callable[[FSDPUnit], None]  # until its result may be used
    waiting: Activity  # what observers are told of the wait


RUNS: dict[LaunchKind, Run] = {
    GATHER: Run(FSDPUnit.unshard, FSDPUnit.wait_for_unshard, Activity.WAIT_GATHER),
    REDUCE: Run(FSDPUnit.reduce, FSDPUnit.finish_reduce, Activity.WAIT_REDUCE),
}
