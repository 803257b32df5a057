"""A process group in plan order: its ranks exchange values and agree on them.

Before each wait for others, and at each turn of a step, the thread that trains records what it
does in ``progress``: a few attributes, and no lock.  Other threads may read it at any time.  A
thread that watches the process (``shardhet.comm.liveness``) compares the counters of two
moments: if none has changed, the process has made no progress in between.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread, get_ident
from typing import Any, Self, TextIO
from weakref import ref
from zlib import crc32

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.failure import Failure, failing_as_peers


@dataclass(slots=True)
class RankProgress:
    """The progress of one process; every counter only grows."""

    doing: str = "starting"
    num_marks: int = 0  # changes of ``doing``
    num_collectives: int = 0  # those that no process group counts
    num_steps: int = 0  # finished by this process
    step: int = 0  # that of the model at the end of the last one
    stage: int | None = None  # of a pipeline that this process is part of
    thread_id: int = 0  # of the thread that made the last mark
    slow_sections: tuple[str, ...] = ()  # declared by ``may_take_long``, the innermost last
    # The limit of the call in which this process waits for all ranks, if it has one.
    limit_s: float | None = None
    is_watched: bool = False  # a thread ends this process if a rank does not come
    # What the plan was predicted to need on this rank's device; None if nobody has.
    predicted_bytes: int | None = None
    model: str = ""  # the newest: the name of its group, alike on its ranks
    # The failure, of this rank or another, with which the watch ends the run: the message of
    # every error that this process raises because it has lost its peers.
    failure: Failure | None = None
    # Where the user looks, if what this process prints is written to a file.
    screen: TextIO | None = None

    def mark(self, doing: str) -> None:
        """Record that this thread begins to do something else."""
        self.doing = doing
        self.num_marks += 1
        self.thread_id = get_ident()

    def end_step(self, step: int) -> None:
        """Record the end of a step, the model's ``step``-th."""
        self.step = step
        self.num_steps += 1


progress = RankProgress()


@contextmanager
def may_take_long(name: str) -> Iterator[None]:
    """Declare that the code inside may take long on this rank while other ranks wait for it.

    Until it ends, the watch over ranks has ten times its usual patience with this rank.

        with may_take_long("evaluating on rank 0"):
            ...
    """
    before, doing = progress.slow_sections, progress.doing
    progress.slow_sections = (*before, name)
    progress.mark(name)
    try:
        yield
    finally:
        progress.slow_sections = before
        progress.mark(doing)


# The limit for a call that all ranks make right after another collective call, but that is
# often made on rank zero alone by mistake.  A watch over ranks gives ten times as long to a
# rank that may take long.
SECONDS_FOR_ALL_TO_COME = 30.0
MOST_VALUES = 5  # of one rank that enters a call


def join(thread: Thread) -> None:
    """Wait for a thread of this process that exchanges with other ranks.

    The watch over ranks sees by this function that the caller waits for others.
    """
    thread.join()


# All records that keep process groups alive (see groups.py).
holders: list["ref[Any]"] = []


@dataclass(frozen=True, slots=True, eq=False)
class Communicator:
    """A group for the collectives of positions that compute, and who carries whose rows.

    A position that only stores hands its rows to a *relay*, a computing one of its node if
    there is one, which takes part for it; in two levels every node has a relay for each
    position, and a group of its own.
    """

    positions: tuple[int, ...]  # that compute, on all nodes
    relays_by_position: tuple[tuple[int, ...], ...]  # itself for one that computes
    root_by_position: Mapping[int, int]  # of those in ``group`` here: the rank within it
    group: dist.ProcessGroup | None  # None on a rank outside of it, or that is alone in it

    def root(self, owner: int) -> int:
        """The rank within ``group`` that carries the rows of ``owner`` there."""
        return next(
            self.root_by_position[i]
            for i in self.relays_by_position[owner]
            if i in self.root_by_position
        )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Channel:
    """A process group in plan order: rank ``rank_by_position[i]`` takes position ``i``.

    ``group`` is None if there is only one process.
    """

    group: dist.ProcessGroup | None
    rank_by_position: tuple[int, ...]  # ranks within ``group``
    position: int  # of this process
    transport: Any = None  # a ``calls.Transport`` that carries the traffic, not ``group``
    computing: Communicator | None = None  # with NCCL, if others only store
    levels: Communicator | None = None  # of collectives in two levels

    def __post_init__(self) -> None:
        holders.append(ref(self, holders.remove))

    @classmethod
    def of_world(cls) -> Self:
        """Return a channel over the default group in rank order; it needs no plan."""
        assert dist.group.WORLD is not None, "init_process_group comes first"
        ranks = tuple(range(dist.get_world_size()))
        return cls(dist.group.WORLD, ranks, dist.get_rank())

    @property
    def world_size(self) -> int:
        """The number of processes in the channel."""
        return len(self.rank_by_position)

    def ranks_among(self, positions: Iterable[int]) -> dict[int, int]:
        """The rank of each position in a group of them, whose ranks are in ascending order."""
        ascending = sorted(positions, key=self.rank_by_position.__getitem__)
        return {position: rank for rank, position in enumerate(ascending)}

    def exchange(
        self, values: Sequence[float], within_s: float | None = None
    ) -> list[list[float]]:
        """Return every process's ``values``, by position.  Blocks until all have called it.

        The values travel over the host (gloo), so no accelerator waits for them.  Raises
        ``TimeoutError`` if they do not arrive ``within_s`` (None: the group's timeout).
        """
        if self.transport is not None:
            by_rank: list[list[float]] = self.transport.exchange(values, within_s)
            return [by_rank[rank] for rank in self.rank_by_position]
        row = torch.tensor(values, dtype=torch.float64)
        rows: list[list[float]] = self.gather_rows(row, within_s).tolist()
        return rows

    def enter(
        self, call: str, values: Sequence[float] = (), *, within_s: float | None = None
    ) -> list[list[float]]:
        """Return every process's ``values``, of which it has at most ``MOST_VALUES``, once all
        have entered ``call``.

        Raises ``RuntimeError`` on every process if they have entered different calls, and
        ``TimeoutError`` if some do not arrive ``within_s``.  If a watch over ranks is running,
        the limit is that of the watch, which knows who has not come and whether it is at work.
        """
        assert len(values) <= MOST_VALUES, call  # all calls exchange equally many
        row = [float(crc32(call.encode())), *values, *[0.0] * (MOST_VALUES - len(values))]
        limit_s = None if progress.is_watched else within_s
        try:
            progress.limit_s = within_s
            rows = self.exchange(row, limit_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{call}: not all ranks have called it, and this one has waited "
                f"({error}). It is a call that all ranks make together: make it on every "
                "rank, outside of `if rank == 0`."
            ) from error
        finally:
            progress.limit_s = None
        if any(row[0] != rows[0][0] for row in rows):  # which all ranks see, and so exchange
            raise RuntimeError(
                f"ranks are in different calls: {self.exchange_objects(call)} in plan order. "
                "Each of these is a call that all ranks make together; make them in the same "
                "order on every rank."
            )
        return [row[1 : 1 + len(values)] for row in rows]

    def gather_rows(self, row: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        """Return every process's ``row``, [n], stacked by position: [world_size, n]."""
        if self.group is None:
            return row[None]
        if self.transport is not None and devices.is_on_host(row):
            rows = self.transport.exchange(row.tolist(), within_s)
            ordered = [rows[rank] for rank in self.rank_by_position]
            return torch.tensor(ordered, dtype=row.dtype)
        gathered = [torch.empty_like(row) for _ in self.rank_by_position]
        started_at_s = time.monotonic()
        with failing_as_peers():
            if within_s is None:
                dist.all_gather(gathered, row, group=self.group)
            else:
                gather = dist.all_gather(gathered, row, group=self.group, async_op=True)
                try:
                    gather.wait(timedelta(seconds=within_s))
                except RuntimeError as error:
                    if time.monotonic() - started_at_s >= within_s:
                        raise TimeoutError(f"for {within_s:g} s") from error
                    raise
        return torch.stack([gathered[rank] for rank in self.rank_by_position])

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return every process's ``value`` (anything picklable), by position."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        with failing_as_peers():
            dist.all_gather_object(gathered, value, group=self.group)
        return [gathered[rank] for rank in self.rank_by_position]


def check_same_on_all_ranks(
    value: Any, *, what: str, channel: Channel, advice: str = "Give every rank the same {}."
) -> None:
    """Raise ``ValueError`` on every rank unless ``value`` (JSON) is equal on all of them.

    The message names the ranks that differ from the majority and shows the first difference.
    """
    values = [json.dumps(each, sort_keys=True) for each in channel.exchange_objects(value)]
    usual = max(values, key=values.count)  # the first of several that are equally frequent
    odd = [i for i, each in enumerate(values) if each != usual]
    if odd:
        ranks = [channel.rank_by_position[i] for i in odd]
        shown = _first_difference(json.loads(usual), json.loads(values[odd[0]]))
        raise ValueError(
            f"{what}: not the same on all ranks. Ranks {ranks} have {shown[1]} where the "
            f"others have {shown[0]}. {advice.format(what)}"
        )


def _first_difference(a: Any, b: Any, context: int = 60) -> tuple[str, str]:
    """Where two values of JSON differ: the innermost names there, and a part of the texts."""
    name = ""
    while isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        key = next(key for key in a if a[key] != b[key])
        name, a, b = f"{key}: ", a[key], b[key]
    a, b = (each if isinstance(each, str) else json.dumps(each) for each in (a, b))
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    start = max(0, start - context // 2)
    return name + a[start : start + context], name + b[start : start + context]
