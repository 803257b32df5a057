"""save and save_async: a model and its optimizer into a folder that is complete or not there.

Order of collectives (all ranks, in this order; "checkpoint.save" is their name):

    0  of the previous save of this model, if it has not been waited for: its 4
    1  all ranks have come; then every rank says what it holds, or why it cannot be saved
    2  rank zero has made the unfinished folder; if asynchronous, every rank has its copies
    3  every rank has written one file, and rank zero has completed the folder (metadata, plan,
       manifest, rename); if asynchronous in a thread, over a channel of its own
    4  if asynchronous, when it is waited for: every rank says what has failed

Lifetimes: ``save`` writes the model's own tensors while all ranks are in the call.
``save_async`` copies them to host memory before it returns; the copies are freed once they
are written.
"""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import check_agree
from shardhet.checkpoint.state.held import RankState
from shardhet.checkpoint.state.job import CALL, Job
from shardhet.checkpoint.state.optimizer_state import Optimizers
from shardhet.checkpoint.state.ranks import Ranks, check_order
from shardhet.comm.channel import may_take_long


@may_take_long(CALL)
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
    _begin(model, optimizer, path, extra, is_async=False).run()


@may_take_long(CALL)
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
    pending = _pending[model] = _begin(model, optimizer, path, extra, is_async=True)
    pending.start()
    return pending


class PendingSave(Job):
    """A checkpoint that is being written."""

    @may_take_long(CALL)
    def wait(self) -> None:
        """Until the checkpoint is complete.  Collective.

        Raises ``CheckpointError`` on every rank if any rank could not write.
        """
        for model in [model for model, pending in _pending.items() if pending is self]:
            del _pending[model]
        super().wait()


# By model, until somebody has waited for it.
_pending: WeakKeyDictionary[nn.Module, PendingSave] = WeakKeyDictionary()


def wait_for_pending(model: nn.Module) -> None:
    """Wait for the save of ``model`` that is under way, if there is one.  Collective."""
    pending = _pending.get(model)
    if pending is not None:
        pending.wait()


def _begin(
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
    held = RankState(ranks)
    holdings = ranks.agree(lambda: held.collect(model, optimizer, path, extra), call=CALL)

    def begin() -> bool:
        check_agree(holdings)
        if ranks.is_writer:
            files.begin(path)
        if is_async:
            held.copy()
        return ranks.is_writer

    writer = ranks.agree(begin, call=CALL).index(True)
    description = held.described(holdings, writer)
    channel = ranks.side_channel(CALL) if is_async else None
    return PendingSave(path, ranks, held, description, leads=ranks.is_writer, channel=channel)
