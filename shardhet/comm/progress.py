"""What this process is doing, in one record that other threads may read at any time.

The thread that trains writes the record: a few attributes per turn of a step, and no lock.  A
thread that watches the process (``shardhet.comm.liveness``) compares the counters of two
moments: if none has changed, the process has made no progress in between.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TextIO


class RankProgress:
    """The progress of one process; every counter only grows."""

    __slots__ = (
        "doing",
        "failure",
        "is_watched",
        "limit_s",
        "num_collectives",
        "num_marks",
        "num_steps",
        "on_failure",
        "phases",
        "predicted_bytes",
        "screen",
        "stage",
        "step",
        "thread_id",
        "verdict",
    )

    def __init__(self) -> None:
        self.doing = "starting"
        self.num_marks = 0  # changes of ``doing``
        self.num_collectives = 0  # those that no process group counts
        self.num_steps = 0  # finished by this process
        self.step = 0  # that of the model at the end of the last one
        self.stage: int | None = None  # of a pipeline that this process is part of
        self.thread_id = 0  # of the thread that made the last mark
        self.phases: tuple[str, ...] = ()  # declared by ``phase``, the innermost last
        # The limit of the call in which this process waits for all ranks, if it has one.
        self.limit_s: float | None = None
        self.is_watched = False  # a thread ends this process if a rank does not come
        # What the plan was predicted to need on this rank's device; None if nobody has.
        self.predicted_bytes: int | None = None
        self.failure: str | None = None  # what this rank has told the others about itself
        self.on_failure: Callable[[], None] = lambda: None
        # Why the run ends, if a watching thread has found that out: the message of every error
        # that this process raises because it has lost its peers.
        self.verdict: str | None = None
        # Where the user looks, if what this process prints is written to a file.
        self.screen: TextIO | None = None

    def mark(self, doing: str) -> None:
        """Record that this thread begins to do something else."""
        self.doing = doing
        self.num_marks += 1
        self.thread_id = get_ident()

    def end_step(self, step: int) -> None:
        """Record the end of a step, the model's ``step``-th."""
        self.step = step
        self.num_steps += 1

    def fail(self, message: str) -> None:
        """Record that this rank has failed."""
        self.failure = message
        self.on_failure()


progress = RankProgress()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Declare that the code inside may take long on this rank while other ranks wait for it.

    Until it ends, the watch over ranks has ten times its usual patience with this rank.

        with phase("evaluating on rank 0"):
            ...
    """
    before = progress.phases
    progress.phases = (*before, name)
    progress.mark(name)
    try:
        yield
    finally:
        progress.phases = before
        progress.num_marks += 1
