"""What a rank does for each kind of launch of the schedule.

A new kind of launch adds a ``Handling`` here, or in a file of its own, and a line to ``RUNS``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.step.around import Activity
from shardhet.records.schedule import GATHER, REDUCE, LaunchKind


@dataclass(frozen=True, slots=True)
class Handling:
    """What a rank does for one kind of launch."""

    launch: Callable[[FSDPUnit], None]
    wait: Callable[[FSDPUnit], None]  # until its result may be used
    waiting: Activity  # what observers are told of the wait


RUNS: dict[LaunchKind, Handling] = {
    GATHER: Handling(FSDPUnit.unshard, FSDPUnit.wait_for_unshard, Activity.WAIT_GATHER),
    REDUCE: Handling(FSDPUnit.reduce, FSDPUnit.finish_reduce, Activity.WAIT_REDUCE),
}
