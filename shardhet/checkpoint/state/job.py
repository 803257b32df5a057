"""The writing of one checkpoint on one rank: its file, and on rank zero the whole folder."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import Holding
from shardhet.checkpoint.format.errors import CheckpointError, in_words
from shardhet.checkpoint.format.writing import Report, write_rank_file
from shardhet.checkpoint.state.held import Held
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.checkpoint.threads import Thread

SECONDS_BETWEEN_LOOKS = 0.02


class Job:
    """The writing of one checkpoint on one rank, here or in a thread."""

    def __init__(
        self, path: Path, ranks: Ranks, held: Held, holdings: Sequence[Holding], *, writer: int
    ) -> None:
        self._path = path
        self._ranks = ranks
        self._held: Held | None = held
        self._description = held.described(holdings, writer)
        self._report: Report | None = None
        self._is_over, self._failure = False, ""  # of rank zero's part, and how it failed
        self._has_written = threading.Event()
        self._stops = threading.Event()
        self._thread: Thread | None = None
        self._store: Any = None

    def start(self, topic: str) -> None:
        """Write in a thread, and on rank zero complete the folder there."""
        self._store = self._ranks.store(topic)
        name = f"writes {self._path.name}"
        self._thread = Thread(self._run, name=name, stop=self._stops.set)
        self._thread.start()

    def write(self) -> None:
        """Write this rank's file; a failure is in the report."""
        assert self._held is not None
        try:
            self._report = write_rank_file(
                files.unfinished_path(self._path),
                self._description.entries,
                self._held.content,
                rank=self._ranks.rank,
                position=self._ranks.position,
            )
        finally:
            self._held = None  # frees the copies
            self._has_written.set()

    def written(self) -> Report:
        """The report, once there is one."""
        self._has_written.wait()
        return self._report or Report(rank=self._ranks.rank, failure="its thread has ended")

    def stop(self) -> None:
        """End the thread: rank zero's need not look for reports any longer."""
        self._stops.set()
        if self._thread is not None:
            self._thread.join()

    def clear(self) -> None:
        """Take this rank's report out of the store."""
        if self._store is not None:
            with suppress(RuntimeError):  # some kinds of store keep what they have
                self._store.delete_key(str(self._ranks.position))

    def _run(self) -> None:
        self.write()
        store, keys = self._store, [str(i) for i in range(self._ranks.world_size)]
        with suppress(RuntimeError):  # the store may be gone; whoever waits finds out
            store.set(str(self._ranks.position), self.written().to_json())
            while self._ranks.is_writer and not self._stops.is_set():
                if store.check(keys):
                    with suppress(Exception):  # kept as the failure
                        texts = store.multi_get(keys)
                        self.complete([Report.from_json(text) for text in texts])
                    break
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def complete(self, reports: Sequence[Report]) -> None:
        """On rank zero, and once: give the folder its name, or remove it after a failure.

        Raises what went wrong in that, each time.
        """
        if not self._ranks.is_writer:
            return
        if not self._is_over:
            self._is_over = True
            try:
                self._complete(reports)
            except Exception as error:
                files.give_up(self._path)
                self._failure = in_words(error)
        if self._failure:
            raise CheckpointError(self._failure)

    def _complete(self, reports: Sequence[Report]) -> None:
        if any(report.failure is not None for report in reports):
            files.give_up(self._path)
            return
        folder = files.unfinished_path(self._path)
        for name, text in self._description.texts(reports).items():
            files.write_file(folder / name, text)
        files.complete(self._path)
