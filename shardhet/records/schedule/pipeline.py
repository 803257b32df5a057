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

[Note: One order of messages]
NCCL does not promise that communicators make progress beside each other.  So all ranks launch
messages in one order: no rank launches one after another message that has to wait for it.  With
K rounds in flight on a stage and K' on the next, the forward of round x is handed over before
the backward of round r if and only if x <= r + c; a stage computes round r + K' - 1 before the
backward of r, and the one before it at most r + K - 1, so K' - 1 <= c <= K - 1.  With
c = min(K', K - 1) no stage receives more than one round ahead.  Where K' + 2 < K a stage has to
put sends off, until it has launched a receive; the next stage is not ready for them earlier.
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


class Handover(NamedTuple):
    """What a stage hands to the next one in a forward, or gets from it in a backward."""

    of: RoundPhase
    stage: int  # the earlier of the two

    @classmethod
    def to(cls, stage: int, of: RoundPhase) -> "Handover":
        """What ``stage`` receives for the phase."""
        return cls(of, stage - (of.phase is Phase.FORWARD))

    @classmethod
    def by(cls, stage: int, of: RoundPhase) -> "Handover":
        """What ``stage`` sends after the phase."""
        return cls(of, stage - (of.phase is Phase.BACKWARD))


class StagePhase(NamedTuple):
    """A phase of a stage, and its messages around it, in the order of launching."""

    of: RoundPhase
    ready: tuple[Handover, ...]  # received from now on: the memory is there
    before: tuple[Handover, ...]
    after: tuple[Handover, ...]


def phases_of(
    stage: int, in_flight: Sequence[int], num_rounds: int, *, in_one_order: bool
) -> list[StagePhase]:
    """What ``stage`` does in a step, given how many rounds each stage may have in flight.

    It receives what a phase needs at most one round ahead.  ``in_one_order``: messages are
    launched as in [Note: One order of messages]; else as early as possible.
    """
    held = [min(each, num_rounds) for each in in_flight]
    borders = [i for i in (stage - 1, stage) if 0 <= i < len(held) - 1]
    queues = [_between(i, held, num_rounds) for i in borders]
    possible: set[Handover] = set()

    def launch() -> tuple[Handover, ...]:
        launched: list[Handover] = []
        for queue in queues:
            number = next((i for i, each in enumerate(queue) if each not in possible), None)
            going = queue[:number] if in_one_order else [e for e in queue if e in possible]
            queue[:] = [each for each in queue if each not in going]
            launched += going
        return tuple(launched)

    phases = []
    order = one_forward_one_backward(num_rounds, held[stage])
    for now, following in zip(order, [*order[1:], order[-1]], strict=True):
        ahead = (now, following, now._replace(round=now.round + 1))
        received = dict.fromkeys(Handover.to(stage, each) for each in ahead)
        ready = [e for e in received if e not in possible and any(e in q for q in queues)]
        possible.update(ready)
        before = launch()
        possible.add(Handover.by(stage, now))
        phases.append(StagePhase(now, tuple(ready), before, launch()))
    return phases


def _between(stage: int, held: Sequence[int], num_rounds: int) -> list[Handover]:
    """What ``stage`` and the next hand each other; see [Note: One order of messages]."""
    ahead = min(held[stage + 1], held[stage] - 1)
    forwards = [RoundPhase(x, Phase.FORWARD) for x in range(num_rounds)]
    order: list[RoundPhase] = []
    for number in range(num_rounds):
        order += forwards[number + ahead if number else 0 : number + ahead + 1]
        order.append(RoundPhase(number, Phase.BACKWARD))
    return [Handover(each, stage) for each in order]


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
