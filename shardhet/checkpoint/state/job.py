"""The writing of one checkpoint by its ranks: of one folder for all, or of one on each node.

Order of collectives, over a channel of their own if a thread makes them:

    every rank has written its own file
    rank zero has described the checkpoint, given what all have written
    every rank has passed its file on (``replicas.transfer``)
    every folder has its name

What fails on any rank is raised on all of them, and unfinished folders are removed.

A thread may finish at the end of the program, and is then stopped: the interpreter unwinds one
that is in C++ when it ends, and the process then aborts in place of ending with its own status
(Python 3.11, torch 2.13): a rank that has raised would look as if it had crashed.
"""

import atexit
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import CheckpointError, in_words
from shardhet.checkpoint.format.writing import Description, Report, write_rank_file
from shardhet.checkpoint.state.held import RankState
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.comm.channel import Channel, join, progress
from shardhet.comm.groups import break_connections

SECONDS_TO_FINISH = 10.0  # what was begun, if the program has not failed
SECONDS_TO_STOP = 5.0


_channels: WeakKeyDictionary[threading.Thread, Channel | None] = WeakKeyDictionary()


# Registered when it is imported, so that the watch over ranks, which starts later and ends
# earlier, has told the others that this rank ends before anything waits here.
@atexit.register
def _end() -> None:
    timeout_s = 0.0 if _has_failed() else SECONDS_TO_FINISH
    _join([*_channels], timeout_s)
    left = [thread for thread in _channels if thread.is_alive()]
    for thread in left:
        if (channel := _channels[thread]) is not None:
            break_connections(channel)
    _join(left, SECONDS_TO_STOP)


def _has_failed() -> bool:
    """Whether the program ends with an error: peers will not go on with what was begun."""
    has_raised = getattr(sys, "last_value", None) is not None
    return has_raised or progress.failure is not None


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


CALL = "checkpoint.save"


class Job:
    """The writing of one checkpoint on one rank."""

    def __init__(
        self,
        path: Path,
        ranks: Ranks,
        held: RankState,
        description: Description,
        *,
        leads: bool,
        channel: Channel | None = None,
    ) -> None:
        """``leads``: whether this rank completes a folder ``path``; ``channel``: for a thread,
        whose ``held`` are copies.
        """
        self.path = path
        self._ranks = ranks
        self._among = ranks if channel is None else ranks.over(channel)
        self._channel = channel
        self._held: RankState | None = held
        self._description = description
        self._leads = leads
        self._failure: str | None = None  # in the thread
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in a thread."""
        name = f"writes {self.path.name}"
        self._thread = threading.Thread(target=self._run_in_thread, name=name, daemon=True)
        _channels[self._thread] = self._channel
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread has ended, unless that was waited for before.  Collective.

        Raises ``CheckpointError`` on every rank if any rank could not write.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        join(thread)
        ranks = self._ranks
        ranks.raise_if_any(ranks.exchange((ranks.rank, self._failure), call=CALL))

    def run(self) -> None:
        """Write here.  Collective; raises ``CheckpointError`` on every rank if it fails."""
        among, is_writer = self._among, self._ranks.position == self._description.writer
        try:
            reports = among.agree(self._write, call=CALL)
            texts = among.agree(
                lambda: self._description.texts(reports) if is_writer else {}, call=CALL
            )
            among.agree(lambda: self._pass_on(reports), call=CALL)
            among.agree(lambda: self._complete(texts[self._description.writer]), call=CALL)
        except CheckpointError:
            if self._leads:
                files.give_up(self.path)
            raise

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except Exception as error:
            self._failure = in_words(error)

    def _write(self) -> Report | None:
        assert self._held is not None
        content, self._held = self._held.content, None  # frees the copies at the end
        folder, entries = files.unfinished_path(self.path), self._description.entries
        return write_rank_file(folder, entries, content, position=self._ranks.position)

    def _pass_on(self, reports: Sequence[Report | None]) -> None:
        """Nothing: all ranks write to one folder.  Must not raise before a collective."""

    def _complete(self, texts: Mapping[str, bytes]) -> None:
        if self._leads:
            for name, text in texts.items():
                files.write_file(files.unfinished_path(self.path) / name, text)
            files.complete(self.path)
