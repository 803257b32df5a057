"""Checkpoints: a folder with one checkpoint for each of some steps.

    FOLDER/step_00000100           complete
    FOLDER/.step_00000200.*        on its way in or out: never read; the next save removes it

Rank zero lists, cleans up and removes; the other ranks learn what it has found.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.loading import CALL as LOADS
from shardhet.checkpoint.loading import load
from shardhet.checkpoint.saving import PendingSave, save, save_async, wait_for_pending
from shardhet.checkpoint.state.job import CALL as SAVES
from shardhet.checkpoint.state.optimizer_state import Optimizers
from shardhet.checkpoint.state.ranks import Ranks, step_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest checkpoint that is whole."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()  # what is wrong with each newer one


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What was loaded."""

    path: Path
    step: int
    extra: Any
    came_from: str | None = None  # in words, if not from one folder


class Checkpoints:
    """The checkpoints of one run, by step.

        checkpoints = Checkpoints("run/checkpoints", keep_last=3, keep_every=1000)
        resumed = checkpoints.load_latest(model, optimizer)
        ...
        checkpoints.save(model, optimizer, extra={"scheduler": scheduler.state_dict()})

    Saving and loading are collective; listing is not.
    """

    def __init__(
        self, folder: str | Path, *, keep_last: int | None = None, keep_every: int | None = None
    ) -> None:
        """Name the folder, which need not be there.

        Of the checkpoints up to the one that was saved last, the newest ``keep_last`` stay
        (None: all), and those whose step is a multiple of ``keep_every``.  Raises
        ``ValueError`` unless both are at least 1.
        """
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: {number} but it must be at least 1.")
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._unsettled: int | None = None  # the step of a save that may be under way

    def path_of(self, step: int) -> Path:
        """The folder of one step's checkpoint."""
        return files.step_path(self.folder, step)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or not, in ascending order."""
        return files.steps_in(self.folder)

    def latest(self, *, not_after: int | None = None) -> Latest | None:
        """The newest checkpoint whose files are what was written; None if there is none.

        Those of later steps than ``not_after`` do not count.
        Reads all files of the newest ones until one is whole.  Logs a warning for each that is
        not; raises ``CheckpointError`` listing them if none is.
        """
        skipped: list[str] = []
        for step in reversed(self.steps()):
            if not_after is not None and step > not_after:
                continue
            path = self.path_of(step)
            try:
                SavedCheckpoint.open(path).verify()
            except CheckpointError as error:
                logger.warning("skipped an incomplete checkpoint: %s", error)
                skipped.append(str(error))
                continue
            return Latest(path=path, step=step, skipped=tuple(skipped))
        if skipped:
            raise CheckpointError(
                f"{self.folder}: none of its {len(skipped)} checkpoints is complete: "
                f"{' '.join(skipped)} To start a new run, name another folder."
            )
        return None

    def load_latest(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        not_after: int | None = None,
    ) -> Resumed | None:
        """Load the newest whole checkpoint; None if there is none at all.  Collective.

        Those of later steps than ``not_after`` do not count.
        Raises ``CheckpointError`` on every rank if there are some but none is whole, or if it
        does not fit the model.
        """
        self.wait(model)
        ranks = Ranks(model)
        found = ranks.agree(
            lambda: self._look(not_after) if ranks.is_writer else None, call=LOADS
        )
        latest = next((each for each in found if each is not None), None)
        if latest is None:
            return None
        extra = load(model, optimizer, latest.path)
        return Resumed(path=latest.path, step=latest.step, extra=extra)

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        extra: Any = None,
        step: int | None = None,
    ) -> Path:
        """As ``shardhet.checkpoint.save``, at its step's path; then remove old ones.

        ``step`` is that of a HetFSDP itself if it is not given.  Collective.
        """
        step = self._begin(model, step)
        save(model, optimizer, self.path_of(step), extra=extra)
        self._settle(Ranks(model), step)
        return self.path_of(step)

    def save_async(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        extra: Any = None,
        step: int | None = None,
    ) -> PendingSave:
        """As ``save``, but writes in a thread.  Collective.

        Old ones are removed at the next call or by ``wait``.
        """
        step = self._begin(model, step)
        pending = save_async(model, optimizer, self.path_of(step), extra=extra)
        self._unsettled = step
        return pending

    def wait(self, model: nn.Module) -> None:
        """Until the last checkpoint is complete and old ones are removed.  Collective."""
        step, self._unsettled = self._unsettled, None
        wait_for_pending(model)
        if step is not None:
            self._settle(Ranks(model), step)

    def _begin(self, model: nn.Module, step: int | None) -> int:
        step = step_of(model, step)
        self.wait(model)
        ranks = Ranks(model)
        ranks.agree(lambda: files.clean(self.folder) if ranks.is_writer else None, call=SAVES)
        return step

    def _settle(self, ranks: Ranks, step: int) -> None:
        if ranks.is_writer:
            try:
                self._remove_old(step)
            except OSError as error:  # the new one is there, which is what counts
                logger.warning("an old checkpoint could not be removed: %s", error)

    def _remove_old(self, newest: int) -> None:
        """Remove what need not be kept; later steps are of another history and stay."""
        if self._keep_last is None:
            return
        steps = [step for step in self.steps() if step <= newest]
        for step in steps[: -self._keep_last]:
            if self._keep_every is None or step % self._keep_every:
                files.remove(self.path_of(step))

    def _look(self, not_after: int | None) -> Latest | None:
        for path, _ in files.left_behind(self.folder):
            files.recover(path)
        return self.latest(not_after=not_after)
