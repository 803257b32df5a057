"""What the helpers of a HetTrainer know of it."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from shardhet.fsdp import HetFSDP
from shardhet.hf.arguments import checked
from shardhet.records.plan import Plan
from shardhet.training.dealing.batches import PlanLoader
from shardhet.training.loss_scaling import LossScaler


class TrainerView(Trainer):
    """A Trainer of a wrapped model, without what transformers does to models of its own."""

    het: HetFSDP
    plan: Plan
    rank_loss: Any  # a RankLoss
    collates_whole: bool  # every rank collates the whole batch and takes its rows
    padding_matters: bool | None  # so that it does so, too; None: not known yet
    loss_scaler: LossScaler | None  # with fp16=True
    train_loader: PlanLoader | None = None  # of the last or present training
    _args_as_given: TrainingArguments  # the caller's own, which may change
    _args_at_last: dict[str, Any]  # as they were when last looked at

    def follow_args(self) -> None:
        """Take over what the caller has changed in the arguments that were given."""
        found = vars(checked(self._args_as_given, self.plan))
        last, self._args_at_last = self._args_at_last, dict(found)
        changed = {name: found[name] for name in found if found[name] != last.get(name)}
        vars(self.args).update(changed)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: HetFSDP puts this rank's rows where they belong."""

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        return self.het

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the scale is part of the whole state."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: random states are part of the whole state."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: it is loaded with the optimizer's state."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: random states are part of the whole state."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Do nothing: parameters are loaded with the optimizer's state, once there is one."""

    def get_num_trainable_parameters(self) -> int:
        """Of the whole model, not of this rank's rows."""
        trainable = (flat for flat in self.het._flats if flat.is_trainable)
        return sum(slot.shape.numel() for flat in trainable for slot in flat.slots)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """The number of samples in an epoch."""
        return len(dataloader.dataset)  # type: ignore[arg-type]  # it has a length: see above
