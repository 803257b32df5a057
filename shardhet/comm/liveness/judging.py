"""Decides from the signs of all ranks whether the run must end, and which rank is the cause.

Pure: ``judge`` is a function of signs, which the watch gathers.

[Note: Who may be accused]
A rank judges only while its own training thread waits for other ranks and has made no progress
for the whole patience; as long as nobody waits in vain, nobody is accused.  Then, in this
order:

    silent    no sign for the patience: gone, stopped, or cut off from the network
    still     signs, but no progress for the patience, and it waits for nobody
    left      its program has ended without a failure while others wait for it
    mutual    all ranks wait for each other, for twice the patience

The patience is shorter while the observer waits in a call that all ranks make right after
another, as checkpoint.save: the limit of that call.

Before its first step has ended a rank has ``LONG_FACTOR`` times as long, unless its process is
stopped: that is no start-up.

A rank that makes progress, compiles, is in a declared phase or in a debugger is at work.  While
one rank is at work, ranks that wait are right to wait, whatever the time.  Times are counted by
each observer for itself, so that clocks need not agree.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from shardhet.comm.liveness.sign import ProcessState, Sign

LONG_FACTOR = 10.0  # more patience with a rank that is expected to take long
MUTUAL_FACTOR = 2.0
# Connections of gloo to a process that has ended break much sooner.  NCCL's do not.
SECONDS_FOR_THE_GONE = 10.0
SECONDS_FOR_THE_GONE_OF_NCCL = 2.0
SILENCE_OF_THE_GONE_S = 1.0  # two signs
MAX_NAMED = 8  # ranks that a message names one by one
PANEL_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often a watch looks, and how soon it acts; in seconds."""

    interval_s: float = 0.5  # between two looks
    read_after_s: float = 1.0  # of waiting; before that nobody needs the signs of others
    between_reads_s: float = 20.0  # while all is well, so that every rank knows all others
    tells_after_s: float = 20.0  # of standing still
    grace_s: float = 5.0  # for a training thread to notice that its connections are broken


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPeer:
    """A peer as one observer sees it."""

    sign: Sign  # the last
    silent_s: float  # time that the observer has watched in vain for another one
    process: ProcessState = ProcessState.UNKNOWN


class Fault(Enum):
    """What is wrong with a rank."""

    SILENT = "silent"
    STILL = "still"
    LEFT = "left"
    MUTUAL = "mutual"
    STORE = "store"  # nothing comes from the rendezvous store any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why the run ends."""

    fault: Fault
    culprits: tuple[int, ...]  # ranks; none if all wait for each other
    text: str  # the message, without stacks
    place: str = "unknown"  # file:line where the first culprit was last
    name: str = ""  # of the first culprit, with its device
    stack: str = ""  # of the first culprit, where it could be had

    def to_json(self) -> str:
        """The verdict as text."""
        return json.dumps({**asdict(self), "fault": self.fault.value})

    @classmethod
    def from_json(cls, text: str) -> "Verdict":
        """The inverse of ``to_json``."""
        values = json.loads(text)
        values |= {"culprits": tuple(values["culprits"]), "fault": Fault(values["fault"])}
        return cls(**values)

    def panel(self) -> str:
        """The verdict in a frame, with the stack of the rank that stands still."""
        parts = self.text.splitlines()
        lines = [line for part in parts for line in textwrap.wrap(part, PANEL_WIDTH) or [""]]
        if self.stack:
            when = "is" if self.fault is Fault.STILL else "was, at its last sign of life,"
            lines += ["", f"{self.name} {when} at", *self.stack.splitlines()]
        width = max(PANEL_WIDTH, *(len(line) for line in lines))
        top = f"+{' a rank stands still '.center(width + 2, '-')}+"
        rows = [f"| {line.ljust(width)} |" for line in lines]
        return "\n".join([top, *rows, f"+{'-' * (width + 2)}+\n"])


def judge(
    own: Sign, seen: Mapping[int, SeenPeer], *, gone_s: float = SECONDS_FOR_THE_GONE
) -> Verdict | None:
    """The verdict of the rank whose sign is ``own`` on the others; None while all is well.

    ``gone_s``: how long it waits before it names a process that has ended.
    See [Note: Who may be accused].
    """
    # A step ends on all ranks or on none, so the observer's own count of steps is enough.
    least_s = max([own.patience_s, *(each.sign.patience_s for each in seen.values())])
    patience_s = least_s * (1.0 if own.num_steps else LONG_FACTOR)
    if own.limit_s is not None:
        patience_s = min(patience_s, own.limit_s)
    if not own.is_waiting:
        return None
    gone = [
        each
        for each in seen.values()
        if each.process is ProcessState.GONE
        and not each.sign.has_left
        # Its last sign, which may say that it leaves, has been read; and no more come, as
        # they would from a process whose number belongs to another container.
        and each.silent_s >= SILENCE_OF_THE_GONE_S
    ]
    if gone and own.still_s >= min(gone_s, patience_s):
        return _silent(gone, own)
    stopped = [each for each in seen.values() if each.process is ProcessState.STOPPED]
    silent = [each for each in stopped if _is_silent(each, least_s)]
    if silent and own.still_s >= least_s:
        return _silent(silent, own)
    if own.still_s < patience_s:
        return None
    silent = [each for each in seen.values() if _is_silent(each, patience_s)]
    if silent:
        return _silent(silent, own)
    alive = [each for each in seen.values() if not each.sign.has_left]
    still = [each for each in alive if _is_still(each.sign, patience_s)]
    if still:
        furthest_behind = min(each.sign.num_steps for each in still)
        return _still([e for e in still if e.sign.num_steps == furthest_behind], own)
    if any(
        not each.sign.is_waiting or each.sign.is_long or each.sign.still_s < patience_s
        for each in alive
    ):
        return None
    left = [each for each in seen.values() if each.sign.has_left]
    if left:
        return _left(left, own)
    signs = [own, *(each.sign for each in alive)]
    if min(sign.still_s for sign in signs) < MUTUAL_FACTOR * patience_s:
        return None
    return _mutual(signs)


def judge_store(
    own: Sign, silent_s: float, holder: str, holder_rank: int | None
) -> Verdict | None:
    """The verdict on the rendezvous store, from which nothing has come for ``silent_s``."""
    patience_s = own.patience_s * (1.0 if own.num_steps else LONG_FACTOR)
    if not own.is_waiting or min(own.still_s, silent_s) < patience_s:
        return None
    text = (
        f"{holder}, which holds the rendezvous store, or the network to it stands still: "
        f"nothing has come from there for {silent_s:.0f} s, while {own.name} waits in "
        f"{own.doing} (step {own.step + 1}). See whether that process is stopped or gone."
    )
    culprits = () if holder_rank is None else (holder_rank,)
    return Verdict(fault=Fault.STORE, culprits=culprits, text=text, name=holder)


def standstill(own: Sign, seen: Mapping[int, SeenPeer]) -> str:
    """One line on a rank that stands still for a while: who waits for whom, and where."""
    begin = f"{own.name} has made no progress for {own.still_s:.0f} s in {_whereabouts(own)}"
    if not own.is_waiting:
        return f"{begin}; others may wait for it."
    there = [each for each in seen.values() if not each.sign.has_left]
    causes = [each for each in there if not each.sign.is_waiting or each.silent_s]
    if not causes:
        return f"{begin}: it waits, and so do all others."
    causes.sort(key=lambda each: -each.silent_s)
    named = "; ".join(_as_cause(each) for each in causes[:MAX_NAMED])
    return f"{begin}: it waits for others. {named}."


def _as_cause(each: SeenPeer) -> str:
    where = f"{each.sign.name} is in {_whereabouts(each.sign)}"
    if not each.silent_s:
        return where
    why = _STATES.get(each.process, "")
    return f"{where}, and silent for {each.silent_s:.0f} s" + (f": {why}" if why else "")


def has_ended(sign: Sign, process: ProcessState) -> bool:
    """Whether a rank has failed, or its ``process`` is gone without a word."""
    return sign.failure is not None or (process is ProcessState.GONE and not sign.has_left)


_STATES = {
    ProcessState.GONE: "its process is gone",
    ProcessState.STOPPED: "its process is stopped (SIGSTOP)",
    ProcessState.CUT: "its host does not answer (it is down, or the network to it is cut)",
    ProcessState.RUNNING: "its process exists but does not get to run Python code",
}


def _is_silent(each: SeenPeer, patience_s: float) -> bool:
    if each.sign.has_left or each.process is ProcessState.TRACED:
        return False
    # Code that holds the interpreter's lock for long, as reading a large file may, also keeps
    # the rank from giving signs.  Its host answers all the same.
    without_excuse = (ProcessState.STOPPED, ProcessState.CUT)
    is_excused = each.sign.is_long and each.process not in without_excuse
    return each.silent_s >= patience_s * (LONG_FACTOR if is_excused else 1.0)


def _is_still(sign: Sign, patience_s: float) -> bool:
    limit_s = patience_s * (LONG_FACTOR if sign.is_long else 1.0)
    return not sign.is_waiting and not sign.is_debugged and sign.still_s >= limit_s


def _silent(silent: Sequence[SeenPeer], own: Sign) -> Verdict:
    first = silent[0]
    unknown = "its process is gone or stopped, or the network to it is cut"
    why = _STATES.get(first.process, unknown)
    sign = first.sign
    verb = "have" if len(silent) > 1 else "has"
    text = (
        f"{_names([each.sign for each in silent])} {verb} given no sign of life for "
        f"{first.silent_s:.0f} s: {why}. It was last in {_whereabouts(sign)}. "
        f"{own.name} has waited in {own.doing} for {own.still_s:.0f} s. Look at the log there."
    )
    return _verdict(Fault.SILENT, [each.sign for each in silent], text)


def _still(still: Sequence[SeenPeer], own: Sign) -> Verdict:
    signs = [each.sign for each in still]
    sign = signs[0]
    verb = "stand" if len(signs) > 1 else "stands"
    text = (
        f"{_names(signs)} {verb} still: alive, but for {sign.still_s:.0f} s without progress "
        f"in {_whereabouts(sign)}. It waits for no other rank, and {own.name} has waited for "
        f"it in {own.doing} for {own.still_s:.0f} s. If that may take so long, raise "
        "hang_timeout_s, or declare it: with shardhet.phase(...)."
    )
    return _verdict(Fault.STILL, signs, text)


def _left(left: Sequence[SeenPeer], own: Sign) -> Verdict:
    signs = [each.sign for each in left]
    text = (
        f"{_names(signs)} ended without a failure while {own.name} waits in "
        f"{_whereabouts(own)}. Make the same collective calls on every rank."
    )
    return _verdict(Fault.LEFT, signs, text)


def _mutual(signs: Sequence[Sign]) -> Verdict:
    ordered = sorted(signs, key=lambda sign: sign.rank)[:MAX_NAMED]
    lines = [f"  {sign.name}: {_whereabouts(sign)}" for sign in ordered]
    text = "\n".join(
        [
            f"all ranks have waited for each other for {signs[0].still_s:.0f} s. Either they "
            "are in different calls, or the network or a device stands still:",
            *lines,
        ]
    )
    return Verdict(fault=Fault.MUTUAL, culprits=(), text=text, name="all ranks")


def _verdict(fault: Fault, signs: Sequence[Sign], text: str) -> Verdict:
    return Verdict(
        fault=fault,
        culprits=tuple(sign.rank for sign in signs),
        text=text,
        place=signs[0].place,
        name=signs[0].name,
        stack=signs[0].stack,
    )


def _names(signs: Sequence[Sign]) -> str:
    names = [sign.name for sign in signs[:MAX_NAMED]]
    more = len(signs) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _whereabouts(sign: Sign) -> str:
    return f"{sign.doing} of step {sign.step + 1}, at {sign.place}"
