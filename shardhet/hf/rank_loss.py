"""A rank's part of the loss: what transformers computes, as a sum over samples or tokens.

In stages the last one computes it within the model's forward: the runtime calls
``compute_loss`` where it would call the model, on all ranks; in stages before the last one it
ends in its middle.  So a step is one call with all rounds of all its batches.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from shardhet.fsdp.probing.module_state import restored_names
from shardhet.hf.losses import (
    IGNORED,
    LossKind,
    check_positions,
    find_kind,
    num_labels,
    probes,
    probes_in_stages,
)
from shardhet.hf.view import TrainerView
from shardhet.records.layout import Span
from shardhet.training.dealing.batches import num_rows, rounds_of, rows_of
from shardhet.training.loss_scaling import check_scale

STEPS_BEFORE_TRIED_AGAIN = 100  # at least, or as many as there were, so that it costs little


class RankLoss:
    """The loss of a rank's samples, as a sum over them that can be added to other ranks'."""

    def __init__(self, trainer: TrainerView) -> None:
        self.kind: LossKind | None = None  # found out on the first batch
        self._trainer = trainer
        self._found_at = 0  # the step at which it was last tried
        self._number = 1.0  # of items, which losses are divided by
        # Of the step in progress, if it has several rounds, and of all ranks
        self._num_items = 0.0  # in all batches, as transformers counts them
        # In each batch that comes next, with first positions and without
        self._num_labels: deque[tuple[float, float]] = deque()
        self._divisor: float | None = None  # of the batch in progress
        self._mean_before = 0.0  # what the batches before it add up to
        self._is_last_stage = trainer.het.position in trainer.plan.groups[-1]
        self._rounds: list[tuple[dict[str, Any], float | None]] = []  # kept, with divisors
        # What stages call in place of the module, with outputs and without
        self._within = [partial(self._computed_within, with_outputs=i) for i in (False, True)]

    def sums(
        self, inputs: dict[str, Any], *, with_outputs: bool = True
    ) -> tuple[Tensor, Tensor | int, Any]:
        """This rank's loss sum, the number of items in it, and perhaps the model's outputs."""
        self.find_kind(inputs)
        loss, outputs = self.loss_of(inputs, with_outputs=with_outputs)
        pair = self.summed(loss, inputs) if self._is_last_stage else (loss, 0)
        return *pair, outputs

    def find_kind(self, inputs: dict[str, Any], others: dict[str, Any] | None = None) -> None:
        """Find out the kind of the loss on the first batch, of which ``others`` are samples,
        too.  Collective.
        """
        trainer, names, between = self._trainer, self._trainer.label_names, None
        if self.kind is None:
            if trainer.plan.stages is None:
                tried = probes(inputs, names, self.num_classes)
                between = _of_another_rank(trainer, inputs, others or inputs)
            else:
                tried = probes_in_stages(trainer.het, inputs, names, self.num_classes)

            def loss_of(part: dict[str, Any], number: float) -> Tensor:
                with self._said_to_be(number):
                    return self.loss_of(part, with_outputs=False)[0]

            with leaving_nothing(trainer):
                self.kind = find_kind(
                    trainer.het,
                    tried,
                    names,
                    loss_of,
                    between=between,
                    predicts_next=self.predicts_next,
                )

    def try_again(self, after: float = STEPS_BEFORE_TRIED_AGAIN) -> None:
        """Let the kind be found out anew after so many steps, or twice as many as before the
        last time: it may have changed, or a term was zero as weights were (a new head's).
        """
        step = self._trainer.state.global_step
        if step - self._found_at >= min(self._found_at, after):
            self.kind, self._found_at = None, step

    @contextmanager
    def _said_to_be(self, number: float) -> Iterator[None]:
        """A context in which a batch is said to have another number of items than one."""
        self._number = number
        try:
            yield
        finally:
            self._number = 1.0

    @property
    def predicts_next(self) -> bool:
        """Whether the model's own loss is of the next token at each position."""
        return bool(self._trainer._loss_shifts_labels)

    @property
    def num_classes(self) -> int:
        """Of a model of transformers, which has two unless it says so; else 0."""
        config = getattr(self._trainer.model, "config", None)
        return int(getattr(config, "num_labels", 0) or 0)

    def summed(self, loss: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | int]:
        """What ``compute_loss`` gives, as a sum, and the number of items in it."""
        counted = self._num_counted(inputs) if self.kind is LossKind.SUM else None
        if counted is not None:
            return loss, counted  # on the device, whose forward the host does not wait for
        num_items = self._num_labels_in(inputs)
        check_positions(inputs, self._trainer.label_names)
        if not num_items:  # a mean over nothing would be NaN
            return torch.zeros((), device=self._trainer.args.device), 0
        return loss * num_items, num_items

    def _num_labels_in(self, inputs: dict[str, Any]) -> int:
        is_shifted = self.kind is LossKind.SHIFTED_MEAN
        return num_labels(inputs, self._trainer.label_names, is_shifted=is_shifted)

    def as_called(self, inputs: dict[str, Any], num_items: Tensor | None) -> dict[str, Any]:
        """The arguments that ``compute_loss`` passes to the model."""
        trainer = self._trainer
        takes_labels = trainer.label_smoother is None and trainer.compute_loss_func is None
        called = {name: v for name, v in inputs.items() if takes_labels or name != "labels"}
        if num_items is not None and trainer.model_accepts_loss_kwargs:
            called["num_items_in_batch"] = num_items
        return called

    def begin_step(self, batches: Sequence[Any], num_items_in_batch: Any) -> None:
        """Find out what the losses of a step's ``batches`` are divided by.  Collective.

        transformers takes the mean over the items of all batches, or, if it has not counted
        them (``num_items_in_batch`` is None), the mean of the batches' means.  Where a step has
        one round, the runtime counts.
        """
        trainer = self._trainer
        self.try_again(math.inf)
        self._num_labels.clear()
        self._rounds.clear()
        if trainer.het.rounds_left == 1:
            return
        labels = [
            float(num_labels(batch, trainer.label_names, is_shifted=is_shifted))
            for batch in batches
            for is_shifted in (False, True)
        ]
        leads = trainer.plan.leads(trainer.het.position)
        rows = trainer.het.exchange([n * leads for n in (num_items_in_batch or 0, *labels)])
        computing = (rows[i] for i in trainer.plan.groups[-1])
        self._num_items, *totals = map(sum, zip(*computing, strict=True))
        self._num_labels.extend(zip(totals[::2], totals[1::2], strict=True))

    def run_batch(self, inputs: dict[str, Any], num_items_in_batch: Any) -> float:
        """Forward and backward of all rounds of a batch; what it adds to the step's mean loss,
        of all ranks.
        """
        trainer = self._trainer
        rounds = rounds_of(inputs, trainer.plan, trainer.het.position)
        if trainer.plan.stages is not None:
            self.find_kind(inputs)
            self._begin_batch(num_items_in_batch)
            self._rounds += [(each, self._divisor) for each in rounds]
            return self._run_kept() if trainer.accelerator.sync_gradients else 0.0
        if trainer.accelerator.sync_gradients:  # a last step may have fewer batches
            no_rows = rows_of(inputs, Span(0, 0))
            rounds += [no_rows] * (trainer.het.rounds_left - len(rounds))
        self.find_kind(rounds[0], rounds[-1])
        for i, part in enumerate(rounds):
            with trainer.compute_loss_context_manager():
                loss_sum, num_items, _ = self.sums(part, with_outputs=False)
            if i == 0:
                self._begin_batch(num_items_in_batch)
            self._backward(loss_sum, num_items)
        return self.mean_so_far - self._mean_before

    def _run_kept(self) -> float:
        """Forward and backward of all rounds of a step in stages; its mean loss."""
        scaler = self._trainer.loss_scaler
        of_step = None if scaler is None else scaler.begin_step()
        rounds, divisors = zip(*self._rounds, strict=True)
        with self._trainer.het.computing(self._sum_within):
            mean = self._trainer.het.step_of(rounds, divisors, of_step)
        self.check_scale()
        return mean or 0.0

    def _begin_batch(self, num_items_in_batch: Any) -> None:
        """Go on to the next batch of the step; raises ``ValueError`` if it cannot be added."""
        trainer = self._trainer
        num_batches = trainer.args.gradient_accumulation_steps
        is_counted = num_items_in_batch is not None
        if is_counted and self.kind is not LossKind.SUM and num_batches > 1:
            raise ValueError(
                f"TrainingArguments: gradient_accumulation_steps={num_batches}, but the loss "
                "is a mean without num_items_in_batch: a plain Trainer adds up means. Leave it "
                f"out; for as many samples, give a plan {num_batches} times its num_rounds, or "
                'plan="auto" so many times per_device_train_batch_size.'
            )
        self._mean_before = 0.0 if trainer.het.is_between_steps else self.mean_so_far
        self._divisor = None
        if self._num_labels:
            labels = self._num_labels.popleft()[self.kind is LossKind.SHIFTED_MEAN]
            if not is_counted:
                self._divisor = labels * trainer.current_gradient_accumulation_steps or 1.0
            else:
                number = self._num_items if self.kind is LossKind.SUM else labels
                self._divisor = number or 1.0

    def _backward(self, loss_sum: Tensor, num_items: Tensor | int) -> None:
        """Add the gradients of a round, scaled with ``fp16=True``."""
        trainer = self._trainer
        het, scaler = trainer.het, trainer.loss_scaler
        if scaler is not None:
            loss_sum = scaler.scaled(loss_sum)
        het.backward(loss_sum, num_items, divisor=self._divisor)
        self.check_scale()

    def check_scale(self) -> None:
        """Raise ``FloatingPointError`` if gradients overflow at every scale of the loss."""
        scaler, step = self._trainer.loss_scaler, self._trainer.het.step
        if scaler is not None:
            check_scale(scaler.step_scale, step, instead="bf16=True, or leave fp16 out")

    @property
    def mean_so_far(self) -> float:
        """Of the step, or what its batches add up to; without the scale of ``fp16=True``."""
        scaler = self._trainer.loss_scaler
        return self._trainer.het.mean_so_far / (1.0 if scaler is None else scaler.step_scale)

    def loss_of(self, inputs: dict[str, Any], *, with_outputs: bool) -> tuple[Tensor, Any]:
        """The result of ``compute_loss`` for this rank's samples, as a sum if possible."""
        trainer = self._trainer
        if trainer.plan.stages is not None:
            with trainer.het.computing(self._within[with_outputs]):
                found: tuple[Tensor, Any] = trainer.het(**inputs)
            return found
        if not num_rows(inputs):
            trainer.het(**self.as_called(inputs, self._number_if_counted(inputs)))
            return torch.zeros((), device=trainer.args.device), None
        return self._computed(trainer.het, inputs, with_outputs=with_outputs)

    def _computed(
        self, model: nn.Module, inputs: dict[str, Any], *, with_outputs: bool
    ) -> tuple[Tensor, Any]:
        """What ``compute_loss`` returns, called as a plain Trainer calls it."""
        loss: Any = self._trainer.compute_loss(
            model,
            dict(inputs),
            return_outputs=with_outputs,
            num_items_in_batch=self._number_if_counted(inputs),
        )
        return loss if with_outputs else (loss, None)

    def _computed_within(
        self, module: nn.Module, *, with_outputs: bool, **inputs: Any
    ) -> tuple[Tensor, Any]:
        with self._trainer.compute_loss_context_manager():
            return self._computed(module, inputs, with_outputs=with_outputs)

    def _sum_within(self, module: nn.Module, **inputs: Any) -> tuple[Tensor, Tensor]:
        loss, _ = self._computed_within(module, with_outputs=False, **inputs)
        loss_sum, num_items = self.summed(loss, inputs)
        return loss_sum, torch.tensor(int(num_items))

    def _number_if_counted(self, inputs: dict[str, Any]) -> Tensor | None:
        """The number of items that ``compute_loss`` is told, so that it gives a sum."""
        if self._num_counted(inputs) is None:
            return None
        return torch.full((), self._number, device=self._trainer.args.device)

    def _num_counted(self, inputs: dict[str, Any]) -> Any:
        counted = [_with_own_labels(self._trainer, inputs)]
        return self._trainer._get_num_items_in_batch(counted, self._trainer.args.device)


def _with_own_labels(trainer: TrainerView, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with the labels that a member of a context group has."""
    labels = inputs.get("labels")
    if trainer.plan.context_groups is None or not isinstance(labels, Tensor):
        return inputs
    own = trainer.het.own_tokens(labels, are_labels=True)
    # transformers leaves out the first ones where the model shifts labels.
    return {**inputs, "labels": F.pad(own, (1, 0), value=IGNORED)}


@contextmanager
def counting_batches(trainer: TrainerView) -> Iterator[None]:
    """A context in which a step has ``gradient_accumulation_steps`` batches of the plan."""
    trainer.het.batches_per_step = trainer.args.gradient_accumulation_steps
    try:
        yield
    finally:
        trainer.het.batches_per_step = 1


def smoothed(
    trainer: TrainerView, model: nn.Module, inputs: dict[str, Any], num_items: Any
) -> tuple[Tensor, Any]:
    """The loss with label smoothing, and the model's outputs."""
    labels = inputs.pop("labels")
    outputs = model(**trainer.rank_loss.as_called(inputs, num_items))
    name = unwrap_peft_model(trainer.model)._get_name()
    assert trainer.label_smoother is not None
    loss = trainer.label_smoother(
        outputs,
        labels,
        shift_labels=name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        num_items_in_batch=num_items,
    )
    return loss, outputs


@torch.no_grad()
def untrained(trainer: TrainerView, inputs: dict[str, Any]) -> Tensor:
    """What ``compute_loss`` says of samples that are only looked at.  Collective."""
    was_training = trainer.het.training
    trainer.het.eval()
    with trainer.compute_loss_context_manager(), leaving_nothing(trainer):
        loss: Tensor = trainer.rank_loss.loss_of(inputs, with_outputs=False)[0]
    trainer.het.train(was_training)
    return loss


@contextmanager
def leaving_nothing(trainer: TrainerView) -> Iterator[None]:
    """A context in which ``compute_loss`` is only tried: what it keeps is put back."""
    before = dict(vars(trainer))
    with restored_names([trainer.compute_loss, trainer.compute_loss_func]):
        yield
    vars(trainer).clear()
    vars(trainer).update(before)


def _of_another_rank(
    trainer: TrainerView, inputs: dict[str, Any], others: dict[str, Any]
) -> Any:
    """The first of the ``others`` of the next rank with some; none for a rank without
    ``inputs``.  Collective.
    """
    mine = tree_map_only(Tensor, Tensor.cpu, rows_of(others, Span(0, 1)))
    rows = trainer.het.exchange_objects(mine)
    after = trainer.plan.context_group(trainer.het.position)[-1] + 1
    found = next(filter(num_rows, [*rows[after:], *rows[:after]]), mine)
    return trainer._prepare_inputs(found if num_rows(inputs) else inputs)
