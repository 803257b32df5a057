"""What this process is doing, in one record that other threads may read at any time.

The thread that trains writes the record: a few attributes per turn of a step, and no lock.  A
thread that watches the process (``shardhet.comm.liveness``) compares the counters of two
moments: if none has changed, the process has made no progress in between.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TextIO

from shardhet.comm.failure import Failure


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
    phases: tuple[str, ...] = ()  # declared by ``phase``, the innermost last
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
def phase(name: str) -> Iterator[None]:
    """Declare that the code inside may take long on this rank while other ranks wait for it.

    Until it ends, the watch over ranks has ten times its usual patience with this rank.

        with phase("evaluating on rank 0"):
            ...
    """
    before, doing = progress.phases, progress.doing
    progress.phases = (*before, name)
    progress.mark(name)
    try:
        yield
    finally:
        progress.phases = before
        progress.mark(doing)
