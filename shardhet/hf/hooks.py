"""The hooks of a loop of one's own, called as a callback of transformers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import TrainerCallback

from shardhet.hf.resuming import inner
from shardhet.hf.view import TrainerView
from shardhet.training.dealing.batches import Share
from shardhet.training.hooks.checkpoints import SaveCheckpoints
from shardhet.training.hooks.hooks import Hook, Hooks
from shardhet.training.rebalancing import Rebalancer


class HookCallback(TrainerCallback):
    """Calls hooks before and after steps; saves and stops once a rank was told to end."""

    def __init__(self, trainer: TrainerView, hooks: Sequence[Hook]) -> None:
        """What hooks say of steps is logged as a Trainer logs."""
        self._trainer, self._hooks = trainer, tuple(hooks)
        self._plan = trainer.het.plan  # by which batches are dealt
        if any(isinstance(each, SaveCheckpoints) for each in hooks):
            raise ValueError(
                "HetTrainer: SaveCheckpoints is among its hooks, but it saves and resumes as a "
                "Trainer does. Set save_strategy and save_steps instead."
            )

        follows = any(isinstance(each, Rebalancer) and each.replans for each in hooks)
        if follows and trainer.args.dataloader_num_workers:
            raise ValueError(
                "HetTrainer: a Rebalancer may change the plan, but dataloader_num_workers="
                f"{trainer.args.dataloader_num_workers} workers read ahead by the one before. "
                "Set it to 0, or Rebalancer(replans=False)."
            )

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """A context of ``train``, with which the hooks end, or with its error."""
        with ExitStack() as self._training:
            yield

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """There is an optimizer."""
        run = Hooks(
            self._trainer.het,
            inner(kwargs["optimizer"]),
            self._hooks,
            log=self._log,
            has_scaler=self._trainer.loss_scaler is not None,
        )
        self._run = self._training.enter_context(run)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first batch of a step."""
        self._run.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the update.  All ranks decide alike whether to end, in the same step."""
        self._run.after_step(self._trainer.rank_loss.mean_so_far)
        het, loader = self._trainer.het, self._trainer.train_loader
        if het.plan is not self._plan:
            assert loader is not None, "a step was trained"
            self._plan = self._trainer.plan = het.plan
            loader.set_share(Share.of_step(het.plan, het.position))
        if self._run.is_over:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training may be told to stop in the middle of a step; its gradients are dropped."""
        self._trainer.het.drop_rounds()

    def _log(self, step: int, values: Any) -> None:
        control = self._trainer.control
        is_due = control.should_log  # its own log of the step, which has the loss
        self._trainer.log({name: each for name, each in values.items() if name != "loss"})
        control.should_log = is_due
