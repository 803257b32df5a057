"""watch_ranks: a thread beside the training that ends the run when a rank stands still.

training thread     forward ... | blocked in a collective | raises the verdict
watch               looks twice a second: what the training thread does, what other ranks
say; judges; breaks connections; ends the process as a last resort
mailbox             makes the requests to the store, and may block there
"""

import atexit
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardhet.comm import devices
from shardhet.comm.failure import MEND
from shardhet.comm.liveness.connections import Connections
from shardhet.comm.liveness.ending import Ending, end_with_launcher
from shardhet.comm.liveness.judging import (
    SECONDS_FOR_THE_GONE,
    SECONDS_FOR_THE_GONE_OF_NCCL,
    Cadence,
    SeenPeer,
    Verdict,
    has_ended,
    judge,
    judge_store,
    standstill,
)
from shardhet.comm.liveness.mailbox import Mailbox
from shardhet.comm.liveness.own import OwnRank
from shardhet.comm.liveness.sign import ProcessState, Sign, no_sign
from shardhet.comm.peers import LostPeerError, holder_of, host_of
from shardhet.comm.progress import progress

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 60.0
SECONDS_TO_LEAVE = 2.0
HUB = 0  # the rank to which those of other hosts connect
USUAL = Cadence()
PARTS_OF_PATIENCE = 3  # a rank that has no progress for one of them is told of


def watch_ranks(
    *,
    hang_timeout_s: float | None = HANG_TIMEOUT_S,
    device: torch.device | str | None = None,
    on_verdict: Callable[[Verdict], None] | None = None,
    cadence: Cadence = USUAL,
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
    ``with phase("evaluating")``; never at a prompt of a debugger.  After a third of that, but
    not before 20 s, a line says who waits for whom.  None or 0 switches the watch off.  A rank
    that torchrun or ``shardhet train`` has started also ends if that process is gone, with or
    without a watch.

    Args:
        hang_timeout_s: the least time without progress, in seconds.
        device: by which this rank is described; None: that of the process.
        on_verdict: called with the verdict instead of showing it, on one rank.
        cadence: how often the watch looks, and how soon it acts; the same on all ranks.

    The watch ends with the program, with the process group, or with its ``stop``; it is a
    context manager, too.
    """
    end_with_launcher()
    _is_decided.append(None)
    running = _running[0] if _running else None
    if running is not None and hang_timeout_s:
        running.change(hang_timeout_s, on_verdict)
        return running
    if running is not None:
        running.stop()
    device = torch.device(device or _own_device())
    watch = Watch(hang_timeout_s or 0.0, device, on_verdict, cadence)
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
        on_verdict: Callable[[Verdict], None] | None = None,
        cadence: Cadence = USUAL,
    ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._on_verdict = on_verdict or _show
        self._device = device
        self._cadence = cadence
        self._wakes = threading.Event()
        self._is_stopping = False
        # Of this rank
        self._own: Sign | None = None  # the last
        self._has_told = False  # of its present standstill
        # Of the others
        self._seen: dict[int, SeenPeer] = {}
        self._since_read_s, self._store_silent_s = cadence.between_reads_s, 0.0
        self._num_rounds = self._num_reads = 0
        self._ending: Ending | None = None

    def change(
        self, hang_timeout_s: float, on_verdict: Callable[[Verdict], None] | None
    ) -> None:
        """Go on with another patience, and another receiver of the verdict if one is given."""
        self._hang_timeout_s = hang_timeout_s
        self._on_verdict = on_verdict or self._on_verdict

    @property
    def is_running(self) -> bool:
        """Whether it watches: not if it is switched off, or there is one rank."""
        return self in _running

    def start(self) -> None:
        """Start the threads of the watch."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._connections = Connections(
            self._rank, listens=self._rank == HUB and not _is_one_host(self._world_size)
        )
        address = self._connections.address
        self._here = OwnRank(self._rank, self._device, self._cadence, address=address)
        store = _own_store()
        self._holder, self._holder_rank = holder_of(store)
        self._host_of_store = host_of(store)
        interval_s = self._cadence.interval_s
        self._mailbox = Mailbox(store, self._rank, self._world_size, interval_s=interval_s)
        for rank in set(range(self._world_size)) - {self._rank}:
            self._seen[rank] = SeenPeer(sign=no_sign(rank), silent_s=0.0)
        progress.verdict = progress.failure = None
        progress.on_failure = self._wakes.set
        _running.append(self)
        progress.is_watched = True
        self._mailbox.start()
        self._wakes.set()  # the first sign is given at once
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
        progress.on_failure = lambda: None
        self._is_stopping = True
        self._wakes.set()
        self._thread.join(SECONDS_TO_LEAVE)
        error = error or getattr(sys, "last_value", None)  # that the interpreter ends with
        failure = progress.failure
        heard_of_it = progress.verdict is not None or _is_of_another(error)
        if failure is None and error is not None and not heard_of_it:
            failure = f"{self._here.name} failed in {progress.doing}: {error!r}"
        if self._own is not None:
            last = replace(self._own, has_left=True, failure=failure)
            self._mailbox.outgoing = replace(last, beat=self._own.beat + 1).to_json()
            self._mailbox.has_news = failure is not None
        self._mailbox.stop(SECONDS_TO_LEAVE)
        self._connections.close()
        if self._ending is not None:
            self._ending.join(SECONDS_TO_LEAVE)

    # The thread #

    def _run(self) -> None:
        looked_at_s = time.monotonic()
        interval_s = self._cadence.interval_s
        try:
            while not self._is_stopping and dist.is_initialized():
                self._wakes.wait(interval_s)
                self._wakes.clear()
                now_s = time.monotonic()
                # Time in which this whole process was stopped does not count: others may have
                # given signs meanwhile.
                passed_s = min(now_s - looked_at_s, 2 * interval_s)
                looked_at_s = now_s
                own = self._own = self._here.look(passed_s, self._hang_timeout_s)
                self._post(own)
                self._listen(own, passed_s)
                self._decide(own, passed_s)
        except Exception:  # the watch must never be what ends a run
            logger.exception("the watch over ranks has failed; the run goes on without it")
        finally:
            if _running in ([], [self]):  # no later watch has begun
                progress.is_watched = False  # calls keep their own limits again

    def _post(self, own: Sign) -> None:
        self._mailbox.outgoing = own.to_json()
        self._mailbox.has_news |= own.failure is not None
        if own.beat == 1 or self._mailbox.has_news:
            self._mailbox.wake()

    def _listen(self, own: Sign, passed_s: float) -> None:
        """Update what is known of the others."""
        mailbox, cadence = self._mailbox, self._cadence
        is_idle = mailbox.num_rounds == self._num_rounds
        self._store_silent_s = self._store_silent_s + passed_s if is_idle else 0.0
        self._num_rounds = mailbox.num_rounds
        self._since_read_s += passed_s
        is_still = own.still_s >= cadence.read_after_s
        patience_s = min(own.patience_s, own.limit_s or math.inf)
        between_s = patience_s / 20 if own.is_waiting and is_still else cadence.between_reads_s
        self._connections.look()
        if is_still:
            signs = [each.sign for each in self._seen.values()]
            has_any_ended = any(has_ended(sign, self._state_of(sign)) for sign in signs)
            self._here.a_peer_has_ended = has_any_ended
            between_s = 0.0 if has_any_ended else between_s
        if self._rank != HUB and not self._seen[HUB].sign.beat:  # to connect to it early
            between_s = 0.0
        if mailbox.num_reads != self._num_reads:
            self._update_seen(mailbox.incoming)
            self._num_reads = mailbox.num_reads
            self._since_read_s = 0.0
        mailbox.reads = self._since_read_s >= between_s - cadence.interval_s

    def _update_seen(self, incoming: dict[int, str]) -> None:
        if self._num_reads:  # before the first one, nobody has listened
            for rank in self._seen.keys() - incoming.keys():
                peer = self._seen[rank]
                self._seen[rank] = replace(peer, silent_s=peer.silent_s + self._since_read_s)
        for rank, text in incoming.items():
            if rank == self._rank:
                continue
            sign, before = Sign.from_json(text), self._seen.get(rank)
            silent_s = 0.0
            if before is not None and before.sign.beat == sign.beat:
                silent_s = before.silent_s + self._since_read_s
            if rank == HUB and sign.address and sign.host != self._here.host:
                near = (os.environ.get("MASTER_ADDR"), self._host_of_store, sign.host)
                hosts = list(dict.fromkeys(host for host in near if host))
                self._connections.connect(rank, hosts, sign.address)
            process = self._state_of(sign)
            self._seen[rank] = SeenPeer(sign=sign, silent_s=silent_s, process=process)

    def _state_of(self, sign: Sign) -> ProcessState:
        if sign.host == self._here.host:
            return ProcessState.of(sign.pid)
        return self._connections.ended.get(sign.rank, ProcessState.UNKNOWN)

    def _decide(self, own: Sign, passed_s: float) -> None:
        if self._ending is not None:
            is_waiting = own.is_waiting and own.still_s > 0
            self._ending.advance(passed_s, is_waiting=is_waiting, stack=self._here.stack())
            return
        if self._mailbox.verdict is not None:
            self._end(Verdict.from_json(self._mailbox.verdict))
            return
        store = judge_store(own, self._store_silent_s, self._holder, self._holder_rank)
        if store is not None:
            self._end(store)
            return
        waits_for_device = not devices.is_on_host(self._device)
        gone_s = SECONDS_FOR_THE_GONE_OF_NCCL if waits_for_device else SECONDS_FOR_THE_GONE
        verdict = judge(own, self._seen, gone_s=gone_s)
        self._tell_of_standstill(own)
        if verdict is not None:
            self._mailbox.proposal = verdict.to_json()  # the first one counts
            self._mailbox.wake()
            return
        failures = [s.sign.failure for s in self._seen.values() if s.sign.failure is not None]
        if failures and own.is_waiting:
            progress.verdict = f"{failures[0]}\n{MEND}"
            # Over gloo the rank that has failed breaks connections itself.
            grace_s, read_after_s = self._cadence.grace_s, self._cadence.read_after_s
            breaks_after_s = read_after_s if waits_for_device else grace_s
            self._ending = Ending(
                progress.verdict,
                is_culprit=False,
                breaks_after_s=breaks_after_s,
                grace_s=grace_s,
            )

    def _tell_of_standstill(self, own: Sign) -> None:
        tells_after_s = max(self._cadence.tells_after_s, own.patience_s / PARTS_OF_PATIENCE)
        if own.still_s < tells_after_s:
            self._has_told = False
        elif not self._has_told and self._num_reads:
            self._has_told = True
            text = standstill(own, self._seen)
            logger.warning("%s", text)
            # The first rank that gives signs: the others would say the same.
            before = (self._seen[rank].silent_s for rank in range(self._rank))
            if all(silent_s >= tells_after_s / 2 for silent_s in before):
                _say(f"{text}\n")

    def _end(self, verdict: Verdict) -> None:
        self._kill_stopped(verdict)
        is_culprit = self._rank in verdict.culprits
        reporters = [rank for rank in range(self._world_size) if rank not in verdict.culprits]
        if reporters and reporters[0] == self._rank:
            with suppress(OSError, ValueError):
                self._on_verdict(verdict)
        logger.info("%s", verdict.text)
        progress.verdict = f"{verdict.text}\nAll ranks stop."
        self._ending = Ending(
            progress.verdict,
            is_culprit=is_culprit,
            breaks_after_s=0.0,
            grace_s=self._cadence.grace_s,
        )

    def _kill_stopped(self, verdict: Verdict) -> None:
        """End culprits of this host that are stopped: no other signal would reach them."""
        for rank in verdict.culprits:
            sign = self._seen[rank].sign if rank in self._seen else None
            if sign is None or sign.host != self._here.host:
                continue
            if ProcessState.of(sign.pid) is ProcessState.STOPPED:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(sign.pid, signal.SIGKILL)


_running: list[Watch] = []  # at most one
_is_decided: list[None] = []  # not empty once the program itself has called watch_ranks


def _is_of_another(error: BaseException | None) -> bool:
    """Whether a rank ends with ``error`` because another one has."""
    return error is not None and isinstance(error.__cause__, LostPeerError)


def _is_one_host(world_size: int) -> bool:
    """Whether the launcher says so."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)


def _own_device() -> torch.device:
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _own_store() -> Any:
    """A new connection to the store of the default group, with keys of this watch alone."""
    group: Any = dist.group.WORLD
    _num_watches.append(None)
    prefix = f"shardhet_watch_{len(_num_watches)}"
    return distributed_c10d.PrefixStore(prefix, group.get_group_store().clone())


_num_watches: list[None] = []  # as many on every rank


def _show(verdict: Verdict) -> None:
    _say(verdict.panel())


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        screen = progress.screen or sys.stderr
        screen.write(text)
        screen.flush()
