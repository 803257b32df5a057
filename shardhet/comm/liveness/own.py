"""OwnRank: what this rank is doing and for how long it has stood still, as others see it."""

import os
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

from shardhet.comm import devices
from shardhet.comm.liveness.judging import Cadence
from shardhet.comm.liveness.sign import Sign
from shardhet.comm.liveness.stacks import posture, stack
from shardhet.comm.members import local_device_spec
from shardhet.comm.progress import progress

STEP_FACTOR = 5.0
NUM_STEPS_KEPT = 20


class _Standing(NamedTuple):
    """What changes when this process makes progress."""

    num_marks: int
    num_steps: int
    num_collectives: int
    phases: tuple[str, ...]

    @classmethod
    def now(cls) -> "_Standing":
        return cls(
            num_marks=progress.num_marks,
            num_steps=progress.num_steps,
            num_collectives=progress.num_collectives + _num_collectives_of_torch(),
            phases=progress.phases,
        )


class OwnRank:
    """This rank: made by the thread that trains, looked at by that of the watch."""

    def __init__(
        self, rank: int, device: torch.device, cadence: Cadence, *, address: str = ""
    ) -> None:
        """``address``: that of the rank's ``Connections``."""
        self._name = f"rank {rank} ({local_device_spec(device)})"
        self.host, self.pid = socket.gethostname(), os.getpid()
        self._address = address
        self.still_s = 0.0
        self.a_peer_has_ended = False
        self._rank, self._device, self._cadence = rank, device, cadence
        self._thread_id = threading.get_ident()
        self._num_beats = 0
        self._standing = _Standing.now()
        # The pace of its steps, as seen at each look
        self._steps_at_start = self._num_steps_before = progress.num_steps
        self._step_s = 0.0  # since the end of the last step, declared phases excluded
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEPS_KEPT)

    @property
    def name(self) -> str:
        """The rank, its device, and its stage in a pipeline."""
        return self._name + ("" if progress.stage is None else f" of stage {progress.stage}")

    def look(self, passed_s: float, hang_timeout_s: float) -> Sign:
        """The sign of this rank, ``passed_s`` after the one before."""
        threads = self._thread_ids
        found, standing = posture(threads), _Standing.now()
        self.still_s = 0.0 if standing != self._standing else self.still_s + passed_s
        self._standing = standing
        self._learn_pace(passed_s)
        patience_s = max(hang_timeout_s, STEP_FACTOR * max(self._step_times_s, default=0.0))
        self._num_beats += 1
        phases = [name for name in progress.phases if name != progress.doing]
        return Sign(
            rank=self._rank,
            name=self.name,
            host=self.host,
            pid=self.pid,
            address=self._address,
            beat=self._num_beats,
            num_steps=progress.num_steps - self._steps_at_start,
            step=progress.step,
            doing=f"{progress.doing} ({', '.join(phases)})" if phases else progress.doing,
            is_waiting=found.is_waiting or self._device_is_busy(patience_s),
            is_long=bool(progress.phases) or found.is_compiling,
            is_debugged=found.is_debugged,
            still_s=self.still_s,
            patience_s=patience_s,
            limit_s=progress.limit_s,
            place=found.place,
            stack=self.stack() if self.still_s > self._cadence.read_after_s else "",
            failure=progress.failure,
        )

    def stack(self) -> str:
        """Where the thread that trains is."""
        return stack(self._thread_ids)

    def _learn_pace(self, passed_s: float) -> None:
        if not progress.phases:
            self._step_s += passed_s
        num_ended = progress.num_steps - self._num_steps_before
        if not num_ended:
            return
        if self._num_steps_before > self._steps_at_start:  # the first one contains the set-up
            self._step_times_s.append(self._step_s / num_ended)
        self._num_steps_before = progress.num_steps
        self._step_s = 0.0

    def _device_is_busy(self, patience_s: float) -> bool:
        """Whether an accelerator still has work of a process that stands still.

        Its host may be in any call that waits for the device, as ``loss.item()``, while the
        device waits in a collective for a peer.
        """
        # Not earlier: a query from another thread would disturb the capture of a graph.
        earliest_s = self._cadence.read_after_s if self.a_peer_has_ended else patience_s / 2
        if devices.is_on_host(self._device) or self.still_s < earliest_s:
            return False
        stream = devices.module_of(self._device).current_stream(self._device)
        try:
            return not stream.query()
        except RuntimeError:  # the device has failed, which the training thread will find out
            return False

    @property
    def _thread_ids(self) -> frozenset[int]:
        return frozenset((self._thread_id, progress.thread_id or self._thread_id))


def _num_collectives_of_torch() -> int:
    """The number of collectives and messages that this process has launched."""
    total = 0
    groups: tuple[Any, ...] = tuple(distributed_c10d._world.pg_map)
    for group in groups:
        with suppress(RuntimeError):  # of a backend that does not count
            total += group._get_sequence_number_for_group()
    return total
