"""The writing and sending of a replica, in a thread of each rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import CheckpointError, damaged
from shardhet.checkpoint.format.writing import Report
from shardhet.checkpoint.replicas.transfer import Sending, Stream, all_to_all_bytes
from shardhet.checkpoint.state.job import Job
from shardhet.records.layout import Span


class Copying(Job):
    """One replica from the files of its ranks to complete folders on all nodes."""

    def __init__(
        self,
        *given: Any,
        keeper_of: Sequence[int | None],
        remove_others: Callable[[], None],
        **named: Any,
    ) -> None:
        """``keeper_of`` says which position keeps another copy; the rest is as for ``Job``."""
        super().__init__(*given, **named)
        self._keeper_of = keeper_of
        self._remove_others = remove_others

    def run(self) -> None:
        """As ``Job.run``; those that lead then remove the replicas before."""
        super().run()
        if self._leads:
            self._remove_others()

    def _pass_on(self, reports: Sequence[Report]) -> None:
        """Send this rank's file, and write those that it keeps."""
        if self._channel is None:
            return
        folder = files.unfinished_path(self._path)
        outgoing: dict[int, Stream] = {}
        incoming: dict[int, Stream] = {}
        ends: list[Sending | _Copy] = []
        for i, report in enumerate(reports):
            keeper = self._keeper_of[i]
            if report.file is None or report.facts is None or keeper is None:
                continue
            path, num_bytes = folder / report.file, report.facts.num_bytes
            if i == self._ranks.position:
                ends.append(sent := Sending([(path, Span(0, num_bytes))]))
                outgoing[keeper] = Stream(num_bytes, sent.move)
            elif keeper == self._ranks.position:
                ends.append(copy := _Copy(path, report.facts.digest))
                incoming[i] = Stream(num_bytes, copy.move)
        all_to_all_bytes(self._channel, outgoing, incoming)
        for each in ends:
            each.close()


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
