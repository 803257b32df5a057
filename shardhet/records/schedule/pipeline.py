"""The order in which the stages of a pipeline take the rounds of a step.

One forward, one backward (Narayanan et al., "Efficient large-scale language model training on
GPU clusters", 2021): a stage begins rounds until so many are in flight as it may have; from
then on it finishes the oldest before it begins another.  With two rounds in flight on the
first stage and one on the second:

    stage 0   F0 F1    B0 F2    B1 F3    B2    B3
    stage 1      F0 B0    F1 B1    F2 B2    F3 B3

The orders of all stages complete if and only if the number in flight does not grow from one
stage to the next.  Samples of a round are handed over by intervals: a device of one stage sends
a device of the next the samples that both have.  Gradients go the same way back.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shardhet.records.layout import Span
from shardhet.records.schedule.turns import Phase


class RoundPhase(NamedTuple):
    """The forward or the backward of one round."""

    round: int
    phase: Phase


def one_forward_one_backward(num_rounds: int, in_flight: int) -> tuple[RoundPhase, ...]:
    """What a stage takes one after the other in a step."""
    order: list[RoundPhase] = []
    for number in range(num_rounds + in_flight):
        if number >= in_flight:
            order.append(RoundPhase(number - in_flight, Phase.BACKWARD))
        if number < num_rounds:
            order.append(RoundPhase(number, Phase.FORWARD))
    return tuple(each for each in order if each.round < num_rounds)


class Message(NamedTuple):
    """Samples that one device hands to another, whose places in a round are ``samples``."""

    sender: int  # index within its stage
    receiver: int
    samples: Span


def intervals(sizes: Sequence[int]) -> list[Span]:
    """The samples of each device of a stage, given how many each has in a round."""
    return [Span(stop - n, stop) for n, stop in zip(sizes, accumulate(sizes), strict=True)]


def messages_between(senders: Sequence[int], receivers: Sequence[int]) -> list[Message]:
    """What the devices of two stages send each other, given how many samples each has.

    At most as many messages as both have devices, less one.
    """
    return [
        Message(i, j, part)
        for i, own in enumerate(intervals(senders))
        for j, other in enumerate(intervals(receivers))
        if (part := own.intersect(other)).numel
    ]
