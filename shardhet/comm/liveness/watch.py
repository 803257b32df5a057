"""watch_ranks: a thread beside the training that ends the run when a rank fails.

training thread     forward ... | blocked in a collective | raises what has failed
watch               looks twice a second: what the training thread does, what other ranks
say; diagnoses; breaks connections; ends the process as a last resort
exchange            makes the requests to the store, and may block there
"""

import atexit
import itertools
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Self

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.channel import progress
from shardhet.comm.failure import Failure, FailureKind, ProcessState, holder_of, host_of
from shardhet.comm.liveness.diagnosis import (
    SECONDS_FOR_THE_GONE,
    SECONDS_FOR_THE_GONE_OF_NCCL,
    SeenPeer,
    diagnose,
    diagnose_store,
    panel,
    standstill,
)
from shardhet.comm.liveness.ending import (
    GRACE_S,
    Connections,
    Ending,
    end_with_launcher,
    interface_towards,
)
from shardhet.comm.liveness.heartbeat import READ_AFTER_S, Heartbeat, OwnRank
from shardhet.comm.peers import failure_of, report, reported

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 60.0
SECONDS_TO_LEAVE = 2.0
HUB = 0  # the rank to which those of other hosts connect
INTERVAL_S = 0.5  # between two looks
BETWEEN_READS_S = 20.0  # while all is well, so that every rank knows all others
WARNS_AFTER_S = 20.0  # of standing still
PARTS_OF_PATIENCE = 3  # a rank that has no progress for one of them is warned of


def watch_ranks(
    *,
    hang_timeout_s: float | None = HANG_TIMEOUT_S,
    device: torch.device | str | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> "Watch":
    """Watch over all ranks of the default process group until the program ends.

    ``HetFSDP`` calls it with these defaults unless the program has; a later call with other
    values changes them.  Every rank makes the same calls, after ``init_process_group`` and from
    the thread that trains.
    From then on a rank that is stopped, stands still, or is cut off from the network ends the
    run: every other rank raises ``RuntimeError``, or ends with exit status 75 if it cannot,
    and the first of them shows who stands still, where, and for how long.

    A rank is accused only if others wait for it and it has made no progress for
    ``hang_timeout_s``, or for five times the slowest of the last 20 steps if that is longer;
    for ten times as long before the first step has ended, while torch compiles, and inside
    ``with may_take_long("evaluating")``; never at a prompt of a debugger.  After a third of
    that, but not before 20 s, a line says who waits for whom.  None or 0 switches the watch
    off.  A rank that torchrun or ``shardhet train`` has started also ends if that process is
    gone, with or without a watch.

    Args:
        hang_timeout_s: the least time without progress, in seconds.
        device: by which this rank is described; None: that of the process.
        on_failure: called with what is found instead of showing it, on one rank.

    The watch ends with the program, with the process group, or with its ``stop``; it is a
    context manager, too.
    """
    end_with_launcher()
    _is_decided.append(None)
    running = _running[0] if _running else None
    if running is not None and hang_timeout_s:
        running.hang_timeout_s = hang_timeout_s
        running.on_failure = on_failure or running.on_failure
        return running
    if running is not None:
        running.stop()
    device = torch.device(device or _own_device())
    watch = Watch(hang_timeout_s or 0.0, device, on_failure)
    if hang_timeout_s and dist.is_initialized() and dist.get_world_size() > 1:
        try:
            watch.start()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            # A store that gives no second connection, or another version of torch.
            logger.warning("no watch over the ranks of this run: %r", error)
    return watch


def watch_unless_decided(world_size: int, device: torch.device) -> None:
    """``watch_ranks`` with its defaults, for a model that is on all ranks, unless the program
    has called it.
    """
    if not _is_decided and dist.is_initialized() and world_size == dist.get_world_size():
        watch_ranks(device=device)
        _is_decided.clear()


class Watch:
    """The watch of this rank over all ranks."""

    def __init__(
        self,
        hang_timeout_s: float,
        device: torch.device,
        on_failure: Callable[[Failure], None] | None = None,
    ) -> None:
        self.hang_timeout_s = hang_timeout_s
        self.on_failure = on_failure or _show
        self._device, self._uses_device = device, not devices.is_on_host(device)
        self._wakes = threading.Event()
        self._is_stopping = False
        # Of this rank
        self._own: Heartbeat | None = None  # the last
        self._has_warned = False  # of its present standstill
        # Of the others
        self._seen: dict[int, SeenPeer] = {}
        self._since_read_s, self._store_silent_s = BETWEEN_READS_S, 0.0
        self._num_rounds = self._num_reads = 0
        self._ending: Ending | None = None

    @property
    def is_running(self) -> bool:
        """Whether it watches: not if it is switched off, or there is one rank."""
        return self in _running

    def start(self) -> None:
        """Start the threads of the watch."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()  # a connection of its own
        self._holder, self._holder_rank = holder_of(store)
        self._host_of_store = host_of(store)
        is_hub = self._rank == HUB and not _is_one_host(self._world_size)
        interface = interface_towards(self._host_of_store) if is_hub else None
        self._connections = Connections(self._rank, interface=interface)
        address = self._connections.address
        self._here = OwnRank(self._rank, self._device, address=address)
        self._exchange = Exchange(store, self._rank, self._world_size, self._show)
        for rank in set(range(self._world_size)) - {self._rank}:
            self._seen[rank] = SeenPeer(last=Heartbeat(rank=rank, name=f"rank {rank}"))
        progress.failure = None
        _running.append(self)
        progress.is_watched = True
        self._exchange.thread.start()
        self._wakes.set()  # the first heartbeat is sent at once
        self._thread = threading.Thread(target=self._run, name="shardhet watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)

    def stop(self, error: BaseException | None = None) -> None:
        """Tell the others that this rank does not take part any more, and end the threads.

        ``error`` is that with which this rank leaves.
        """
        if self not in _running:
            return
        _running.remove(self)
        atexit.unregister(self.stop)
        self._is_stopping = True
        self._wakes.set()
        self._thread.join(SECONDS_TO_LEAVE)
        error = error or getattr(sys, "last_value", None)  # that the interpreter ends with
        if error is not None and progress.failure is None:
            found = failure_of(error, rank=self._rank, name=self._here.name)
            self._exchange.found = found if found.kind is FailureKind.RAISED else None
        if self._own is not None:
            number = self._own.number + 1
            self._exchange.own = replace(self._own, has_left=True, number=number)
        self._exchange.stop(SECONDS_TO_LEAVE)
        self._connections.close()
        if self._ending is not None:
            self._ending.join(SECONDS_TO_LEAVE)
        elif self._exchange.failure is not None:  # of which the program heard first
            self._kill_stopped(self._exchange.failure)

    # The thread #

    def _run(self) -> None:
        looked_at_s = time.monotonic()
        try:
            while not self._is_stopping and dist.is_initialized():
                self._wakes.wait(INTERVAL_S)
                self._wakes.clear()
                now_s = time.monotonic()
                # Time in which this whole process was stopped does not count: others may have
                # sent heartbeats meanwhile.
                passed_s = min(now_s - looked_at_s, 2 * INTERVAL_S)
                looked_at_s = now_s
                self._exchange.own = own = self._here.look(passed_s, self.hang_timeout_s)
                if self._own is None:
                    self._exchange.wakes.set()
                self._own = own
                self._listen(own, passed_s)
                self._decide(own, passed_s)
        except Exception:  # the watch must never be what ends a run
            logger.exception("the watch over ranks has failed; the run goes on without it")
        finally:
            if _running in ([], [self]):  # no later watch has begun
                progress.is_watched = False  # calls keep their own limits again

    def _listen(self, own: Heartbeat, passed_s: float) -> None:
        """Update what is known of the others."""
        exchange = self._exchange
        is_idle = exchange.num_rounds == self._num_rounds
        self._store_silent_s = self._store_silent_s + passed_s if is_idle else 0.0
        self._num_rounds = exchange.num_rounds
        self._since_read_s += passed_s
        is_still = own.stalled_s >= READ_AFTER_S
        timeout_s = min(own.timeout_s, own.limit_s or math.inf)
        between_s = timeout_s / 20 if own.is_waiting and is_still else BETWEEN_READS_S
        self._connections.look()
        if is_still:
            peers = self._seen.values()
            now = [replace(each, process=self._state_of(each.last)) for each in peers]
            is_any_gone = any(each.is_gone for each in now)
            self._here.a_peer_has_failed = is_any_gone or exchange.failure is not None
            between_s = 0.0 if is_any_gone else between_s
        if self._rank != HUB and not self._seen[HUB].last.number:  # to connect to it early
            between_s = 0.0
        if exchange.num_reads != self._num_reads:
            self._update_seen(exchange.beats)
            self._num_reads = exchange.num_reads
            self._since_read_s = 0.0
        exchange.reads = self._since_read_s >= between_s - INTERVAL_S

    def _update_seen(self, beats: dict[int, Heartbeat]) -> None:
        for rank, peer in self._seen.items():
            last = beats.get(rank, peer.last)
            silent_s = 0.0
            # Before the first read, nobody has listened.
            if last.number == peer.last.number and self._num_reads:
                silent_s = peer.silent_s + self._since_read_s
            if rank == HUB and last.address and last.host != self._here.host:
                near = (os.environ.get("MASTER_ADDR"), self._host_of_store, last.host)
                hosts = list(dict.fromkeys(host for host in near if host))
                self._connections.connect(rank, hosts, last.address)
            process = self._state_of(last)
            self._seen[rank] = SeenPeer(last=last, silent_s=silent_s, process=process)

    def _state_of(self, beat: Heartbeat) -> ProcessState:
        if beat.host == self._here.host:
            return ProcessState.of(beat.pid)
        return self._connections.ended.get(beat.rank, ProcessState.UNKNOWN)

    def _decide(self, own: Heartbeat, passed_s: float) -> None:
        if self._ending is not None:
            is_waiting = own.is_waiting and own.stalled_s > 0
            self._ending.advance(passed_s, is_waiting=is_waiting, stack=self._here.stack())
            return
        failure = self._exchange.failure
        if failure is None:
            holder = self._holder, self._holder_rank
            failure = diagnose_store(own, self._store_silent_s, *holder)
            is_first = self._rank == int(self._holder_rank == 0)  # without one, none can agree
            if failure is not None and is_first:
                self._show(failure)
        if failure is None:
            gone_s = SECONDS_FOR_THE_GONE_OF_NCCL if self._uses_device else SECONDS_FOR_THE_GONE
            self._exchange.found = diagnose(own, self._seen, gone_s=gone_s)
            self._warn_of_standstill(own)
            if self._exchange.found is not None:
                self._exchange.wakes.set()
        elif own.is_waiting or failure.kind is not FailureKind.RAISED:
            self._end(failure)

    def _end(self, failure: Failure) -> None:
        """End this rank: at once, or if a rank has raised when its errors do not do it."""
        is_found, breaks_after_s = failure.kind is not FailureKind.RAISED, 0.0
        if is_found:
            self._kill_stopped(failure)
            logger.info("%s", failure.what)
        else:  # over gloo the rank that has raised breaks connections itself
            breaks_after_s = READ_AFTER_S if self._uses_device else GRACE_S
        progress.failure = failure
        self._ending = Ending(
            failure.message,
            is_at_fault=is_found and self._rank in failure.ranks,
            breaks_after_s=breaks_after_s,
        )

    def _show(self, failure: Failure) -> None:
        with suppress(OSError, ValueError):
            self.on_failure(failure)

    def _kill_stopped(self, failure: Failure) -> None:
        """End ranks of this host that are stopped: no other signal would reach them."""
        for rank in set(failure.ranks) & self._seen.keys():
            last = self._seen[rank].last
            is_here = last.host == self._here.host
            if is_here and ProcessState.of(last.pid) is ProcessState.STOPPED:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(last.pid, signal.SIGKILL)

    def _warn_of_standstill(self, own: Heartbeat) -> None:
        warns_after_s = max(WARNS_AFTER_S, own.timeout_s / PARTS_OF_PATIENCE)
        if own.stalled_s < warns_after_s:
            self._has_warned = False
        elif not self._has_warned and self._num_reads:
            self._has_warned = True
            text = standstill(own, self._seen)
            logger.warning("%s", text)
            # The first rank that sends heartbeats: the others would say the same.
            before = (self._seen[rank].silent_s for rank in range(self._rank))
            if all(silent_s >= warns_after_s / 2 for silent_s in before):
                _say(f"{text}\n")


class Exchange:
    """Carries heartbeats, and the failure that ends the run, between ranks, over the store.

    A request to a store whose process is stopped blocks for ever in C++, whatever its timeout
    (torch 2.13).  So a thread that nobody waits for makes them: the watch sees that no round
    ends any more.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, show: Callable[[Failure], None]
    ) -> None:
        """``store`` is a connection that nobody else uses.

        ``show`` is called with what this rank has found, if no other was the first.
        """
        # Written by the watch
        self.own: Heartbeat | None = None
        self.found: Failure | None = None
        self.reads = False
        # Written by the thread; each is replaced as a whole
        self.num_rounds = self.num_reads = 0
        self.beats: dict[int, Heartbeat] = {}  # the last of each rank that has sent any
        self.failure: Failure | None = None  # the first that any rank has reported
        self._store, self._rank, self._show = store, rank, show
        prefix = f"shardhet_heartbeat_{next(_numbers)}"
        self._keys = [f"{prefix}_{each}" for each in range(world_size)]
        self.wakes = threading.Event()
        self._is_stopping = False
        name = "shardhet heartbeats"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self, within_s: float) -> None:
        """Send the last heartbeat and end the thread, unless it is blocked."""
        self._is_stopping = True
        self.wakes.set()
        self.thread.join(within_s)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._round()
                self.wakes.wait(INTERVAL_S)
                self.wakes.clear()
            self._round()
        except RuntimeError as error:  # the watch sees that no round ends any more
            logger.info("the watch over ranks has lost the rendezvous store: %s", error)

    def _round(self) -> None:
        own, found = self.own, self.found
        if own is not None:
            self._store.set(self._keys[self._rank], json.dumps(asdict(own)))
        if self.failure is None or self.failure.kind is FailureKind.RAISED:
            self.failure = reported(self._store) or (found and report(found, self._store))
            if (
                found is not None
                and found == self.failure
                and found.kind is not FailureKind.RAISED
            ):
                self._show(found)
        if self.reads:
            keys = self._keys
            if len(self.beats) < len(keys):  # to get a key that is missing would block
                keys = [key for key in keys if self._store.check([key])]
            texts = self._store.multi_get(keys) if keys else []
            beats = [Heartbeat(**json.loads(text)) for text in texts]
            self.beats = {beat.rank: beat for beat in beats}
            self.num_reads += 1
        self.num_rounds += 1


_running: list[Watch] = []  # at most one
_is_decided: list[None] = []  # not empty once the program itself has called watch_ranks
_numbers = itertools.count()  # of watches: as many on every rank


def _is_one_host(world_size: int) -> bool:
    """Whether the launcher says so."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)


def _own_device() -> torch.device:
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _show(failure: Failure) -> None:
    _say(panel(failure))


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        screen = progress.screen or sys.stderr
        screen.write(text)
        screen.flush()
