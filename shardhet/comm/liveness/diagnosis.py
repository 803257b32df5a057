"""Finds from the heartbeats of all ranks whether the run must end, and which rank is at fault.

Pure: ``diagnose`` is a function of heartbeats, which the watch gathers.

[Note: Who may be accused]
A rank accuses only while its own training thread waits for other ranks and has made no progress
for the whole patience; as long as nobody waits in vain, nobody is accused.  Then, in this
order:

    gone      its process has ended: after ten seconds in place of the patience, two with NCCL
    silent    no heartbeat for the patience: stopped, or cut off from the network
    still     heartbeats, but no progress for the patience, and it waits for nobody
    left      its program has ended without a failure while others wait for it
    mutual    all ranks wait for each other, for twice the patience

The patience is shorter while the observer waits in a call that all ranks make right after
another, as checkpoint.save: the limit of that call.

Before its first step has ended a rank has ``LONG_FACTOR`` times as long, unless its process is
stopped: that is no start-up.

A rank that makes progress, compiles, may take long by its word, or is in a debugger is at work.
While one rank is at work, ranks that wait are right to wait, whatever the time.  Times are
counted by each observer for itself, so that clocks need not agree.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardhet.comm.failure import Failure, FailureKind, ProcessState
from shardhet.comm.liveness.heartbeat import Heartbeat

LONG_FACTOR = 10.0  # more patience with a rank that is expected to take long
MUTUAL_FACTOR = 2.0
# Connections of gloo to a process that has ended break much sooner.  NCCL's do not.
SECONDS_FOR_THE_GONE = 10.0
SECONDS_FOR_THE_GONE_OF_NCCL = 2.0
SILENCE_OF_THE_GONE_S = 1.0  # two heartbeats
MAX_NAMED = 8  # ranks that a message names one by one
PANEL_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPeer:
    """A peer as one observer sees it."""

    last: Heartbeat
    silent_s: float = 0.0  # time that the observer has watched in vain for another one
    process: ProcessState = ProcessState.UNKNOWN

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended without having left the run."""
        return self.process is ProcessState.GONE and not self.last.has_left


def panel(failure: Failure) -> str:
    """The failure in a frame, with the stack of the rank that stands still."""
    parts = failure.what.splitlines()
    lines = [line for part in parts for line in textwrap.wrap(part, PANEL_WIDTH) or [""]]
    if failure.stack:
        when = "is" if failure.kind is FailureKind.HUNG else "was, at its last sign of life,"
        lines += ["", f"{failure.name} {when} at", *failure.stack.splitlines()]
    width = max(PANEL_WIDTH, *(len(line) for line in lines))
    top = f"+{' a rank stands still '.center(width + 2, '-')}+"
    rows = [f"| {line.ljust(width)} |" for line in lines]
    return "\n".join([top, *rows, f"+{'-' * (width + 2)}+\n"])


def diagnose(
    own: Heartbeat, seen: Mapping[int, SeenPeer], *, gone_s: float = SECONDS_FOR_THE_GONE
) -> Failure | None:
    """Which others are at fault, as the rank whose heartbeat is ``own`` sees it; None: nobody.

    ``gone_s``: how long it waits before it names a process that has ended.
    See [Note: Who may be accused].
    """
    if not own.is_waiting:
        return None
    peers = list(seen.values())
    # A step ends on all ranks or on none, so the observer's own count of steps is enough.
    min_s = max([own.timeout_s, *(each.last.timeout_s for each in peers)])
    timeout_s = min_s * (1.0 if own.num_steps else LONG_FACTOR)
    if own.limit_s is not None:
        timeout_s = min(timeout_s, own.limit_s)
    # Of one that is gone the last heartbeat, which may say that it leaves, has been read; and
    # no more come, as they would from a process whose number belongs to another container.
    gone = [e for e in peers if e.is_gone and e.silent_s >= SILENCE_OF_THE_GONE_S]
    if gone and own.stalled_s >= min(gone_s, timeout_s):
        return _silent(gone, own)
    stopped = [each for each in peers if each.process is ProcessState.STOPPED]
    silent = [each for each in stopped if _is_silent(each, min_s)]
    if silent and own.stalled_s >= min_s:
        return _silent(silent, own)
    if own.stalled_s < timeout_s:
        return None
    silent = [each for each in peers if _is_silent(each, timeout_s)]
    if silent:
        return _silent(silent, own)
    alive = [each.last for each in peers if not each.last.has_left]
    still = [beat for beat in alive if _is_still(beat, timeout_s)]
    if still:
        furthest_behind = min(beat.num_steps for beat in still)
        return _still([beat for beat in still if beat.num_steps == furthest_behind], own)
    if any(not e.is_waiting or e.is_long or e.stalled_s < timeout_s for e in alive):
        return None
    left = [each.last for each in peers if each.last.has_left]
    if left:
        text = (
            f"{_names(left)} ended without a failure while {own.name} waits in "
            f"{_whereabouts(own)}. Make the same collective calls on every rank."
        )
        return _failure(FailureKind.GONE, left, text)
    if min(beat.stalled_s for beat in (own, *alive)) < MUTUAL_FACTOR * timeout_s:
        return None
    ordered = sorted((own, *alive), key=lambda beat: beat.rank)[:MAX_NAMED]
    text = (
        f"all ranks have waited for each other for {own.stalled_s:.0f} s. Either they are in "
        "different calls, or the network or a device stands still:"
    )
    lines = [text, *(f"  {beat.name}: {_whereabouts(beat)}" for beat in ordered)]
    return Failure(kind=FailureKind.HUNG, ranks=(), name="all ranks", what="\n".join(lines))


def diagnose_store(
    own: Heartbeat, silent_s: float, holder: str, holder_rank: int | None
) -> Failure | None:
    """The failure of the rendezvous store, from which nothing has come for ``silent_s``."""
    timeout_s = own.timeout_s * (1.0 if own.num_steps else LONG_FACTOR)
    if not own.is_waiting or min(own.stalled_s, silent_s) < timeout_s:
        return None
    text = (
        f"{holder}, which holds the rendezvous store, or the network to it stands still: "
        f"nothing has come from there for {silent_s:.0f} s, while {own.name} waits in "
        f"{own.doing} (step {own.step + 1}). See whether that process is stopped or gone."
    )
    ranks = () if holder_rank is None else (holder_rank,)
    return Failure(kind=FailureKind.SILENT, ranks=ranks, name=holder, what=text)


def standstill(own: Heartbeat, seen: Mapping[int, SeenPeer]) -> str:
    """One line on a rank that stands still for a while: who waits for whom, and where."""
    begin = f"{own.name} has made no progress for {own.stalled_s:.0f} s in {_whereabouts(own)}"
    if not own.is_waiting:
        return f"{begin}; others may wait for it."
    there = [each for each in seen.values() if not each.last.has_left]
    causes = [each for each in there if not each.last.is_waiting or each.silent_s]
    if not causes:
        return f"{begin}: it waits, and so do all others."
    causes.sort(key=lambda each: -each.silent_s)
    named = "; ".join(_as_cause(each) for each in causes[:MAX_NAMED])
    return f"{begin}: it waits for others. {named}."


def _as_cause(each: SeenPeer) -> str:
    where = f"{each.last.name} is in {_whereabouts(each.last)}"
    if not each.silent_s:
        return where
    why = _STATES.get(each.process, "")
    return f"{where}, and silent for {each.silent_s:.0f} s" + (f": {why}" if why else "")


_STATES = {
    ProcessState.GONE: "its process is gone",
    ProcessState.STOPPED: "its process is stopped (SIGSTOP)",
    ProcessState.CUT: "its host does not answer (it is down, or the network to it is cut)",
    ProcessState.RUNNING: "its process exists but does not get to run Python code",
}


def _is_silent(each: SeenPeer, timeout_s: float) -> bool:
    if each.last.has_left or each.process is ProcessState.TRACED:
        return False
    # Code that holds the interpreter's lock for long, as reading a large file may, also keeps
    # the rank from sending heartbeats.  Its host answers all the same.
    without_excuse = (ProcessState.STOPPED, ProcessState.CUT)
    is_excused = each.last.is_long and each.process not in without_excuse
    return each.silent_s >= timeout_s * (LONG_FACTOR if is_excused else 1.0)


def _is_still(beat: Heartbeat, timeout_s: float) -> bool:
    limit_s = timeout_s * (LONG_FACTOR if beat.is_long else 1.0)
    return not beat.is_waiting and not beat.is_debugged and beat.stalled_s >= limit_s


def _silent(silent: Sequence[SeenPeer], own: Heartbeat) -> Failure:
    first, beats = silent[0], [each.last for each in silent]
    unknown = "its process is gone or stopped, or the network to it is cut"
    text = (
        f"{_names(beats)} {'have' if len(beats) > 1 else 'has'} given no sign of life for "
        f"{first.silent_s:.0f} s: {_STATES.get(first.process, unknown)}. It was last in "
        f"{_whereabouts(first.last)}. {own.name} has waited in {own.doing} for "
        f"{own.stalled_s:.0f} s. Look at the log there."
    )
    return _failure(FailureKind.GONE if first.is_gone else FailureKind.SILENT, beats, text)


def _still(still: Sequence[Heartbeat], own: Heartbeat) -> Failure:
    verb = "stand" if len(still) > 1 else "stands"
    text = (
        f"{_names(still)} {verb} still: alive, but for {still[0].stalled_s:.0f} s without "
        f"progress in {_whereabouts(still[0])}. It waits for no other rank, and {own.name} has "
        f"waited for it in {own.doing} for {own.stalled_s:.0f} s. If that may take so long, "
        "raise hang_timeout_s, or declare it: with shardhet.may_take_long(...)."
    )
    return _failure(FailureKind.HUNG, still, text)


def _failure(kind: FailureKind, beats: Sequence[Heartbeat], text: str) -> Failure:
    first, ranks = beats[0], tuple(beat.rank for beat in beats)
    return Failure(
        kind=kind,
        ranks=ranks,
        name=first.name,
        what=text,
        doing=first.doing,
        where=first.where,
        stack=first.stack,
        step=first.step,
    )


def _names(beats: Sequence[Heartbeat]) -> str:
    names = [beat.name for beat in beats[:MAX_NAMED]]
    more = len(beats) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _whereabouts(beat: Heartbeat) -> str:
    return f"{beat.doing} of step {beat.step + 1}, at {beat.where}"
