"""The checkpoints of a training run: when they are written, and which one it goes on from."""

from pathlib import Path
from typing import Any

import torch

from shardhet.apps.common.run_folder import RunFolder
from shardhet.checkpoint import CheckpointError, Checkpoints, load
from shardhet.config.train import AUTO, TrainConf
from shardhet.training.resuming import (
    Course,
    check_goes_on,
    random_states,
    restore_random_states,
    state_of,
)
from shardhet.training.trainer import Trainer


class RunCheckpoints:
    """Writes and reads the checkpoints of one run.  Every method is collective."""

    def __init__(
        self,
        conf: TrainConf,
        folder: RunFolder,
        trainer: Trainer,
        *,
        data_digest: str,
        device: torch.device,
    ) -> None:
        self._conf = conf
        self._folder = folder
        self._trainer = trainer
        self._model = model = trainer.model
        self._optimizer = trainer.optimizer
        self._device = device
        self._course = Course(
            global_batch_size=model.plan.global_batch_size,
            data_digest=data_digest,
            seed=conf.seed,
            schedule=repr(conf.lr_scheduler.to_record(conf.num_steps)),
        )
        self._last_saved: int | None = None
        self._checkpoints = Checkpoints(
            folder.checkpoints_dir,
            keep_last=conf.checkpoint.keep_last or None,
            keep_every=conf.checkpoint.keep_every or None,
        )

    def resume(self) -> Path | None:
        """Load what the configuration says; returns its path, None if the run begins anew.

        Raises ``CheckpointError`` or ``ValueError`` on every rank for one that does not fit.
        """
        if self._conf.resume is None:
            return None
        path, extra = self._load(self._conf.resume)
        if path is not None:
            check_goes_on(extra, self._course, source=str(path))
            states = extra["random_states"]
            if self._model.position < len(states):
                restore_random_states(states[self._model.position], self._device)
            self._trainer.num_batches_skipped = extra.get("num_batches_skipped", 0)
        if self._model.rank == 0:
            self._folder.forget_metrics_after(self._model.step)
        self._model.exchange([])  # no rank goes on before that
        return path

    def _load(self, resume: str) -> tuple[Path | None, Any]:
        checkpoints = self._checkpoints if resume == AUTO else Checkpoints(resume)
        has_steps = any(self._model.exchange_objects(bool(checkpoints.steps())))
        if resume == AUTO or has_steps:
            found = checkpoints.load_latest(self._model, self._optimizer)
            return (None, None) if found is None else (found.path, found.extra)
        return Path(resume), load(self._model, self._optimizer, resume)

    def after_step(self, step: int) -> bool:
        """Write a checkpoint if it is time, and say whether it was."""
        every = self._conf.checkpoint.every
        if not every or (step % every and step != self._conf.num_steps):
            return False
        self.save(step)
        return True

    def save(self, step: int) -> None:
        """Write a checkpoint, unless that of this step is there."""
        if step == self._last_saved:
            return
        self._last_saved = step
        states = self._model.exchange_objects(random_states(self._device))
        skipped = self._trainer.num_batches_skipped
        extra = state_of(self._course, step, states, num_batches_skipped=skipped)
        in_background = self._conf.checkpoint.in_background
        save = self._checkpoints.save_async if in_background else self._checkpoints.save
        save(self._model, self._optimizer, extra=extra)

    def roll_back(self) -> int:
        """Load the last checkpoint; the next batch stays the one that would have come next.

        Returns the step of the checkpoint.
        """
        next_batch = self._model.step + self._trainer.num_batches_skipped
        self._checkpoints.wait(self._model)
        found = self._checkpoints.load_latest(self._model, self._optimizer)
        if found is None:
            raise CheckpointError(
                f"{self._folder.checkpoints_dir}: no whole checkpoint to roll back to. Set "
                "guard.on_bad_step=SKIP."
            )
        self._last_saved = self._model.step
        self._trainer.num_batches_skipped = next_batch - self._model.step
        return self._model.step

    def close(self) -> None:
        """Until the last checkpoint is complete."""
        self._checkpoints.wait(self._model)
