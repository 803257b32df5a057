"""Bytes from every rank to every other, unevenly, in pieces, and a replica that is sent so."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import CheckpointError, damaged
from shardhet.checkpoint.format.writing import Report
from shardhet.checkpoint.state.job import CALL, Job
from shardhet.comm.channel import Channel
from shardhet.comm.failure import LostPeerError
from shardhet.records.layout import Span

PIECE_BYTES = 2**22  # to one peer at a time


@dataclass(slots=True)
class Stream:
    """Bytes on their way: ``move`` is given the memory of the next ones.

    It fills the memory at the sender, and takes it at the receiver.
    """

    num_bytes: int
    move: Callable[[memoryview], object]
    error: Exception | None = None  # of a move, after which there are none

    def move_next(self, memory: memoryview) -> None:
        """Move the next bytes; never raises, since the peers count on the other streams."""
        if self.error is None:
            try:
                self.move(memory)
            except (OSError, CheckpointError) as error:
                self.error = error

    def check(self) -> None:
        """Raise what has failed."""
        if self.error is not None:
            raise self.error


def of_files(parts: Iterable[tuple[Path, Span]]) -> Stream:
    """Parts of files, one after the other."""
    left = deque(parts)

    def fill(memory: memoryview) -> None:
        while memory:
            path, span = left.popleft()
            stop = min(span.stop, span.start + len(memory))
            with path.open("rb") as file:
                file.seek(span.start)
                if file.readinto(memory[: stop - span.start]) < stop - span.start:
                    raise damaged(path, "it is shorter than it was")
            memory = memory[stop - span.start :]
            if stop < span.stop:
                left.appendleft((path, Span(stop, span.stop)))

    return Stream(sum(span.numel for _, span in left), fill)


def all_to_all_bytes(
    channel: Channel, outgoing: Mapping[int, Stream], incoming: Mapping[int, Stream]
) -> None:
    """Send and receive streams, by position of the peer.  Collective.

    Both ends of a stream know its length.  In every round each stream moves one piece, so a
    rank needs memory for one piece per stream.  Raises ``LostPeerError`` if a peer ends; what
    else fails is said by the streams.
    """
    if channel.group is None:
        return
    longest = max((stream.num_bytes for stream in outgoing.values()), default=0)
    rounds = channel.exchange([-(-longest // PIECE_BYTES)])
    for i in range(int(max(number for [number] in rounds))):
        _move_pieces(channel, outgoing, incoming, i * PIECE_BYTES)


def _move_pieces(
    channel: Channel, outgoing: Mapping[int, Stream], incoming: Mapping[int, Stream], start: int
) -> None:
    """One round: the bytes of every stream from ``start`` on."""
    order = sorted(range(channel.world_size), key=channel.rank_by_position.__getitem__)

    def sizes_of(streams: Mapping[int, Stream]) -> list[int]:
        lengths = (streams[i].num_bytes if i in streams else 0 for i in order)
        return [max(0, min(PIECE_BYTES, length - start)) for length in lengths]

    sent, received = sizes_of(outgoing), sizes_of(incoming)
    source = torch.empty(sum(sent), dtype=torch.uint8)
    output = torch.empty(sum(received), dtype=torch.uint8)
    _visit(source, sent, outgoing, order)
    try:
        dist.all_to_all_single(output, source, received, sent, group=channel.group)
    except RuntimeError as error:
        raise LostPeerError(str(error)) from error
    _visit(output, received, incoming, order)


def _visit(
    buffer: torch.Tensor, sizes: list[int], streams: Mapping[int, Stream], order: list[int]
) -> None:
    memory, start = buffer.numpy().data, 0
    for position, size in zip(order, sizes, strict=True):
        if size:
            streams[position].move_next(memory[start : start + size])
        start += size


class Copying(Job):
    """One replica from the files of its ranks to complete folders on all nodes."""

    def __init__(
        self,
        *given: Any,
        backup_of: Sequence[int | None],
        remove_others: Callable[[], None],
        **named: Any,
    ) -> None:
        """``backup_of`` says which position keeps another copy; the rest is as for ``Job``."""
        super().__init__(*given, **named)
        self._backup_of = backup_of
        self._remove_others = remove_others

    def run(self) -> None:
        """As ``Job.run``; those that lead then remove the replicas before."""
        super().run()
        if self._leads:
            self._remove_others()

    def _pass_on(self, reports: Sequence[Report | None]) -> None:
        """Send this rank's file, and write those that it keeps."""
        if self._channel is None:
            return
        folder, here = files.unfinished_path(self.path), self._ranks.position
        outgoing: dict[int, Stream] = {}
        kept: dict[int, Report] = {}
        for i, report in enumerate(reports):
            backup_position = self._backup_of[i]
            if report is None or backup_position is None:
                continue
            if i == here:
                whole = Span(0, report.facts.num_bytes)
                outgoing[backup_position] = of_files([(folder / report.file, whole)])
            elif backup_position == here:
                kept[i] = report
        copies: dict[int, files.DigestingFile] = {}

        def open_copies() -> None:
            for i, report in kept.items():
                copies[i] = files.DigestingFile(folder / report.file)

        self._among.agree(open_copies, call=CALL)
        incoming = {
            i: Stream(report.facts.num_bytes, copies[i].write) for i, report in kept.items()
        }
        try:
            all_to_all_bytes(self._channel, outgoing, incoming)
            for each in (*outgoing.values(), *incoming.values()):
                each.check()
            for i, copy in copies.items():
                copy.finish()
                if copy.digest != kept[i].facts.digest:
                    raise damaged(copy.path, "the received bytes differ from those sent")
        finally:
            for copy in copies.values():
                copy.abandon()
