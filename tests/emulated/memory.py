"""What was done with the memory of a device, and whether the streams were in order."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.emulated.clocks import Clock, Host, Moment, Stream


class RaceError(AssertionError):
    """Two operations on the same memory, at least one a write, that nothing orders."""


class Access(NamedTuple):
    """One operation on a range of bytes of a storage."""

    start: int
    stop: int
    moment: Moment
    is_write: bool
    what: str

    def overlaps(self, other: "Access") -> bool:
        return self.start < other.stop and other.start < self.stop


@dataclass(slots=True)
class Held:
    """A storage of the device, from an allocation until it is freed."""

    nbytes: int
    pool: int  # the stream that allocated it: freed memory goes back to that stream's pool
    follows: Clock  # what is over only now and then in the pool's memory
    accesses: list[Access] = field(default_factory=list)
    is_freed: bool = False
    recorded: Stream | None = None  # that uses it too, as torch has told the allocator


class Memory:
    """All storages of a device, with a caching allocator's rules.

    Freed memory goes to the pool of the stream that allocated it, at once; the allocator knows
    nothing of other streams.  So whoever touches memory that was allocated from a pool must
    come after everything that was done with what had been freed into it ([Note: Tombstones]).
    If torch has recorded a stream, the memory is not given out again before the host has waited
    for what was queued there when it was freed.

    [Note: Tombstones]
    It is assumed that any allocation may get any memory that was freed into its pool before:
    one clock per pool is enough, and no luck with addresses hides a fault.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._tombs: defaultdict[int, Clock] = defaultdict(Clock)
        # Freed, but recorded: what the host has to wait for before they are given out again.
        self._kept: list[tuple[Clock, int]] = []
        self._held_bytes = 0
        self.peak_bytes = 0
        self._held_by_pool: Counter[int] = Counter()
        self.most_by_pool: dict[int, int] = {}  # which the allocator keeps for that stream

    @property
    def allocated_bytes(self) -> int:
        """What cannot be given out."""
        self._kept = [each for each in self._kept if self._host.clock.missing(each[0])]
        return self._held_bytes + sum(nbytes for _, nbytes in self._kept)

    def allocate(self, nbytes: int, stream: Stream) -> Held:
        held = Held(nbytes, stream.number, Clock(self._tombs[stream.number]))
        self._count(nbytes, held.pool)
        return held

    def reallocate(self, held: Held, nbytes: int, stream: Stream) -> None:
        """Give a storage that was freed new memory."""
        held.nbytes, held.pool = nbytes, stream.number
        held.follows, held.accesses = Clock(self._tombs[stream.number]), []
        held.is_freed = False
        self._count(nbytes, held.pool)

    def free(self, held: Held) -> None:
        if not held.is_freed:
            tomb = self._tombs[held.pool]
            tomb.join(held.follows)
            for access in held.accesses:
                tomb.join(Clock({access.moment.stream: access.moment.time}))
            held.is_freed, held.accesses = True, []
            self._count(-held.nbytes, held.pool)
            if held.recorded is not None:
                self._kept.append((Clock(held.recorded.clock), held.nbytes))
                held.recorded = None

    def access(self, held: Held, new: Access, clock: Clock) -> None:
        """Note what an operation does; raise ``RaceError`` if it may come too early."""
        if held.is_freed:
            raise RaceError(f"{new.what} uses memory that has been freed")
        early = clock.missing(held.follows)
        if early:
            others = ", ".join(self._host.name_by_stream[s] for s in early)
            raise RaceError(
                f"{new.what} on stream {self._name(new)} uses memory that stream {others} may "
                "still use for what was freed there"
            )
        for old in held.accesses:
            if not (old.is_write or new.is_write) or not old.overlaps(new):
                continue
            if not old.moment.is_before(clock):
                verbs = ["reads", "writes"]
                raise RaceError(
                    f"{new.what} on stream {self._name(new)} {verbs[new.is_write]} what "
                    f"{old.what} on stream {self._name(old)} {verbs[old.is_write]}, and "
                    "nothing says that it comes later"
                )
        # What the new access covers comes before it, so whoever waits for it waits for both.
        held.accesses = [old for old in held.accesses if not _is_covered(old, new)]
        held.accesses.append(new)

    def _name(self, access: Access) -> str:
        return self._host.name_by_stream[access.moment.stream]

    def _count(self, nbytes: int, pool: int) -> None:
        self._held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self._held_by_pool[pool] += nbytes
        most = self.most_by_pool.get(pool, 0)
        self.most_by_pool[pool] = max(most, self._held_by_pool[pool])


def _is_covered(old: Access, new: Access) -> bool:
    is_inside = new.start <= old.start and old.stop <= new.stop
    same = old.moment.stream == new.moment.stream and old.is_write == new.is_write
    return is_inside and (new.is_write or same)
