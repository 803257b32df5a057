"""Bytes from every rank to every other, unevenly, in pieces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardhet.checkpoint.format.errors import CheckpointError, damaged, in_words
from shardhet.comm.channel import Channel
from shardhet.comm.failure import LostPeerError
from shardhet.records.layout import Span

PIECE_BYTES = 2**22  # to one peer at a time


@dataclass(frozen=True, slots=True)
class Stream:
    """Bytes on their way: ``move`` is given the memory of the next ones.

    It fills the memory at the sender, and takes it at the receiver.
    """

    num_bytes: int
    move: Callable[[memoryview], None]


class Sending:
    """Parts of files, one after the other; a failure is raised when all is sent."""

    def __init__(self, parts: Sequence[tuple[Path, Span]]) -> None:
        self._left = list(parts)
        self.num_bytes = sum(span.numel for _, span in parts)
        self._error: Exception | None = None

    def move(self, memory: memoryview) -> None:
        """Fill ``memory`` with the next bytes."""
        filled = 0
        while filled < len(memory):
            path, span = self._left.pop(0)
            stop = min(span.stop, span.start + len(memory) - filled)
            self._read(path, span.start, memory[filled : filled + stop - span.start])
            filled += stop - span.start
            if stop < span.stop:
                self._left.insert(0, (path, Span(stop, span.stop)))

    def _read(self, path: Path, start: int, memory: memoryview) -> None:
        try:
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(len(memory))
            memory[: len(content)] = content
            if len(content) < len(memory):
                self._error = damaged(path, "it is shorter than it was")
        except OSError as error:
            self._error = error

    def close(self) -> None:
        """Raise what failed."""
        if self._error is not None:
            raise CheckpointError(in_words(self._error))


def all_to_all_bytes(
    channel: Channel, outgoing: Mapping[int, Stream], incoming: Mapping[int, Stream]
) -> None:
    """Send and receive streams, by position of the peer.  Collective.

    Both ends of a stream know its length.  In every round each stream moves one piece, so a
    rank needs memory for one piece per stream.  ``move`` must not raise: the peers count on
    the other streams.  Raises ``LostPeerError`` if a peer ends.
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
            streams[position].move(memory[start : start + size])
        start += size
