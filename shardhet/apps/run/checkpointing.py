"""The state of a training run: when it is written, and which one the run goes on from."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardhet import HetFSDP
from shardhet.apps.launch.run_folder import IN_MEMORY, RunFolder
from shardhet.checkpoint import CheckpointError, Checkpoints, Replicas, Resumed, load
from shardhet.config.checks import ConfigError
from shardhet.config.train import AUTO, TrainConf
from shardhet.training.resuming import (
    Course,
    check_goes_on,
    options_of,
    put_options,
    random_states,
    restore_random_states,
    state_of,
)
from shardhet.training.trainer import Trainer


class Timer:
    """Says that so many seconds have passed, at the same step on all ranks.

    They agree on rank zero's clock at few steps: the next one is half-way to where the time is
    over if steps take as long as before.
    """

    def __init__(self, model: HetFSDP, limit_s: float) -> None:
        self._model = model
        self._limit_s = limit_s
        self._answer = model.step, False  # of the last step that was asked about
        self.restart(model.step)

    def restart(self, step: int) -> None:
        """Count from here."""
        self._began_s, self._began_step, self._next_look = time.monotonic(), step, step + 1

    def is_due(self, step: int) -> bool:
        """Whether the time has passed.  Collective."""
        if self._limit_s and step != self._answer[0]:
            self._answer = step, step >= self._next_look and self._look(step)
        return self._answer[1]

    def _look(self, step: int) -> bool:
        passed_s = self._model.exchange_objects(time.monotonic() - self._began_s)[0]
        steps_left = (self._limit_s / max(passed_s, 1e-9) - 1) * (step - self._began_step)
        self._next_look = step + max(1, int(steps_left / 2))
        return passed_s >= self._limit_s


class RunCheckpoints:
    """Writes and reads the checkpoints and replicas of one run.  Every method is collective."""

    def __init__(
        self,
        conf: TrainConf,
        folder: RunFolder,
        trainer: Trainer,
        *,
        data_digest: str,
        device: torch.device,
        may_go_on: bool = False,
    ) -> None:
        """``may_go_on``: the folder may have the state of an earlier start of this run."""
        self._conf = conf
        self._goes_on = may_go_on or conf.resume == AUTO
        self._folder = folder
        self._trainer = trainer
        self._model = model = trainer.model
        self._optimizer = trainer.optimizer
        self._options = options_of(trainer.optimizer)  # a checkpoint may have others
        self._device = device
        self._course = Course(
            global_batch_size=model.plan.global_batch_size,
            data_digest=data_digest,
            seed=conf.seed,
            seq_len=conf.data.seq_len,
            schedule=repr(conf.lr_scheduler.to_record(conf.num_steps)),
        )
        self._last_saved: int | None = None
        self._timer = Timer(model, 60 * conf.checkpoint.every_minutes)
        self._waited_s = 0.0  # for the last replica, in this step
        self._replicas = self._open_replicas() if conf.replicas.every else None
        self._checkpoints = Checkpoints(
            folder.checkpoints_dir,
            keep_last=conf.checkpoint.keep_last or None,
            keep_every=conf.checkpoint.keep_every or None,
        )

    def _open_replicas(self) -> Replicas:
        """In a folder of this run's own on every node."""
        names = self._model.exchange_objects(
            self._folder.identity() if self._model.rank == 0 else None
        )
        [name] = [each for each in names if each is not None]
        root = self._conf.replicas.folder
        usual = IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
        return Replicas((usual / "shardhet" if root is None else Path(root)) / name)

    def resume(self) -> Resumed | None:
        """Load what the configuration says; None if the run begins anew.

        Raises ``CheckpointError`` or ``ValueError`` on every rank for one that does not fit.
        """
        found = self._load_own() if self._goes_on else None
        if found is None:
            self._check_begins_anew()
        if found is None and self._conf.resume not in (None, AUTO):
            found = self._load_from(self._conf.resume)
        if found is not None:
            check_goes_on(found.extra, self._course, source=str(found.path))
            put_options(self._optimizer, self._options, source=str(found.path))
            states = found.extra["random_states"]
            if self._model.position < len(states):
                restore_random_states(states[self._model.position], self._device)
            self._trainer.num_batches_skipped = found.extra.get("num_batches_skipped", 0)
            scaler, its_state = self._trainer.loss_scaler, found.extra.get("loss_scaler")
            if scaler is not None and its_state is not None:
                scaler.load_state_dict(its_state)
            if (judged_by := found.extra.get("guard")) is not None:
                self._trainer.guard.load_state_dict(judged_by)
        self._forget_replicas_after(self._model.step)
        return found

    def _check_begins_anew(self) -> None:
        """Raise on every rank if step 1 would destroy what an earlier run has left."""
        model = self._model
        for why in model.exchange_objects(
            self._folder.why_not_anew() if model.rank == 0 else None
        ):
            if why is not None:
                raise ConfigError(why)

    def _load_own(self) -> Resumed | None:
        """What this run has kept itself, on its nodes or in its folder."""
        model, optimizer = self._model, self._optimizer
        if self._replicas is not None:
            found = self._replicas.load_latest(model, optimizer, checkpoints=self._checkpoints)
            if found is not None:
                return found
        return self._checkpoints.load_latest(model, optimizer)

    def _load_from(self, path: str) -> Resumed | None:
        """The state of another run to begin with: one checkpoint, or the latest of a folder."""
        model, optimizer = self._model, self._optimizer
        checkpoints = Checkpoints(path)
        if any(model.exchange_objects(bool(checkpoints.steps()))):
            return checkpoints.load_latest(model, optimizer)
        extra = load(model, optimizer, path)
        return Resumed(path=Path(path), step=model.step, extra=extra)

    def before_record(self, step: int) -> None:
        """Wait for the last replica if it is time for the next one.

        So a step that was recorded is on two nodes, unless it is the last one.
        """
        if self._replicas is not None and self._needs_replica(step):
            started_s = time.perf_counter()
            self._replicas.wait(self._model)
            self._waited_s = time.perf_counter() - started_s

    def is_due(self, step: int) -> bool:
        """Whether ``after_step`` writes something."""
        return self._needs_replica(step) or self._needs_checkpoint(step)

    def _needs_replica(self, step: int) -> bool:
        return self._replicas is not None and step % self._conf.replicas.every == 0

    def _needs_checkpoint(self, step: int) -> bool:
        every, is_last = self._conf.checkpoint.every, step == self._conf.num_steps
        if every:
            return step % every == 0 or is_last
        return self._timer.is_due(step) or (is_last and self._last_saved is not None)

    def after_step(self, step: int) -> dict[str, float]:
        """Write what it is time for; the seconds that the step waited for it, by name."""
        seconds: dict[str, float] = {}
        replicas = self._replicas
        if replicas is not None and self._needs_replica(step):
            started_s = time.perf_counter()
            replicas.save(self._model, self._optimizer, extra=self._extra(step))
            seconds["replica_s"] = self._waited_s + time.perf_counter() - started_s
        if self._needs_checkpoint(step):
            started_s = time.perf_counter()
            self.save(step)
            seconds["checkpoint_s"] = time.perf_counter() - started_s
        return seconds

    def save(self, step: int) -> None:
        """Write a checkpoint, unless that of this step is there."""
        if step == self._last_saved:
            return
        self._last_saved = step
        in_background = self._conf.checkpoint.in_background
        save = self._checkpoints.save_async if in_background else self._checkpoints.save
        save(self._model, self._optimizer, extra=self._extra(step))
        self._timer.restart(step)

    def _extra(self, step: int) -> dict[str, Any]:
        states = self._model.exchange_objects(random_states(self._device))
        trainer = self._trainer
        return state_of(
            self._course,
            step,
            states,
            num_batches_skipped=trainer.num_batches_skipped,
            loss_scaler=None
            if trainer.loss_scaler is None
            else trainer.loss_scaler.state_dict(),
            guard=trainer.guard.state_dict(),
        )

    @property
    def replicas_told(self) -> str | None:
        """What replicas take, after the first one; None without."""
        if self._replicas is None or not self._replicas.bytes_by_node:
            return None
        return f"replicas in {self._replicas.folder}: {self._replicas.told}"

    def roll_back(self) -> int:
        """Load the last checkpoint; the next batch stays the one that would have come next.

        Returns the step of the checkpoint.
        """
        next_batch = self._model.step + self._trainer.num_batches_skipped
        self._checkpoints.wait(self._model)
        found = self._checkpoints.load_latest(
            self._model, self._optimizer, not_after=self._model.step
        )
        if found is None:
            raise CheckpointError(
                f"{self._folder.checkpoints_dir}: no complete checkpoint to roll back to. Set "
                "guard.on_bad_step=SKIP."
            )
        put_options(self._optimizer, self._options, source=str(found.path))
        self._forget_replicas_after(self._model.step)
        self._last_saved = self._model.step
        self._trainer.num_batches_skipped = next_batch - self._model.step
        return self._model.step

    def close(self) -> None:
        """Until the last checkpoint and the last replica are complete."""
        self._checkpoints.wait(self._model)
        if self._replicas is not None:
            self._replicas.wait(self._model)

    def free_nodes(self, *, is_leaving: bool, others_go_on: bool) -> None:
        """Remove the replicas where they serve nobody any longer.

        A node that leaves takes its own along: the others have copies, and a checkpoint.
        """
        if self._replicas is None:
            return
        if not others_go_on:
            self._replicas.clear(self._model)
        elif is_leaving:
            self._replicas.leave()

    def _forget_replicas_after(self, step: int) -> None:
        if self._replicas is not None:
            self._replicas.forget_after(self._model, step)
