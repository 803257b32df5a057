"""Replicas: the newest state of a run, kept on the node that has it and on another one.

A replica is a checkpoint whose files lie apart: every node has the files of its own ranks, and
those of the ranks whose keeper it is, under FOLDER/step_00000007, besides what describes all of
them.  So the state survives the processes, and any one node.

Order of collectives of a save (all ranks, in this order; "checkpoint.save" is their name):

    0  of the replica before: its copies are complete, everywhere
    1  every rank says what it holds, and then what room its node has
    2  the first rank of every node has made the unfinished folder, and every rank has copied
       its rows to host memory; from here on training may go on

    in a thread, over a channel of its own:
    3  every rank has written its own file
    4  rank zero has described the replica to all nodes
    5  every rank sends its file to its keeper, in pieces, and writes those that it keeps
    6  every rank has all its files on disk
    7  every node has given its folder its name; the replica before is removed

A replica counts once 7 has ended on all nodes; until then the one before is there.

Memory: two versions of the files on every node, a copy of each rank's rows until its file is
written, and one piece (4 MiB) per copy on its way.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardhet.checkpoint.folder import Checkpoints, Resumed
from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import check_agree
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.loading import CALL as LOADS
from shardhet.checkpoint.loading import load_from
from shardhet.checkpoint.replicas.source import find, node_name
from shardhet.checkpoint.replicas.transfer import Copying
from shardhet.checkpoint.saving import wait_for_pending
from shardhet.checkpoint.state.held import RankState
from shardhet.checkpoint.state.job import CALL as SAVES
from shardhet.checkpoint.state.optimizer_state import Optimizers
from shardhet.checkpoint.state.ranks import Ranks, step_of
from shardhet.comm.channel import may_take_long
from shardhet.comm.devices import available_bytes
from shardhet.records.stages import Nodes, backup_positions

_IN_MEMORY = Path("/dev/shm")  # a file system that systems of Linux have


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank has to keep, and the room on its node."""

    node: str
    num_bytes: int  # of its rows
    free_bytes: int
    is_in_memory: bool  # as the copies are from which the files are written
    has_version: bool  # a complete one, which stays until the new one is complete
    is_writer: bool


class Replicas:
    """The replicas of one run.

        replicas = Replicas("/dev/shm/my_run")
        resumed = replicas.load_latest(model, optimizer)
        ...
        replicas.save(model, optimizer, extra={"scheduler": scheduler.state_dict()})

    Every method is collective over the ranks of ``model``.
    """

    def __init__(self, folder: str | Path) -> None:
        """Name a folder of each node's own, in its memory or on its disk.

        It may have another name on each node.  Ranks of one machine that name the same folder
        share a node.
        """
        self.folder = Path(folder).absolute()
        self._copying: Copying | None = None
        self.bytes_by_node: tuple[int, ...] = ()  # of the last replica, copies included

    @property
    def told(self) -> str:
        """What the last one takes on the nodes."""
        sizes = self.bytes_by_node
        if len(sizes) == 1:
            return f"two versions of {_mib(sizes[0])}; one node, whose loss takes them along"
        return (
            f"two versions of {_mib(min(sizes))} to {_mib(max(sizes))} on each of {len(sizes)} "
            "nodes"
        )

    def path_of(self, step: int) -> Path:
        """The folder of one step's files on this node."""
        return files.step_path(self.folder, step)

    @may_take_long(SAVES)
    def save(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        extra: Any = None,
        step: int | None = None,
    ) -> None:
        """Keep the state as it is now; returns once every rank has copied its own rows.

        They are written, and sent to other nodes, in a thread.  The next call waits for that,
        and ``wait`` does.  ``step`` is that of a HetFSDP itself if it is not given.  Raises
        ``CheckpointError`` on every rank if a node has no room, or if the last replica could
        not be written; the one before it is then still there.
        """
        ranks = Ranks(model)
        self.wait(model)
        wait_for_pending(model)
        ranks.meet(SAVES)
        step = step_of(model, step)
        path, held = self.path_of(step), RankState(ranks)
        holdings = ranks.agree(
            lambda: held.collect(model, optimizer, Path(path.name), extra), call=SAVES
        )
        offers = ranks.agree(lambda: self._offer(held, ranks), call=SAVES)
        nodes = Nodes.of([offer.node for offer in offers])
        backup_of = backup_positions(
            nodes, [o.num_bytes for o in offers], [o.free_bytes for o in offers]
        )

        def begin() -> None:
            check_agree(holdings)
            self.bytes_by_node = _check_room(offers, nodes, backup_of)
            if nodes.leads(ranks.position):
                files.clean(self.folder)
                files.begin(path)
            held.copy()

        ranks.agree(begin, call=SAVES)
        [writer] = [i for i, offer in enumerate(offers) if offer.is_writer]
        self._copying = Copying(
            path,
            ranks,
            held,
            held.described(holdings, writer),
            leads=nodes.leads(ranks.position),
            channel=ranks.side_channel(str(self.folder)),
            backup_of=backup_of,
            remove_others=lambda: self._remove(lambda each: each != step),
        )
        self._copying.start()

    @may_take_long(SAVES)
    def wait(self, model: nn.Module) -> None:
        """Until the last replica is complete on all nodes.

        Raises ``CheckpointError`` on every rank if a file could not be written.
        """
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.wait()

    @may_take_long(LOADS)
    def load_latest(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        checkpoints: Checkpoints | None = None,
    ) -> Resumed | None:
        """Load the newest replica that the nodes have together; None if there is none.

        Rows come from this node where it has them, else from another one.  None as well if
        ``checkpoints`` has a later step.  Replicas of later steps, which are not
        whole, are removed.  Raises ``CheckpointError`` as ``shardhet.checkpoint.load``.
        """
        ranks = Ranks(model)
        self.wait(model)
        wait_for_pending(model)
        ranks.meet(LOADS)
        channel = ranks.side_channel(str(self.folder))
        source = find(self.folder, ranks, checkpoints, channel)
        if source is None:
            return None
        extra = load_from(model, optimizer, source)
        came_from = source.told(ranks)
        path = self.path_of(source.step)
        self.forget_after(model, source.step)
        return Resumed(path=path, step=source.step, extra=extra, came_from=came_from)

    def forget_after(self, model: nn.Module, step: int) -> None:
        """Remove replicas of later steps than ``step``, on all nodes."""
        self.wait(model)
        ranks = Ranks(model)
        nodes = Nodes.of(ranks.exchange(node_name(self.folder), call=SAVES))

        def remove() -> None:
            if nodes.leads(ranks.position):
                files.clean(self.folder)
                self._remove(lambda each: each > step)

        ranks.agree(remove, call=SAVES)

    def clear(self, model: nn.Module) -> None:
        """Remove all replicas, and the folder of every node."""
        self.forget_after(model, -1)
        with suppress(OSError):  # somebody else's files, or another rank was faster
            self.folder.rmdir()

    def leave(self) -> None:
        """Remove this node's files: the others go on without it.  Not collective."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _offer(self, held: RankState, ranks: Ranks) -> Offer:
        self.folder.mkdir(parents=True, exist_ok=True)
        return Offer(
            node=node_name(self.folder),
            num_bytes=held.num_bytes,
            free_bytes=_free_bytes(self.folder),
            is_in_memory=self.folder.is_relative_to(_IN_MEMORY),
            has_version=bool(files.steps_in(self.folder)),
            is_writer=ranks.is_writer,
        )

    def _remove(self, is_old: Callable[[int], bool]) -> None:
        for step in filter(is_old, files.steps_in(self.folder)):
            files.remove(self.path_of(step))


def _check_room(
    offers: Sequence[Offer], nodes: Nodes, backup_of: Sequence[int | None]
) -> tuple[int, ...]:
    """The bytes of one version on each node; raises ``CheckpointError`` if there is no room."""
    needed = [0] * len(nodes)
    for i, offer in enumerate(offers):
        backup_position = backup_of[i]
        for position in {i} if backup_position is None else {i, backup_position}:
            needed[nodes.node_by_position[position]] += offer.num_bytes
    for node, num_bytes in enumerate(needed):
        members = [offers[position] for position in nodes.positions(node)]
        offer = members[0]
        versions = 1 if offer.has_version else 2
        copied = sum(each.num_bytes for each in members if each.is_in_memory)
        if num_bytes * versions + copied > offer.free_bytes:
            host, _, folder = offer.node.split(" ", 2)
            while_written = f", and {_mib(copied)} while they are written" if copied else ""
            raise CheckpointError(
                f"replicas: {folder} on {host} has room for {_mib(offer.free_bytes)} but "
                f"{versions} of {_mib(num_bytes)} would be there{while_written}. Name a folder "
                "on a local disk (replicas.folder), or keep none (replicas.every=0)."
            )
    return tuple(needed)


def _free_bytes(folder: Path) -> int:
    """The room on the file system of ``folder``; in memory, no more than is available."""
    free = shutil.disk_usage(folder).free
    available = available_bytes() if folder.is_relative_to(_IN_MEMORY) else None
    return free if available is None else min(free, available)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
