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
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardhet.comm import devices
from shardhet.comm.failure import MEND
from shardhet.comm.liveness.ending import GRACE_S, Ending
from shardhet.comm.liveness.judging import (
    SECONDS_FOR_THE_GONE,
    SECONDS_FOR_THE_GONE_OF_NCCL,
    SeenPeer,
    Verdict,
    has_ended,
    judge,
    judge_store,
    standstill,
)
from shardhet.comm.liveness.mailbox import Mailbox
from shardhet.comm.liveness.orphans import end_with_launcher
from shardhet.comm.liveness.pace import Pace
from shardhet.comm.liveness.panel import panel, verdict_from_json, verdict_to_json
from shardhet.comm.liveness.sign import ProcessState, Sign, no_sign
from shardhet.comm.liveness.stacks import posture, stack
from shardhet.comm.members import local_device_spec
from shardhet.comm.peers import LostPeerError
from shardhet.comm.progress import progress

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 60.0
TELLS_AFTER_S = 20.0  # of standing still
INTERVAL_S = 0.5
READ_AFTER_S = 1.0  # of waiting; before that nobody needs to know what the others do
SECONDS_BETWEEN_READS = 20.0  # while all is well, so that every rank knows all others
SECONDS_TO_LEAVE = 2.0


def watch_ranks(
    *,
    hang_timeout_s: float | None = HANG_TIMEOUT_S,
    device: torch.device | str | None = None,
    on_verdict: Callable[[Verdict], None] | None = None,
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
    ``with phase("evaluating")``; never at a prompt of a debugger.  After 20 s without progress
    a line says who waits for whom.  None or 0 switches the watch off.  A rank that torchrun or
    ``shardhet train`` has started also ends if that process is gone, with or without a watch.

    Args:
        hang_timeout_s: the least time without progress, in seconds.
        device: by which this rank is described; None: that of the process.
        on_verdict: called with the verdict instead of showing it, on one rank.

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
    watch = Watch(hang_timeout_s or 0.0, torch.device(device or _own_device()), on_verdict)
    if hang_timeout_s and dist.is_initialized() and dist.get_world_size() > 1:
        try:
            watch.start()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            # A store that gives no second connection, or another version of torch.
            logger.warning("nobody watches over the ranks of this run: %r", error)
    return watch


def watch_unless_decided(world_size: int, device: torch.device) -> None:
    """``watch_ranks`` with its defaults, for a model that is on all ranks, unless the program
    has called it.
    """
    if not _is_decided and dist.is_initialized() and world_size == dist.get_world_size():
        watch_ranks(device=device)
        _is_decided.clear()


class _Standing(NamedTuple):
    """What changes when this process makes progress."""

    num_marks: int
    num_steps: int
    num_collectives: int
    phases: tuple[str, ...]


class Watch:
    """The watch of this rank over all ranks."""

    def __init__(
        self,
        hang_timeout_s: float,
        device: torch.device,
        on_verdict: Callable[[Verdict], None] | None,
    ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._on_verdict = on_verdict or _show
        self._device = device
        self._thread_id = threading.get_ident()
        self._wakes = threading.Event()
        self._is_stopping = False
        # Of this rank
        self._standing = _Standing(0, 0, 0, ())
        self._pace, self._still_s = Pace(), 0.0
        self._has_told = False  # of its present standstill
        self._own: Sign | None = None
        self._num_beats = 0
        # Of the others
        self._seen: dict[int, SeenPeer] = {}
        self._a_peer_has_ended = False
        self._since_read_s, self._store_silent_s = SECONDS_BETWEEN_READS, 0.0
        self._num_rounds = self._num_reads = 0
        self._ending: Ending | None = None
        self._verdict: Verdict | None = None

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
        self._name = f"rank {self._rank} ({local_device_spec(self._device)})"
        self._host, self._pid = socket.gethostname(), os.getpid()
        store = _own_store()
        self._holder, self._holder_rank = _holder_of(store)
        self._mailbox = Mailbox(store, self._rank, self._world_size, interval_s=INTERVAL_S)
        self._standing = self._stand()
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
        progress.is_watched = False
        atexit.unregister(self.stop)
        progress.on_failure = lambda: None
        self._is_stopping = True
        self._wakes.set()
        self._thread.join(SECONDS_TO_LEAVE)
        error = error or getattr(sys, "last_value", None)  # that the interpreter ends with
        failure = progress.failure
        heard_of_it = progress.verdict is not None or _is_of_another(error)
        if failure is None and error is not None and not heard_of_it:
            failure = f"{self._name} failed in {progress.doing}: {error!r}"
        if self._own is not None:
            last = replace(self._own, has_left=True, failure=failure)
            self._mailbox.outgoing = replace(last, beat=self._own.beat + 1).to_json()
            self._mailbox.has_news = failure is not None
        self._mailbox.stop(SECONDS_TO_LEAVE)
        if self._ending is not None:
            self._ending.join(SECONDS_TO_LEAVE)

    # The thread #

    def _run(self) -> None:
        looked_at_s = time.monotonic()
        try:
            while not self._is_stopping and dist.is_initialized():
                self._wakes.wait(INTERVAL_S)
                self._wakes.clear()
                now_s = time.monotonic()
                # Time in which this whole process was stopped does not count: others may have
                # given signs meanwhile.
                passed_s = min(now_s - looked_at_s, 2 * INTERVAL_S)
                looked_at_s = now_s
                self._look(passed_s)
                self._listen(passed_s)
                self._decide(passed_s)
        except Exception:  # the watch must never be what ends a run
            logger.exception("the watch over ranks has failed; the run goes on without it")
        finally:
            if _running in ([], [self]):  # no later watch has begun
                progress.is_watched = False  # calls keep their own limits again

    def _look(self, passed_s: float) -> None:
        """Look at this process, and post its sign."""
        found = posture(self._thread_ids)
        standing = self._stand()
        self._still_s = 0.0 if standing != self._standing else self._still_s + passed_s
        self._standing = standing
        self._pace.learn(passed_s)
        is_long = bool(progress.phases) or found.is_compiling
        patience_s = self._pace.patience_s(self._hang_timeout_s)
        self._num_beats += 1
        self._own = Sign(
            rank=self._rank,
            name=self._name,
            host=self._host,
            pid=self._pid,
            beat=self._num_beats,
            num_steps=self._pace.num_steps,
            step=progress.step,
            doing=_with_phase(progress.doing),
            is_waiting=found.is_waiting or self._device_is_busy(patience_s),
            is_long=is_long,
            is_debugged=found.is_debugged,
            still_s=self._still_s,
            patience_s=patience_s,
            limit_s=progress.limit_s,
            place=found.place,
            stack=stack(self._thread_ids) if self._still_s > READ_AFTER_S else "",
            failure=progress.failure,
        )
        self._mailbox.outgoing = self._own.to_json()
        self._mailbox.has_news |= progress.failure is not None
        if self._num_beats == 1 or self._mailbox.has_news:
            self._mailbox.wake()

    def _device_is_busy(self, patience_s: float) -> bool:
        """Whether an accelerator still has work of a process that stands still.

        Its host may be in any call that waits for the device, as ``loss.item()``, while the
        device waits in a collective for a peer.
        """
        # Not earlier: a query from another thread would disturb the capture of a graph.
        earliest_s = READ_AFTER_S if self._a_peer_has_ended else patience_s / 2
        if devices.is_on_host(self._device) or self._still_s < earliest_s:
            return False
        stream = devices.module_of(self._device).current_stream(self._device)
        try:
            return not stream.query()
        except RuntimeError:  # the device has failed, which the training thread will find out
            return False

    @property
    def _thread_ids(self) -> frozenset[int]:
        return frozenset((self._thread_id, progress.thread_id or self._thread_id))

    def _stand(self) -> _Standing:
        return _Standing(
            num_marks=progress.num_marks,
            num_steps=progress.num_steps,
            num_collectives=progress.num_collectives + _num_collectives_of_torch(),
            phases=progress.phases,
        )

    def _listen(self, passed_s: float) -> None:
        """Update what is known of the others."""
        assert self._own is not None
        mailbox = self._mailbox
        is_idle = mailbox.num_rounds == self._num_rounds
        self._store_silent_s = self._store_silent_s + passed_s if is_idle else 0.0
        self._num_rounds = mailbox.num_rounds
        self._since_read_s += passed_s
        waits = self._own.is_waiting and self._still_s >= READ_AFTER_S
        patience_s = min(self._own.patience_s, self._own.limit_s or math.inf)
        between_s = patience_s / 20 if waits else SECONDS_BETWEEN_READS
        if self._still_s >= READ_AFTER_S:
            signs = [each.sign for each in self._seen.values()]
            self._a_peer_has_ended = any(has_ended(sign, self._host) for sign in signs)
            between_s = 0.0 if self._a_peer_has_ended else between_s
        if mailbox.num_reads != self._num_reads:
            self._update_seen(mailbox.incoming)
            self._num_reads = mailbox.num_reads
            self._since_read_s = 0.0
        mailbox.reads = self._since_read_s >= between_s - INTERVAL_S

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
            is_here = sign.host == self._host
            process = ProcessState.of(sign.pid) if is_here else ProcessState.UNKNOWN
            self._seen[rank] = SeenPeer(sign=sign, silent_s=silent_s, process=process)

    def _decide(self, passed_s: float) -> None:
        assert self._own is not None
        if self._ending is not None:
            self._ending.advance(
                passed_s,
                is_waiting=self._own.is_waiting and self._still_s > 0,
                stack=stack(self._thread_ids),
            )
            return
        if self._mailbox.verdict is not None:
            self._end(verdict_from_json(self._mailbox.verdict))
            return
        store = judge_store(self._own, self._store_silent_s, self._holder, self._holder_rank)
        if store is not None:
            self._end(store)
            return
        waits_for_device = not devices.is_on_host(self._device)
        gone_s = SECONDS_FOR_THE_GONE_OF_NCCL if waits_for_device else SECONDS_FOR_THE_GONE
        verdict = judge(self._own, self._seen, gone_s=gone_s)
        self._tell_of_standstill()
        if verdict is not None:
            self._mailbox.proposal = verdict_to_json(verdict)  # the first one counts
            self._mailbox.wake()
            return
        for each in self._seen.values():
            if each.sign.failure is not None and self._own.is_waiting:
                progress.verdict = f"{each.sign.failure}\n{MEND}"
                # Over gloo the rank that has failed breaks connections itself.
                breaks_after_s = READ_AFTER_S if waits_for_device else GRACE_S
                self._ending = Ending(
                    progress.verdict, is_culprit=False, breaks_after_s=breaks_after_s
                )
                return

    def _tell_of_standstill(self) -> None:
        assert self._own is not None
        if self._still_s < TELLS_AFTER_S:
            self._has_told = False
        elif not self._has_told and self._num_reads:
            self._has_told = True
            text = standstill(self._own, self._seen)
            logger.warning("%s", text)
            if self._rank == 0:  # the output of the others may go to files
                with suppress(OSError, ValueError):
                    sys.stderr.write(f"{text}\n")
                    sys.stderr.flush()

    def _end(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._kill_stopped(verdict)
        is_culprit = self._rank in verdict.culprits
        reporters = [rank for rank in range(self._world_size) if rank not in verdict.culprits]
        if reporters and reporters[0] == self._rank:
            with suppress(OSError, ValueError):
                self._on_verdict(verdict)
        logger.info("%s", verdict.text)
        progress.verdict = f"{verdict.text}\nAll ranks stop."
        self._ending = Ending(progress.verdict, is_culprit=is_culprit, breaks_after_s=0.0)

    def _kill_stopped(self, verdict: Verdict) -> None:
        """End culprits of this host that are stopped: no other signal would reach them."""
        for rank in verdict.culprits:
            sign = self._seen[rank].sign if rank in self._seen else None
            if sign is None or sign.host != self._host:
                continue
            if ProcessState.of(sign.pid) is ProcessState.STOPPED:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(sign.pid, signal.SIGKILL)


_running: list[Watch] = []  # at most one
_is_decided: list[None] = []  # not empty once the program itself has called watch_ranks


def _is_of_another(error: BaseException | None) -> bool:
    """Whether a rank ends with ``error`` because another one has."""
    return error is not None and isinstance(error.__cause__, LostPeerError)


def _own_device() -> torch.device:
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _with_phase(doing: str) -> str:
    phases = [name for name in progress.phases if name != doing]
    return f"{doing} ({', '.join(phases)})" if phases else doing


def _num_collectives_of_torch() -> int:
    """The number of collectives and messages that this process has launched."""
    total = 0
    groups: tuple[Any, ...] = tuple(distributed_c10d._world.pg_map)
    for group in groups:
        with suppress(RuntimeError):  # of a backend that does not count
            total += group._get_sequence_number_for_group()
    return total


def _own_store() -> Any:
    """A new connection to the store of the default group, with keys of this watch alone."""
    group: Any = dist.group.WORLD
    _num_watches.append(None)
    prefix = f"shardhet_watch_{len(_num_watches)}"
    return distributed_c10d.PrefixStore(prefix, group.get_group_store().clone())


_num_watches: list[None] = []  # as many on every rank


def _holder_of(store: Any) -> tuple[str, int | None]:
    """What holds the store, in words, and which rank, if it is one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher on {getattr(store, 'host', 'the first host')}", None
    if "RANK" in os.environ:
        return "rank 0", 0
    return f"the process at {getattr(store, 'host', '?')}:{getattr(store, 'port', '?')}", None


def _show(verdict: Verdict) -> None:
    sys.stderr.write(panel(verdict))
    sys.stderr.flush()
