"""The writing and sending of a replica, in a thread of each rank.

Nothing here may raise between two collectives: the peers wait for the next one.  What fails is
noted, and said when all are through.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.description import Description
from shardhet.checkpoint.format.errors import CheckpointError, damaged, in_words
from shardhet.checkpoint.format.writing import Report, write_rank_file
from shardhet.checkpoint.replicas.transfer import Sending, Stream, all_to_all_bytes
from shardhet.checkpoint.state.held import Held
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.checkpoint.threads import Thread
from shardhet.comm.channel import Channel, join
from shardhet.comm.groups import break_connections
from shardhet.records.layout import Span


class Copying:
    """One replica from the files of its ranks to complete folders on all nodes."""

    def __init__(
        self,
        *,
        path: Path,
        ranks: Ranks,
        held: Held,
        description: Description,
        leads: bool,
        keeper_of: Sequence[int | None],
        channel: Channel | None,
        remove_others: Callable[[], None],
    ) -> None:
        """Prepare one rank's part; ``leads`` if it completes the folder ``path`` of its node.

        ``held`` are copies of its rows, and ``keeper_of`` says which position keeps another
        copy.  ``channel`` is None for one rank.
        """
        self._path = path
        self._rank, self._position = ranks.rank, ranks.position
        self._held: Held | None = held
        self._description = description
        self._leads = leads
        self._keeper_of = keeper_of
        self._channel = channel
        self._remove_others = remove_others
        self.failure: str | None = None  # once the thread has ended
        self._thread = Thread(self._run, name=f"copies {path.name}", stop=self._break)

    def start(self) -> None:
        """Begin, in the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        join(self._thread)

    def _run(self) -> None:
        try:
            reports: list[Report] = self._exchange(self._write())
            self._give_up_if([each.failure for each in reports])
            texts = self._describe(reports)
            self._agree(self._copy(reports))
            self._agree(_failure_of(lambda: self._complete(texts)))
            if self._leads:
                self._remove_others()
        except Exception as error:
            self.failure = in_words(error)

    def _break(self) -> None:
        if self._channel is not None:
            break_connections(self._channel)

    def _write(self) -> Report:
        """Write this rank's own file; a failure is in the report."""
        assert self._held is not None
        content, self._held = self._held.content, None  # frees the copies at the end
        return write_rank_file(
            files.unfinished_path(self._path),
            self._description.entries,
            content,
            rank=self._rank,
            position=self._position,
        )

    def _describe(self, reports: Sequence[Report]) -> Mapping[str, bytes]:
        """The files that say what is in the others, as the writer has made them."""
        found: dict[str, bytes] = {}
        failure = None
        if self._position == self._description.writer:
            try:
                found = self._description.texts(reports)
            except Exception as error:
                failure = in_words(error)
        said: list[tuple[dict[str, bytes], str | None]] = self._exchange((found, failure))
        self._give_up_if([failure for _, failure in said])
        return said[self._description.writer][0]

    def _copy(self, reports: Sequence[Report]) -> str | None:
        """Send this rank's file, and write those that it keeps; what failed."""
        if self._channel is None:
            return None
        folder = files.unfinished_path(self._path)
        outgoing: dict[int, Stream] = {}
        incoming: dict[int, Stream] = {}
        ends: list[Sending | _Copy] = []
        for i, report in enumerate(reports):
            keeper = self._keeper_of[i]
            if report.file is None or report.facts is None or keeper is None:
                continue
            path, num_bytes = folder / report.file, report.facts.num_bytes
            if i == self._position:
                ends.append(sent := Sending([(path, Span(0, num_bytes))]))
                outgoing[keeper] = Stream(num_bytes, sent.move)
            elif keeper == self._position:
                ends.append(copy := _Copy(path, report.facts.digest))
                incoming[i] = Stream(num_bytes, copy.move)
        all_to_all_bytes(self._channel, outgoing, incoming)
        failures = [_failure_of(each.close) for each in ends]
        return next((failure for failure in failures if failure is not None), None)

    def _complete(self, texts: Mapping[str, bytes]) -> None:
        """Give this node's folder its name; all its files are there."""
        if self._leads:
            for name, text in texts.items():
                files.write_file(files.unfinished_path(self._path) / name, text)
            files.complete(self._path)

    def _agree(self, failure: str | None) -> None:
        self._give_up_if(self._exchange(failure))

    def _exchange(self, value: Any) -> list[Any]:
        return [value] if self._channel is None else self._channel.exchange_objects(value)

    def _give_up_if(self, said: Sequence[str | None]) -> None:
        """Raise what any rank says; those that lead then remove what is unfinished."""
        failed = [each for each in said if each is not None]
        if failed:
            if self._leads:
                files.give_up(self._path)
            raise CheckpointError(failed[0])


def _failure_of(work: Callable[[], None]) -> str | None:
    try:
        work()
    except Exception as error:
        return in_words(error)
    return None


class _Copy:
    """A file that is written as it comes."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._file: files.DigestingFile | None = None
        self._error: Exception | None = None

    def move(self, memory: memoryview) -> None:
        """Append ``memory``."""
        if self._error is not None:
            return
        try:
            if self._file is None:
                self._file = files.DigestingFile(self._path)
            self._file.write(memory)
        except (OSError, CheckpointError) as error:
            self._error = error

    def close(self) -> None:
        """Wait until the disk has it; raise what failed, or if it is not what was sent."""
        if self._error is not None or self._file is None:
            if self._file is not None:
                self._file.abandon()
            raise self._error or damaged(self._path, "nothing was received")
        self._file.finish()
        if self._file.digest != self._digest:
            raise damaged(self._path, "the received bytes differ from those sent")
