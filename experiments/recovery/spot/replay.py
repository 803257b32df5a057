"""A run on nodes that come and go, event by event: what is trained, lost, and waited for.

All quantities are seconds and bytes; ``work`` is in steps of the global batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardhet.records.nodes import Nodes, keepers


@dataclass(frozen=True, slots=True)
class Event:
    """Nodes that come and go at one moment."""

    at_s: float
    added: frozenset[str]
    removed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Pace:
    """What a set of nodes does: seconds of a step, and bytes of state by node.

    ``step_s`` is infinite if they cannot hold the model.
    """

    step_s: float
    bytes_by_node: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The parts of going on that do not depend on where the state is."""

    noticed_s: float  # that a node is lost; a node that comes is noticed at once
    started_s: float  # processes, imports, rendezvous, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the state is kept, and where it comes from."""

    name: str
    has_replicas: bool  # of every step; otherwise of checkpoints alone
    checkpoint_every_s: float
    link_bytes_per_s: float  # of a node
    store_bytes_per_s: float  # of the store of checkpoints, for all nodes together

    def step_s(self, pace: Pace) -> float:
        """A step, with the sending of the largest share to its keeper beside nothing else."""
        if not self.has_replicas or len(pace.bytes_by_node) < 2:
            return pace.step_s
        return pace.step_s + max(pace.bytes_by_node.values()) / self.link_bytes_per_s


@dataclass(slots=True)
class Course:
    """What became of the run."""

    work: float = 0.0  # steps that count at the end
    lost: float = 0.0  # steps taken and lost
    down_s: float = 0.0  # without a step, although the nodes could hold the model
    restarts: int = 0
    from_store: int = 0  # restarts that had to read everything from the store


@dataclass(slots=True)
class _State:
    """Of the run, between events."""

    since_checkpoint: float = 0.0  # steps
    next_checkpoint_s: float = 0.0  # of training
    holders: list[frozenset[str]] = field(default_factory=list)  # of each share
    resumes_at_s: float = 0.0
    pace: Pace = Pace(float("inf"), {})
    is_from_scratch: bool = True


def events_of(lines: Iterable[str], prefix: str = "") -> list[Event]:
    """The events of a trace: milliseconds, add or remove, node; one moment is one event."""
    by_time: dict[float, tuple[set[str], set[str]]] = {}
    for line in lines:
        if line.strip():
            at_ms, what, node = line.strip().split(",")
            added, removed = by_time.setdefault(float(at_ms) / 1000, (set(), set()))
            (added if what == "add" else removed).add(prefix + node)
    return [Event(at, frozenset(a), frozenset(r)) for at, (a, r) in sorted(by_time.items())]


def merged(traces: Sequence[Sequence[Event]], until_s: float) -> list[Event]:
    """Several traces as one, up to ``until_s``."""
    by_time: dict[float, tuple[frozenset[str], frozenset[str]]] = {}
    for event in (each for trace in traces for each in trace if each.at_s < until_s):
        added, removed = by_time.get(event.at_s, (frozenset[str](), frozenset[str]()))
        by_time[event.at_s] = (added | event.added, removed | event.removed)
    return [Event(at, a, r) for at, (a, r) in sorted(by_time.items())]


def ideal(
    events: Sequence[Event], until_s: float, paces: Mapping[frozenset[str], Pace]
) -> float:
    """Steps, if whichever nodes are there train at once and nothing is ever lost."""
    steps, nodes = 0.0, frozenset[str]()
    ends = [*(each.at_s for each in events[1:]), until_s]
    for event, end_s in zip(events, ends, strict=True):
        nodes = (nodes | event.added) - event.removed
        steps += (end_s - event.at_s) / paces[nodes].step_s
    return steps


def replay(
    events: Sequence[Event],
    until_s: float,
    paces: Mapping[frozenset[str], Pace],
    policy: Policy,
    restart: Restart,
    state_bytes: int,
) -> Course:
    """Play the events to a policy."""
    course, state, nodes = Course(), _State(), frozenset[str]()
    ends = [*(each.at_s for each in events[1:]), until_s]
    for event, end_s in zip(events, ends, strict=True):
        nodes = (nodes | event.added) - event.removed
        _interrupt(course, state, event, policy)
        state.pace = paces[nodes]
        if state.pace.step_s == float("inf"):
            state.resumes_at_s = float("inf")
            continue
        state.resumes_at_s = event.at_s + _restart_s(
            course, state, event, nodes, policy, restart, state_bytes
        )
        course.down_s += min(state.resumes_at_s, end_s) - event.at_s
        _train(course, state, nodes, end_s, policy)
    return course


def _interrupt(course: Course, state: _State, event: Event, policy: Policy) -> None:
    """Lose what is not kept anywhere else."""
    state.holders = [each - event.removed for each in state.holders]
    if not event.removed:  # a node that comes waits until the step is taken and saved
        return
    is_whole = policy.has_replicas and bool(state.holders) and all(state.holders)
    kept = max(0.0, state.since_checkpoint - 1) if is_whole else 0.0  # one is on its way
    course.lost += state.since_checkpoint - kept
    course.work -= state.since_checkpoint - kept
    state.since_checkpoint = kept
    if not is_whole:
        state.holders = []
        state.next_checkpoint_s = policy.checkpoint_every_s


def _restart_s(
    course: Course,
    state: _State,
    event: Event,
    nodes: frozenset[str],
    policy: Policy,
    restart: Restart,
    state_bytes: int,
) -> float:
    """Seconds until the next step begins."""
    course.restarts += 1
    seconds = restart.started_s + (restart.noticed_s if event.removed else 0.0)
    if state.is_from_scratch:
        return seconds
    if state.holders:
        # In the worst case a node has nothing of what it needs.
        return seconds + max(state.pace.bytes_by_node.values()) / policy.link_bytes_per_s
    course.from_store += 1
    return seconds + state_bytes / policy.store_bytes_per_s


def _train(
    course: Course, state: _State, nodes: frozenset[str], end_s: float, policy: Policy
) -> None:
    """Train until the next event."""
    seconds = end_s - state.resumes_at_s
    steps = max(0.0, seconds) / policy.step_s(state.pace)
    if steps < 1:  # the first step was not completed, and nothing was kept anew
        return
    state.is_from_scratch = False
    course.work += steps
    state.next_checkpoint_s -= seconds
    if state.next_checkpoint_s <= 0:
        since_s = -state.next_checkpoint_s % policy.checkpoint_every_s
        state.since_checkpoint = min(steps, since_s / policy.step_s(state.pace))
        state.next_checkpoint_s = policy.checkpoint_every_s - since_s
    else:
        state.since_checkpoint += steps
    if policy.has_replicas:
        names = sorted(state.pace.bytes_by_node)
        sizes = [state.pace.bytes_by_node[name] for name in names]
        found = keepers(Nodes.of(names), sizes, [2**40] * len(names))
        state.holders = [
            frozenset({names[i]} if keeper is None else {names[i], names[keeper]})
            for i, keeper in enumerate(found)
            if sizes[i]
        ]
