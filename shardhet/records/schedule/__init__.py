"""The order of a step: turns, what is launched around each, and the passes that mark it."""

from shardhet.records.schedule.passes import (
    Pass,
    Shape,
    make_schedule,
    mark_gathers,
    mark_reductions,
    rest_of_step,
    straight_schedule,
)
from shardhet.records.schedule.pipeline import (
    Message,
    RoundPhase,
    intervals,
    messages_between,
    one_forward_one_backward,
)
from shardhet.records.schedule.turns import (
    AHEAD,
    GATHER,
    REDUCE,
    Launch,
    LaunchKind,
    Phase,
    Schedule,
    Segment,
    StepForm,
    Turn,
)

__all__ = [
    "AHEAD",
    "GATHER",
    "REDUCE",
    "Launch",
    "LaunchKind",
    "Message",
    "Pass",
    "Phase",
    "RoundPhase",
    "Schedule",
    "Segment",
    "Shape",
    "StepForm",
    "Turn",
    "intervals",
    "make_schedule",
    "mark_gathers",
    "mark_reductions",
    "messages_between",
    "one_forward_one_backward",
    "rest_of_step",
    "straight_schedule",
]
