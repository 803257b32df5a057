"""The event loop of a simulated step: ranks that issue their ops, and the transfers they share.

A transfer starts when all ranks that take part have issued it, what it runs on is free, and the
transfers of its kind that were issued before it are done.  Gathers and reductions of a stage
share its links; messages have a link for each pair of stages and direction.

The loop finds the next thing to end and moves the clock there.  Only ranks whose computation
has ended, or who wait for what has ended, are then looked at; each goes on as far as it can,
one op after the other.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardhet.records.ops import OpKind
from shardhet.records.schedule import LaunchKind, Phase
from shardhet.simulator.actors import Actor, StageOps
from shardhet.simulator.timeline import Event, Work

Place = tuple[int, str]  # what transfers run on, one at a time
NEVER = 1e-200  # a speed
NEGLIGIBLE = 1e-12  # of the clock: what remains of a computation is then rounding


@dataclass(eq=False)
class Transfer:
    """A launch, a message or a meeting, from when the first rank issues it to its end."""

    stage: int  # of a message, the one that sends
    unit: str
    work: Work | LaunchKind
    seconds: float
    num_missing: int = 0  # ranks that have not issued it
    start_s: float = 0.0
    remaining_s: float = 0.0
    end_s: float | None = None  # None: it is not over


class Loop:
    """The clock, all transfers and all ranks."""

    def __init__(
        self,
        stages: Sequence[StageOps],
        actors: Sequence[Actor],
        hops_s: Sequence[tuple[float, float]],
    ) -> None:
        """``hops_s`` are of a round's messages from each stage to the next, and back."""
        self.clock_s = 0.0
        self.sent: list[Event] = []
        self._actors, self._hops_s = actors, hops_s
        self._by_name: dict[tuple[object, ...], Transfer] = {}
        # By what they run on, and by their kind: those that have not started
        self._queues: dict[tuple[Place, object], deque[Transfer]] = {}
        self._running: dict[Place, Transfer] = {}
        self._has_ended = False  # a transfer has, since this was last set to False
        # By stage and op; None: it is no transfer
        self._transfers = [list(self._transfers_of(each)) for each in stages]
        # By actor: seconds of computation that remain at full speed; inf if it does not
        # compute.  A speed is negative if moving the data costs the processor more time than
        # the collective lasts: compute then has more left to do when the collective ends.
        self._remaining_s = np.full(len(actors), np.inf)
        self._excess = np.array([actor.overlap_slowdown for actor in actors])
        self._stages = np.array([actor.of_stage.stage for actor in actors])
        self._speeds = {
            frozenset[int](): np.ones(len(actors))
        }  # by the stages that are sending

    def _transfers_of(self, of: StageOps) -> Iterator[Transfer | None]:
        """Those of a list; ranks of other stages issue its messages and meetings too."""
        num_ranks = sum(actor.of_stage is of for actor in self._actors)
        num_meetings = 0
        for i, op in enumerate(of.ops):
            name: tuple[object, ...]
            if isinstance(op.kind, LaunchKind):
                seconds = of.seconds_of[op.kind][op.unit]
                made = Transfer(of.stage, of.unit_fqns[op.unit], op.kind, seconds)
                place, name = (of.stage, op.kind.resource), (of.stage, i)
            elif op.stage_transfer is not None and op.kind is not OpKind.ROOM:
                (number, phase), cut = op.stage_transfer
                sender, to = (cut, cut + 1) if phase is Phase.FORWARD else (cut + 1, cut)
                text = f"round {number} from stage {sender} to {to}"
                seconds = self._hops_s[cut][phase is Phase.BACKWARD]
                made = Transfer(sender, text, Work.HAND_OVER, seconds)
                place, name = (cut, phase.value), op.stage_transfer
            elif op.kind is OpKind.AGREE:
                made = Transfer(of.stage, "", Work.AGREE, 0.0)
                place, name = (-1, ""), (num_meetings,)
                num_meetings += 1
            else:
                yield None
                continue
            transfer = self._by_name.setdefault(name, made)
            if transfer is made:
                self._queues.setdefault((place, made.work), deque()).append(made)
            transfer.num_missing += num_ranks
            yield transfer

    def run(self) -> None:
        """Run until all ranks are at the end of their lists."""
        going = [*self._actors]
        while True:
            self._settle(going)
            if all(actor.is_done for actor in self._actors):
                return
            going = self._pass_time()

    def _settle(self, going: list[Actor]) -> None:
        """Do everything that can happen without time passing; ``going`` may go on.

        All actors issue at most one op before the links are looked at again.
        """
        while True:
            has_started = self._start()
            if self._has_ended:
                self._has_ended = False
                going = [actor for actor in self._actors if not actor.is_computing]
            going = [actor for actor in going if self._advance(actor)]
            if not (has_started or going or self._has_ended):
                return

    def _start(self) -> bool:
        """Run transfers that all have issued; returns whether there are any."""
        has_started = False
        for (place, _), queue in self._queues.items():
            if queue and not queue[0].num_missing and place not in self._running:
                each = self._running[place] = queue.popleft()
                each.start_s, each.remaining_s = self.clock_s, each.seconds
                has_started = True
                if each.seconds == 0:
                    self._end(place)
        return has_started

    def _end(self, place: Place) -> None:
        each = self._running.pop(place)
        each.end_s, self._has_ended = self.clock_s, True
        self.sent.append(
            Event(
                unit=each.unit,
                work=each.work,
                start_s=each.start_s,
                end_s=each.end_s,
                stage=each.stage,
            )
        )

    def _pass_time(self) -> list[Actor]:
        """Move the clock to the next end of a computation or of a transfer.

        Returns the actors whose computation has ended.
        """
        running = [*self._running.items()]
        sending = frozenset(e.stage for _, e in running if isinstance(e.work, LaunchKind))
        if sending not in self._speeds:
            self._speeds[sending] = 1.0 - self._excess * np.isin(self._stages, list(sending))
        speeds = self._speeds[sending]
        # Where the speed is not positive, the collective ends first.
        ends_s = self._remaining_s / np.maximum(speeds, NEVER)
        step_s = min([float(ends_s.min()), *(each.remaining_s for _, each in running)])
        if step_s == np.inf:
            waiting = [actor.op.kind for actor in self._actors if not actor.is_done]
            raise RuntimeError(f"simulate: ranks wait for each other forever: {waiting}.")
        self.clock_s += step_s
        self._remaining_s -= step_s * speeds
        np.maximum(self._remaining_s, 0.0, out=self._remaining_s)
        ended = np.flatnonzero(self._remaining_s <= NEGLIGIBLE * self.clock_s)
        self._remaining_s[ended] = np.inf
        for place, each in running:
            each.remaining_s -= step_s
            if each.remaining_s <= NEGLIGIBLE * self.clock_s:
                self._end(place)
        actors = [self._actors[i] for i in ended.tolist()]
        for actor in actors:
            actor.end(self.clock_s)
        return actors

    def _advance(self, actor: Actor) -> bool:
        """Issue the next op of a rank; returns whether it could."""
        if actor.is_computing or actor.is_done:
            return False
        transfers, op = self._transfers[actor.of_stage.stage], actor.op
        waited = [each for i in op.after if (each := transfers[i]) is not None]
        if any(each.end_s is None for each in waited):
            return False
        for each in waited:
            assert each.end_s is not None
            actor.wait(each.work, each.end_s)
        if (issued := transfers[actor.at]) is not None:
            issued.num_missing -= 1
            actor.at += 1
        elif (seconds := actor.begin(self.clock_s)) > 0:
            self._remaining_s[actor.index] = seconds
        else:
            actor.end(self.clock_s)
        return True
