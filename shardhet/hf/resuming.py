"""The whole state of a HetTrainer: kept in its checkpoints, put back under any plan.

    OUTPUT_DIR/checkpoint-100/    opens with plain from_pretrained
        shardhet/                 a checkpoint of shardhet.checkpoint: parameters, optimizer,
                                  scheduler, random states, what the order of the data is
        trainer_state.json        written last: a folder without it does not count

Parameters are in both, so that the model opens anywhere and the state is verified as a whole.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from shardhet.checkpoint import CheckpointError, load, save
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.loading import CALL as LOADS
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.fsdp import HetFSDP
from shardhet.hf.loaders import check_deals
from shardhet.hf.view import TrainerView
from shardhet.training.dealing.batches import PlanLoader
from shardhet.training.resuming import (
    check_unchanged,
    random_states,
    restore_random_states,
)

STATE_DIR = "shardhet"
logger = logging.getLogger(__name__)

# What the batches that come next depend on; what to do if it has changed.
REMEDIES = {
    "global_batch_size": "Give a plan with the same global batch",
    "gradient_accumulation_steps": "Set it to what it was",
    "num_samples": "Train on the dataset that it was trained on",
    "order": "Set train_sampling_strategy to what it was",
    "data_seed": "Set data_seed, or seed, to what it was",
    "seed": "Set seed to what it was",
    "drop_last": "Set dataloader_drop_last to what it was",
}


class WholeState:
    """Saves and restores what a trainer needs to go on as if it had never stopped."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None  # until the first epoch begins

    def save(self, folder: Path) -> None:
        """Write it to a folder that holds the model already.  Collective."""
        trainer = self._trainer
        het = trainer.het
        if het.rank == 0:  # of an earlier checkpoint with this name
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        extra = {
            "writer": type(trainer).__name__,
            "facts": self._facts(),
            "scheduler": _plain(self._scheduler.state_dict()),
            "random_states": het.exchange_objects(random_states(het.device)),
            "epoch_began_with": self._loader.batches.order.began_with,
        }
        if trainer.loss_scaler is not None:
            extra["loss_scaler"] = trainer.loss_scaler.state_dict()
        save(het, inner(trainer.optimizer), folder / STATE_DIR, extra=extra)

    def load(self, folder: Path) -> None:
        """Put parameters, optimizer and scheduler back.  Collective."""
        trainer = self._trainer
        extra = load(trainer.het, inner(trainer.optimizer), folder / STATE_DIR)
        if not isinstance(extra, dict) or "epoch_began_with" not in extra:
            raise ValueError(
                f"HetTrainer.train: {folder / STATE_DIR} was not written by HetTrainer, or by "
                "an older one, so it does not say which samples come next. Load it with "
                "shardhet.checkpoint.load."
            )
        source = f"HetTrainer.train: {folder}"
        check_unchanged(extra["facts"], self._facts(), REMEDIES, source=source)
        self._scheduler.load_state_dict(extra["scheduler"])
        if trainer.loss_scaler is not None and "loss_scaler" in extra:
            trainer.loss_scaler.load_state_dict(extra["loss_scaler"])
        self._loaded = extra

    def begin_epoch(self, num_batches: int) -> None:
        """Let the epoch go on after its first ``num_batches``, if it has been resumed.

        With none of them it begins anew, after the one in which the checkpoint was written.
        """
        if self._loaded is None:
            return
        trainer, loader = self._trainer, self._loader
        if num_batches and loader.num_workers and trainer.collates_whole:
            raise ValueError(
                f"TrainingArguments: dataloader_num_workers={loader.num_workers}, so what the "
                "collator would have drawn next, in the middle of an epoch, is not known. Set "
                "it to 0, before the checkpoint too."
            )
        loaded, self._loaded = self._loaded, None
        states = _of_position(loaded["random_states"], trainer.het.position)

        def restore() -> None:
            restore_random_states(states, trainer.het.device)

        # A sampler's own generator is then as it was, also where the next epoch begins anew.
        batches = loader.batches.order.draw_again(loaded["epoch_began_with"])
        if num_batches:
            loader.batches.go_on(batches, num_batches, restore)
        else:
            restore()

    def load_best(self) -> None:
        """Load the parameters of the best checkpoint so far.  Collective."""
        folder = Path(self._trainer.state.best_model_checkpoint or "")
        load(self._trainer.het, None, folder / STATE_DIR)

    @property
    def _scheduler(self) -> Any:
        assert self._trainer.lr_scheduler is not None, "made before anything is loaded"
        return self._trainer.lr_scheduler

    @property
    def _loader(self) -> PlanLoader:
        loader = self._trainer.train_loader
        check_deals(loader, "get_train_dataloader")
        assert loader is not None, "it deals"
        return loader

    def _facts(self) -> dict[str, Any]:
        trainer, batches = self._trainer, self._loader.batches
        return {
            "global_batch_size": trainer.plan.global_batch_size,
            "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
            "num_samples": len(batches.sampler),  # type: ignore[arg-type]  # it has a length
            "order": type(batches.sampler).__name__,
            "data_seed": getattr(batches.sampler, "initial_seed", None),
            "seed": trainer.args.seed,
            "drop_last": batches.drop_last,
        }


def chosen(het: HetFSDP, wanted: Any, output_dir: str | None) -> str | None:
    """The checkpoint to go on from, None if training begins anew.  Collective.

    ``wanted`` is what ``train(resume_from_checkpoint=...)`` was given: a path, or True for the
    newest one in ``output_dir`` that is whole.  Raises ``CheckpointError`` on every rank.
    """
    ranks = Ranks(het)
    folder = Path(output_dir or ".")

    def look() -> str | None:
        if not wanted:
            return None
        if wanted is not True:
            problem = _problem(Path(wanted))
            if problem is not None:
                raise CheckpointError(f"HetTrainer.train: {wanted}: {problem}")
            return str(wanted)
        return str(_newest(folder)) if ranks.is_writer else "True"

    found = ranks.agree(look, call=LOADS)
    if wanted is True:
        return next(each for each in found if each != "True")
    if len(set(found)) > 1:
        raise ValueError(
            f"HetTrainer.train: resume_from_checkpoint is {found} in plan order. Pass the same "
            "on every rank."
        )
    return found[0]


def _newest(output_dir: Path) -> Path:
    """The newest checkpoint that is whole; logs a warning for each newer one."""
    names = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = {
        int(each.name.removeprefix(names)): each
        for each in (output_dir.iterdir() if output_dir.is_dir() else ())
        if each.name.startswith(names) and each.name.removeprefix(names).isdigit()
    }
    problems = []
    for step in sorted(folders, reverse=True):
        problem = _problem(folders[step])
        if problem is None:
            try:
                SavedCheckpoint.open(folders[step] / STATE_DIR).verify()
            except CheckpointError as error:
                problem = str(error)
            else:
                return folders[step]
        problems.append(f"{folders[step].name}: {problem}")
        logger.warning("skipped %s", problems[-1])
    why = " ".join(problems) or "It has none."
    raise CheckpointError(
        f"HetTrainer.train: {output_dir} has no checkpoint to resume from. {why} Call train() "
        "without resume_from_checkpoint to start a new run."
    )


def _problem(folder: Path) -> str | None:
    """Why a run cannot go on from ``folder``, as far as its names tell."""
    if not folder.is_dir():
        return "there is no such folder."
    if not (folder / STATE_DIR).is_dir():
        return (
            "it has no state of shardhet: it was written with save_only_model=True, or by a "
            "plain Trainer. Load its model with load_pretrained."
        )
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"its {TRAINER_STATE_NAME} is missing or incomplete: its save was interrupted."
    return None


def _of_position(by_position: list[Any], position: int) -> Any:
    """What this position has saved; a new one goes on like the first, as ranks begin alike."""
    return by_position[position if position < len(by_position) else 0]


def inner(optimizer: Any) -> Any:
    """The optimizer of torch, which accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _plain(value: Any) -> Any:
    """``value`` with numbers of NumPy, as schedulers keep from metrics, as Python's."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value
