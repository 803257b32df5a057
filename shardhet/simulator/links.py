"""The links of a simulated cluster: one transfer at a time on each, in launch order."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardhet.records.schedule import Launch, LaunchKind, Schedule
from shardhet.simulator.timeline import Event


@dataclass
class Transfer:
    """One launch, from when the first actor makes it to its end."""

    launch: Launch
    seconds: float
    num_launched: int = 0  # by so many actors
    is_done: bool = False
    since_s: float = 0.0  # when it started
    remaining_s: float = 0.0


class Links:
    """All transfers of a step; each starts when all ranks have launched it.

    A transfer also waits for those of its kind that were launched before it, and for its
    resource, which kinds of launch may share.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds_of: Mapping[LaunchKind, Sequence[float]],  # by unit
        *,
        unit_fqns: Sequence[str],
        num_actors: int,
    ) -> None:
        self.transfers = {
            each: Transfer(each, seconds_of[each.kind][each.unit])
            for each in schedule.launches()
        }
        self.sent: list[Event] = []
        self.running: dict[str, Transfer] = {}  # by resource
        self.has_ended = False  # one has, since this was last set to False
        self._queues: dict[LaunchKind, deque[Transfer]] = {kind: deque() for kind in seconds_of}
        self._place: dict[Launch, int] = {}  # among those of its kind, which end in order
        for each, transfer in self.transfers.items():
            self._place[each] = len(self._queues[each.kind])
            self._queues[each.kind].append(transfer)
        self._num_ended = dict.fromkeys(self._queues, 0)
        self._num_running = len(self.transfers)
        self._unit_fqns = unit_fqns
        self._num_actors = num_actors

    @property
    def remaining_s(self) -> float:
        """Seconds until the next running transfer ends; inf if none runs."""
        return min((each.remaining_s for each in self.running.values()), default=float("inf"))

    def start(self, now_s: float) -> bool:
        """Run the next transfer that all have launched; returns whether there is one."""
        for kind, queue in self._queues.items():
            is_next = queue and queue[0].num_launched == self._num_actors
            if is_next and kind.resource not in self.running:
                transfer = queue.popleft()
                transfer.since_s, transfer.remaining_s = now_s, transfer.seconds
                self.running[kind.resource] = transfer
                if transfer.seconds == 0:
                    self._finish(kind.resource, now_s)
                return True
        return False

    def pass_time(self, seconds: float, now_s: float) -> None:
        """Move the running transfers on by ``seconds``, which end ``now_s``."""
        for resource, transfer in list(self.running.items()):
            transfer.remaining_s -= seconds
            if transfer.remaining_s <= 1e-12 * now_s:
                self._finish(resource, now_s)

    def has_room(self, launch: Launch) -> bool:
        """Whether few enough launches of its kind that were made before it are in flight."""
        most = launch.kind.max_in_flight
        in_flight = self._place[launch] - self._num_ended[launch.kind]
        return most is None or in_flight < most

    @property
    def are_done(self) -> bool:
        """Whether all transfers are done."""
        return not self._num_running

    def _finish(self, resource: str, now_s: float) -> None:
        transfer = self.running.pop(resource)
        transfer.is_done = self.has_ended = True
        kind, unit, _ = transfer.launch
        self._num_ended[kind] += 1
        self._num_running -= 1
        self.sent.append(
            Event(unit=self._unit_fqns[unit], work=kind, start_s=transfer.since_s, end_s=now_s)
        )
