"""save and save_async: a model and its optimizer into a folder that is complete or not there.

Order of collectives (all ranks, in this order; "checkpoint.save" is their name):

    0  of the previous save of this model, if it has not been waited for: its 4 and 5
    1  all ranks have come; then every rank says what it holds, or why it cannot be saved
    2  rank zero has made the unfinished folder; if asynchronous, every rank has its copies
    3  no collective: every rank writes one file, in a thread if asynchronous
    4  every rank says what it has written
    5  rank zero has completed the folder (metadata, plan, manifest, rename)

An asynchronous save leaves its reports of 3 in the rendezvous store as well, where rank zero's
thread finds them: the folder is then complete before anybody waits, and 4 and 5 only say so.
The thread makes no collective call, so that it never comes between those of the model.

Lifetimes: ``save`` writes the model's own tensors while all ranks are in the call.
``save_async`` copies them to host memory before it returns; the copies are freed once they
are written.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import Holding, check_agree
from shardhet.checkpoint.state.held import Held
from shardhet.checkpoint.state.job import Job
from shardhet.checkpoint.state.optimizer_state import Optimizers
from shardhet.checkpoint.state.ranks import Ranks, check_order
from shardhet.comm.progress import phase

CALL = "checkpoint.save"


@phase(CALL)
def save(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | Path,
    *,
    extra: Any = None,
) -> None:
    """Write model, optimizer and ``extra`` to the folder ``path``.  Collective.

    Call it between steps.  For a HetFSDP every rank calls it, and every rank writes its own
    rows; a plain module is written by the one process that calls.  A checkpoint that is there
    already is replaced once the new one is complete.

    Args:
        model: all parameters and persistent buffers are saved, under its own names.
        optimizer: of ``model``'s parameters, with states of their shapes and single numbers;
            all of them in a list, if there are several; None saves none.
        path: a folder on a file system that all ranks share.
        extra: None, numbers, texts, tensors, and lists, tuples and dicts of them; that of
            rank zero counts.

    Raises ``CheckpointError`` on every rank, for what cannot be saved before anything is
    written; ``path`` is then as it was.
    """
    _start(model, optimizer, path, extra, is_async=False).wait()


@phase(CALL)
def save_async(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | Path,
    *,
    extra: Any = None,
) -> "PendingSave":
    """As ``save``, but writes in a thread; training may go on at once.  Collective.

    Takes host memory for a copy of this rank's state until it is written.  The next save or
    load of ``model`` waits for this one, and raises if it has failed.  Wait for the last one
    before the program ends.
    """
    return _start(model, optimizer, path, extra, is_async=True)


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, ranks: Ranks, model: nn.Module, job: "Job") -> None:
        self.path = path
        self._ranks = ranks
        self._model = model
        self._job = job
        self._is_over = False

    @phase(CALL)
    def wait(self) -> None:
        """Until the checkpoint is complete.  Collective.

        Raises ``CheckpointError`` on every rank if any rank could not write.
        """
        if self._is_over:
            return
        self._is_over = True
        if _pending.get(self._model) is self:
            del _pending[self._model]
        try:
            reports = self._ranks.exchange(self._job.written(), call=CALL)
        finally:
            self._job.stop()
        try:
            self._ranks.agree(lambda: self._job.complete(reports), call=CALL)
        finally:
            self._job.clear()  # rank zero has read everything
        self._ranks.raise_if_any([(report.rank, report.failure) for report in reports])


# By model, until somebody has waited for it.
_pending: WeakKeyDictionary[nn.Module, PendingSave] = WeakKeyDictionary()


def wait_for_pending(model: nn.Module) -> None:
    """Wait for the save of ``model`` that is under way, if there is one.  Collective."""
    pending = _pending.get(model)
    if pending is not None:
        pending.wait()


def _start(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | Path,
    extra: Any,
    *,
    is_async: bool,
) -> PendingSave:
    check_order(CALL, model, path)
    wait_for_pending(model)
    ranks = Ranks(model)
    path = Path(path).absolute()
    ranks.meet(CALL)
    held = Held(ranks)
    holdings = ranks.agree(lambda: held.collect(model, optimizer, path, extra), call=CALL)

    def begin() -> str | None:
        topic = _begin(holdings, path, ranks)
        if is_async:
            held.copy()
        return topic

    topics = ranks.agree(begin, call=CALL)
    [(writer, topic)] = [(i, each) for i, each in enumerate(topics) if each is not None]
    job = Job(path, ranks, held, holdings, writer=writer)
    if is_async:
        job.start(topic)
    else:
        job.write()
    pending = _pending[model] = PendingSave(path, ranks, model, job)
    return pending


def _begin(holdings: Sequence[Holding], path: Path, ranks: Ranks) -> str | None:
    """Check that ranks agree, and on rank zero make the folder; a name for this save."""
    check_agree(holdings)
    if not ranks.is_writer:
        return None
    files.begin(path)
    return f"checkpoint_{uuid.uuid4().hex}"
