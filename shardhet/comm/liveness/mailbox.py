"""Carries signs and the verdict between ranks, over a store connection of its own.

A request to a store whose process is stopped blocks for ever in C++, whatever its timeout
(torch 2.13).  So requests are made by a thread that nobody waits for: the watch sees that no
round ends any more, and never makes a request itself.
"""

import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)

VERDICT = "verdict"
NEWS = "news"  # a rank has failed: all read what it says


class Mailbox:
    """A thread that posts this rank's sign, and reads the others' if it is asked to."""

    def __init__(self, store: Any, rank: int, world_size: int, *, interval_s: float) -> None:
        """``store`` is a connection that nobody else uses."""
        # Written by the watch
        self.outgoing: str | None = None
        self.proposal: str | None = None  # of a verdict
        self.reads = False
        self.has_news = False
        # Written by the thread; each is replaced as a whole
        self.num_rounds = 0
        self.num_reads = 0
        self.incoming: dict[int, str] = {}  # the last sign of each rank that has given any
        self.verdict: str | None = None  # the first that any rank has proposed
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval_s = interval_s
        self._wakes = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="shardhet mailbox", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the next round now."""
        self._wakes.set()

    def stop(self, within_s: float) -> None:
        """Post the last sign and end the thread, unless it is blocked."""
        self._is_stopping = True
        self.wake()
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._round()
                self._wakes.wait(self._interval_s)
                self._wakes.clear()
            self._round()
        except RuntimeError as error:  # the watch sees that no round ends any more
            logger.info("the watch over ranks has lost the rendezvous store: %s", error)

    def _round(self) -> None:
        outgoing, proposal = self.outgoing, self.proposal
        if outgoing is not None:
            self._store.set(_key(self._rank), outgoing)
        if self.verdict is None:
            if proposal is not None:
                self.verdict = self._store.compare_set(VERDICT, "", proposal).decode()
            elif self._store.check([VERDICT]):
                self.verdict = self._store.get(VERDICT).decode()
        if self.has_news:
            self._store.set(NEWS, "")
        if self.reads or self._store.check([NEWS]):
            self.incoming = self._read()
            self.num_reads += 1
        self.num_rounds += 1

    def _read(self) -> dict[int, str]:
        ranks = list(range(self._world_size))
        if len(self.incoming) < self._world_size:  # to get a key that is missing would block
            ranks = [rank for rank in ranks if self._store.check([_key(rank)])]
        texts = self._store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        return {rank: text.decode() for rank, text in zip(ranks, texts, strict=True)}


def _key(rank: int) -> str:
    return f"sign_{rank}"
