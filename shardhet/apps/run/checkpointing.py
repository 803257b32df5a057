"""The state of a training run: when it is written, and which one the run goes on from."""

import tempfile
from pathlib import Path
from typing import Any

from shardhet import Hooks, SaveCheckpoints
from shardhet.apps.launch.run_folder import IN_MEMORY, RunFolder
from shardhet.checkpoint import Checkpoints, Replicas, Resumed, load
from shardhet.config.checks import ConfigError, fields_of
from shardhet.config.train import AUTO, TrainConf
from shardhet.fsdp import HetFSDP
from shardhet.training.resuming import check_goes_on
from shardhet.training.trainer import Trainer


class RunCheckpoints(SaveCheckpoints):
    """Writes and reads the checkpoints and replicas of one run.  Every method is collective."""

    def __init__(
        self,
        conf: TrainConf,
        folder: RunFolder,
        trainer: Trainer,
        *,
        data_digest: str,
        may_go_on: bool = False,
    ) -> None:
        """``may_go_on``: the folder may have the state of an earlier start of this run."""
        replicates = bool(conf.replicas.every)
        stated = fields_of(conf.checkpoint, SaveCheckpoints)
        kept = {name: stated[name] or None for name in ("keep_last", "keep_every")}
        super().__init__(
            folder.checkpoints_dir,
            **stated | kept,
            replicas=_open_replicas(conf, folder, trainer.model) if replicates else None,
            replicate_every=conf.replicas.every,
        )
        self.last_step, self.is_rolled_back_to = conf.num_steps, trainer.guard.rolls_back
        self._conf = conf
        self._goes_on = may_go_on or conf.resume == AUTO
        self._folder = folder
        self._trainer = trainer
        self._resume_facts = {
            "global_batch_size": trainer.model.plan.global_batch_size,
            "data_digest": data_digest,
            "seed": conf.seed,
            "seq_len": conf.data.seq_len,
            "schedule": repr(conf.lr_scheduler.to_record(conf.num_steps)),
        }

    def begin(self, run: Hooks) -> None:
        """Go on as ``resume`` has left model and optimizer."""
        self.run = run

    def resume(self) -> Resumed | None:
        """Load what the configuration says; None if the run begins anew.

        Raises ``CheckpointError`` or ``ValueError`` on every rank for one that does not fit.
        """
        self.follow(Hooks(self._trainer.model, self._trainer.optimizers))
        found = self.load_own() if self._goes_on else None
        if found is None:
            self._check_begins_anew()
        if found is None and self._conf.resume not in (None, AUTO):
            found = self._load_from(self._conf.resume)
        if found is not None:
            check_goes_on(found.extra, self._resume_facts, source=str(found.path))
            self.put(found)
            self._trainer.num_batches_skipped = found.extra.get("num_batches_skipped", 0)
        self.forget_replicas()
        return found

    def _check_begins_anew(self) -> None:
        """Raise on every rank if step 1 would destroy what an earlier run has left."""
        model = self.model
        for why in model.exchange_objects(
            self._folder.why_not_anew() if model.rank == 0 else None
        ):
            if why is not None:
                raise ConfigError(why)

    def _load_from(self, path: str) -> Resumed | None:
        """The state of another run to begin with: one checkpoint, or the latest of a folder."""
        model, optimizers = self.model, self._trainer.optimizers
        checkpoints = Checkpoints(path)
        if any(model.exchange_objects(bool(checkpoints.steps()))):
            return checkpoints.load_latest(model, optimizers)
        extra = load(model, optimizers, path)
        return Resumed(path=Path(path), step=model.step, extra=extra)

    @property
    def _kept(self) -> dict[str, Any]:
        scaler = self._trainer.loss_scaler  # checkpoints of other precisions have none
        own = {} if scaler is None else {"loss_scaler": scaler}
        return {"guard": self._trainer.guard, **own}

    def extra(self, step: int) -> dict[str, Any]:
        skipped = self._trainer.num_batches_skipped
        return {"num_batches_skipped": skipped, **self._resume_facts} | super().extra(step)

    def roll_back(self) -> int:
        """As in the base; the next batch stays the one that would have come next."""
        next_batch = self.model.step + self._trainer.num_batches_skipped
        step = super().roll_back()
        self._trainer.num_batches_skipped = next_batch - step
        return step

    def free_nodes(self, *, is_leaving: bool, others_go_on: bool) -> None:
        """Remove the replicas where they serve nobody any longer.

        A node that leaves takes its own along: the others have copies, and a checkpoint.
        """
        if self.replicas is None:
            return
        if not others_go_on:
            self.replicas.clear(self.model)
        elif is_leaving:
            self.replicas.leave()


def _open_replicas(conf: TrainConf, folder: RunFolder, model: HetFSDP) -> Replicas:
    """In a folder of this run's own on every node."""
    names = model.exchange_objects(folder.identity() if model.rank == 0 else None)
    [name] = [each for each in names if each is not None]
    root = conf.replicas.folder
    usual = IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return Replicas((usual / "shardhet" if root is None else Path(root)) / name)
