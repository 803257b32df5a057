"""What torch's caching allocator reserves for a list of allocations, by the rules of
CUDACachingAllocator.cpp (torch 2.13): a pool of large and one of small blocks for each stream,
the smallest free block that is large enough, split; neighbours that are free become one.

Either segments are as large as what is first asked of them, or the one of each pool grows at
its end.  Nothing is given back to the driver.  Times and streams' order have no part in it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MIB = 2**20
LEAST = 512  # bytes of a block; all are multiples of it
SMALL = MIB  # blocks of the small pool are no larger
SMALL_SEGMENT, SEGMENT, ROUND = 2 * MIB, 20 * MIB, 2 * MIB
LARGE = 10 * MIB  # from here on a segment is as large as what is asked for


class Event(NamedTuple):
    """An allocation, or where ``nbytes`` is None the end of one."""

    key: int
    nbytes: int | None = None
    stream: int = 0


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, between its neighbours."""

    segment: int
    start: int
    nbytes: int
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """The smallest first."""
        return self.nbytes, self.segment, self.start


@dataclass(slots=True)
class Pool:
    """Blocks of one stream."""

    is_small: bool
    grows: bool
    reserved: int = 0
    _free: list[tuple[int, int, int]] = field(default_factory=list)
    _block_by_order: dict[tuple[int, int, int], Block] = field(default_factory=dict)
    _last: Block | None = None  # of the segment that grows
    _num_segments: int = 0

    def allocate(self, nbytes: int) -> Block:
        """The block that is taken."""
        block = self._found(nbytes) or (
            self._grown(nbytes) if self.grows else self._new(nbytes)
        )
        rest = block.nbytes - nbytes
        if rest >= LEAST if self.is_small or self.grows else rest > SMALL:
            other = Block(block.segment, block.start + nbytes, rest, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.nbytes = other, nbytes
            if self._last is block:
                self._last = other
            self._put(other)
        return block

    def release(self, block: Block) -> None:
        """Give a block back, as one with free neighbours."""
        if block.before is not None and block.before.is_free:
            block = self._joined(self._take(block.before), block)
        if block.after is not None and block.after.is_free:
            block = self._joined(block, self._take(block.after))
        self._put(block)

    def _joined(self, first: Block, second: Block) -> Block:
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._last is second:
            self._last = first
        return first

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free, block.order)
        self._block_by_order[block.order] = block

    def _take(self, block: Block) -> Block:
        del self._free[bisect_left(self._free, block.order)]
        del self._block_by_order[block.order]
        block.is_free = False
        return block

    def _found(self, nbytes: int) -> Block | None:
        fitting = [*self._free[(i := bisect_left(self._free, (nbytes, -1, -1))) : i + 2]]
        blocks = [self._block_by_order[each] for each in fitting]
        if len(blocks) > 1 and blocks[0] is self._last:  # it counts as endless
            blocks.pop(0)
        return self._take(blocks[0]) if blocks else None

    def _grown(self, nbytes: int) -> Block:
        page, last = SMALL_SEGMENT if self.is_small else SEGMENT, self._last
        free = self._take(last) if last is not None and last.is_free else None
        more = -(-(nbytes - (free.nbytes if free else 0)) // page) * page
        self.reserved += more
        if free is not None:
            free.nbytes += more
            return free
        self._last = Block(0, 0 if last is None else last.start + last.nbytes, more, last)
        if last is not None:
            last.after = self._last
        return self._last

    def _new(self, nbytes: int) -> Block:
        size = SMALL_SEGMENT if self.is_small else SEGMENT
        if not self.is_small and nbytes >= LARGE:
            size = -(-nbytes // ROUND) * ROUND
        self.reserved += size
        self._num_segments += 1
        return Block(self._num_segments, 0, size)


def reserved_by_stream(events: Iterable[Event], *, grows: bool) -> dict[int, int]:
    """The bytes that each stream's pools have taken from the driver in the end."""
    pools: dict[tuple[int, bool], Pool] = {}
    blocks: dict[int, tuple[Pool, Block]] = {}
    for event in events:
        if event.nbytes is None:
            pool, block = blocks.pop(event.key)
            pool.release(block)
        else:
            nbytes = max(1, -(-event.nbytes // LEAST)) * LEAST
            key = event.stream, nbytes <= SMALL
            pool = pools.setdefault(key, Pool(is_small=key[1], grows=grows))
            blocks[event.key] = pool, pool.allocate(nbytes)
    streams = {stream for stream, _ in pools}
    return {
        each: sum(pool.reserved for (stream, _), pool in pools.items() if stream == each)
        for each in streams
    }
