"""The order of a step: turns, what is launched around each, and the passes that mark it."""

from shardhet.records.schedule.ops import Op, OpKind, ops_of
from shardhet.records.schedule.passes import (
    make_schedule,
    rest_of_step,
    straight_schedule,
)
from shardhet.records.schedule.pipeline import (
    Handover,
    RoundPhase,
    intervals,
    messages_between,
    one_forward_one_backward,
    phases_of,
)
from shardhet.records.schedule.turns import (
    GATHER,
    REDUCE,
    LaunchKind,
    Phase,
    Schedule,
    Segment,
    StepForm,
)

__all__ = [
    "GATHER",
    "REDUCE",
    "Handover",
    "LaunchKind",
    "Op",
    "OpKind",
    "Phase",
    "RoundPhase",
    "Schedule",
    "Segment",
    "StepForm",
    "intervals",
    "make_schedule",
    "messages_between",
    "one_forward_one_backward",
    "ops_of",
    "phases_of",
    "rest_of_step",
    "straight_schedule",
]
